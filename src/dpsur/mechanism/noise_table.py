"""The discrete Gaussian as integers: the table that every noise is drawn from.

A discrete Gaussian gives an integer k a probability in proportion to e^(-k^2 / 2 s^2). One that is
as fine as noise has to be (`DEVIATION` steps to a standard deviation) is made of two coarse ones of
the same deviation, `FACTOR` times the first plus the second. Both are drawn from one table by the
alias method: a word of 32 bits names one of 2^15 columns and says, by its 17 other bits, whether
the draw is the column's own value or its alias. Where these bits are those of the column's limit,
once in 2^17 draws, 128 further bits decide. So every value has exactly the probability `weights`
over 2^160; docs/privacy.md says how far that is from a Gaussian, and why it protects as much.
"""

import math
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

BITS: Final = 15  # of a column
LIMIT_BITS: Final = 17  # of its limit that are compared first
REST_BITS: Final = 128  # of its limit that are compared where the first ones are equal
COLUMNS: Final = 2**BITS
CENTRE: Final = COLUMNS // 2  # the column of the value 0
SMALL_DEVIATION: Final = 1266
FACTOR: Final = 632
# Of a Gaussian on the real numbers that what is drawn protects at least as well as.
DEVIATION: Final = SMALL_DEVIATION * math.sqrt(1 + FACTOR**2) * (1 - 1e-11)
# How far all that is drawn for one number is from discrete Gaussians, in total variation.
DISTANCE: Final = 2.0**-123


class Table(NamedTuple):
    """`entries` holds limit and alias of each column, `rest` two words of the limit's other bits.

    Unsigned numbers, which on a device are kept as signed ones of as many bits.
    """

    entries: np.ndarray[tuple[int], np.dtype[np.uint32]]
    rest: np.ndarray[tuple[int, int], np.dtype[np.uint64]]


def weights() -> list[int]:
    """What each column's value weighs, of 2^160, rounded down; the value 0 has what is left."""
    precision = 400
    one = 1 << precision
    step = _exponential(2 * SMALL_DEVIATION**2, precision)  # e^(-1 / 2 s^2)
    double, value, ratio, found = step * step >> precision, one, step, [one]
    for _ in range(CENTRE - 1):
        value = value * ratio >> precision
        ratio = ratio * double >> precision
        found.append(value)
    whole = 1 << BITS + LIMIT_BITS + REST_BITS
    total = 2 * sum(found) - found[0]
    tail = [value * whole // total for value in found[1:]]
    return [0, *reversed(tail), whole - 2 * sum(tail), *tail]


def _exponential(divisor: int, precision: int) -> int:
    """e^(-1 / divisor) in fixed point, by its series."""
    term = total = 1 << precision
    for number in range(1, precision):
        term = -(term // (divisor * number)) if number % 2 else abs(term) // (divisor * number)
        total += term
    return total


@cache
def table() -> Table:
    """The table, made once in a process."""
    room = 1 << LIMIT_BITS + REST_BITS
    left = weights()
    alias, limits = list(range(COLUMNS)), [0] * COLUMNS
    small = [column for column, weight in enumerate(left) if weight < room]
    large = [column for column, weight in enumerate(left) if weight > room]
    while small:
        column = small.pop()
        giver = large[-1]
        limits[column], alias[column] = left[column], giver
        left[giver] -= room - left[column]
        if left[giver] <= room:
            large.pop()
            if left[giver] < room:
                small.append(giver)
    most = (1 << 64) - 1
    entries = [
        limit >> REST_BITS << BITS | other for limit, other in zip(limits, alias, strict=True)
    ]
    rest = [(limit >> 64 & most, limit & most) for limit in limits]
    return Table(np.array(entries, dtype=np.uint32), np.array(rest, dtype=np.uint64))


@cache
def table_on(device: torch.device) -> tuple[Tensor, Tensor]:
    """The table on a device, where it stays, so that a captured trial can read it."""
    entries, rest = table()
    return (
        torch.from_numpy(entries.view(np.int32)).to(device),
        torch.from_numpy(rest.view(np.int64)).to(device),
    )
