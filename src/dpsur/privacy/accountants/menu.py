"""The privacy loss of a menu: a pair of distributions that dominates whatever is chosen from it.

The hockey-stick divergence of every choice, repeated as often as it is, is found on one grid, and
the largest counts at each of its points. That is again the profile of a pair of distributions,
since the largest of convex functions of e^epsilon is convex (docs/privacy.md). Between the points,
below and above them the profile is replaced by one that lies above it (connect the dots).
"""

import math
from functools import lru_cache
from itertools import accumulate

import numpy as np

from dpsur.privacy.accountants.losses import (
    Floats,
    LossDistribution,
    Losses,
    connect,
    discretise,
    repeat,
)
from dpsur.privacy.accountants.selective.pair import Direction
from dpsur.privacy.events import Menu


@lru_cache(maxsize=64)
def dominating(menu: Menu, width: float) -> LossDistribution:
    """A privacy loss distribution that dominates every choice of the menu.

    Formal guarantee: in each direction its hockey-stick divergence is, at every epsilon, at least
    that of each choice repeated `menu.repeats` times, up to the rounding of transforms.
    """
    return LossDistribution(width, _largest(menu, width, "add"), _largest(menu, width, "remove"))


def _largest(menu: Menu, width: float, direction: Direction) -> Losses:
    """The pair whose profile is the largest of the choices' at every point of the grid."""
    parts = [repeat(discretise(choice, width, direction), menu.repeats) for choice in menu.choices]
    first, last = min(part.first for part in parts), max(part.last for part in parts)
    largest = np.zeros(last - first + 1)
    for part in parts:
        np.maximum(largest, _profile(part, first, last, width), out=largest)
    return connect(first, largest, width)


def _profile(losses: Losses, first: int, last: int, width: float) -> Floats:
    """The hockey-stick divergence at every cell of a grid that holds those of the losses.

    A chance p of a loss in cell j adds p (1 - e^{-(j - i) width}) at cell i. Summed from above by a
    recurrence of positive terms, so that small values are exact to their last digits.
    """
    falls = math.nextafter(math.exp(-width), 1.0)  # rounded up: its error adds up over the cells
    # SciPy has a filter for it, which takes longer to import than this takes.
    above = list(accumulate(losses.chances[::-1].tolist(), lambda sum, one: falls * sum + one))
    rises = np.cumsum(-math.expm1(-width) * np.array(above[:-1]))
    inner = losses.infinite + np.append(0.0, rises)[::-1]
    # Below the least loss the profile is straight, and it ends at the sum of all chances.
    whole = losses.infinite + float(losses.chances.sum())
    low = np.arange(first, losses.first)
    below = whole - np.exp((low - losses.first) * width) * (whole - inner[0])
    beyond = np.full(last - losses.last, losses.infinite)
    return np.concatenate((below, inner, beyond))
