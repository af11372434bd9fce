"""Composition by privacy loss distributions.

The distributions are discretised pessimistically (connect the dots), both directions of adjacency
are composed apart and the larger epsilon is taken, so that the result is an upper bound.

The privacy loss of a menu: a pair of distributions that dominates whatever is chosen from it.

The hockey-stick divergence of every choice, repeated as often as it is, is found on one grid, and
the largest counts at each of its points. That is again the profile of a pair of distributions,
since the largest of convex functions of e^epsilon is convex (docs/privacy.md). Between the points,
below and above them the profile is replaced by one that lies above it (connect the dots).
"""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from dpsur.errors import InvalidInputError
from dpsur.privacy.accountants import proven
from dpsur.privacy.accountants.losses import (
    Floats,
    LossDistribution,
    Losses,
    connect,
    discretise,
    joining,
    on_grid,
    pure,
    repeat,
    sampled_gaussian,
)
from dpsur.privacy.accountants.selective.divergence import COARSE, Interval
from dpsur.privacy.accountants.selective.pair import Direction
from dpsur.privacy.accountants.selective.profile import block_profiles
from dpsur.privacy.events import (
    Event,
    Gaussian,
    Menu,
    NoisyChoice,
    NonPrivate,
    SampledGaussian,
    mechanisms,
    precision,
)
from dpsur.privacy.search import code


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


# At this width the bound is within 0.1% of one ten times finer at every setting of the paper.
DISCRETIZATION = 1e-3
# A composition that reaches further than this many cells is put on wider ones. Every width gives an
# upper bound; without a limit a small noise would need more cells than there is memory.
MOST_CELLS = 2**20
# Losses much smaller than a cell would each be rounded up to a part of it, so cells follow them.
CELLS_OF_A_STEP = 3
# Beyond this width there are too few floating-point numbers.
WIDEST_CELL = 64.0
# Rounding of the transforms by which distributions are composed, per composed part and taken from
# delta: some hundred times what is seen against closed forms (2e-13 after ten thousand parts).
ROUNDING = 2.0**-47
PROFILES = "profiles-1"  # a stored figure belongs to one version of the computation
# Accepted updates are dominated in blocks of this many: longer ones are tighter and take longer.
BLOCK = 16


_Part = Event | proven.SelectiveUpdate


@lru_cache(maxsize=64)
def _block(update: proven.SelectiveUpdate, length: int, width: float) -> LossDistribution:
    """A pair that dominates a block of accepted updates; refuses where none can be computed."""
    both = []
    for direction in proven.DIRECTIONS:
        profiles = block_profiles(*update, direction, BLOCK)
        if profiles is None:
            raise _NotComputableError
        both.append(on_grid(profiles[length - 1].points, profiles[length - 1].at, width))
    return LossDistribution(width, *both)


class _NotComputableError(Exception):
    """Distributions cannot be computed; the bound by Rényi divergences is to be used."""


def _composed(event: _Part, count: int, width: float) -> LossDistribution:
    match event:
        case proven.SelectiveUpdate():
            blocks, rest = divmod(count, BLOCK)
            parts = [_block(event, BLOCK, width).repeated(blocks)] if blocks else []
            parts += [_block(event, rest, width)] if rest else []
            return parts[0] if len(parts) == 1 else parts[0].composed(parts[1])
        case Gaussian(noise_multiplier=sigma):  # composed with itself it is a Gaussian
            return sampled_gaussian(SampledGaussian(1.0, sigma / math.sqrt(count)), width)
        case SampledGaussian():
            return sampled_gaussian(event, width).repeated(count)
        case NoisyChoice():
            return pure(event.amplified, width).repeated(count)
        case Menu():
            return dominating(event, width).repeated(count)
    raise InvalidInputError(f"unknown privacy event: {event!r}")


class _Shape(NamedTuple):
    """About how the privacy loss of a composition is spread. It decides the width, nothing else."""

    step: float  # standard deviation of one part; infinite where there is one part only
    reach: float  # of the whole


def _shape(event: _Part, count: int) -> _Shape:
    together = 1  # parts that are composed as one
    match event:
        case NoisyChoice():
            return _Shape(event.amplified, count * event.amplified)
        case Menu(choices=choices, repeats=repeats):
            shapes = [_shape(choice, repeats * count) for choice in choices]
            return _Shape(min(one.step for one in shapes), max(one.reach for one in shapes))
        case proven.SelectiveUpdate(noise_multiplier=sigma):
            whole = proven.Composition(((event, 1),))
            mean = max(whole.divergence(2.0, d, COARSE).upper for d in proven.DIRECTIONS)
            variance = math.expm1(min(mean, 50.0))
            largest = precision(sigma) / 2 + 10 / sigma
            together = min(count, BLOCK)
        case SampledGaussian(records=records) if records > 1:
            counts, chances = joining(event)
            precise = precision(event.noise_multiplier)
            powers = np.minimum(np.outer(counts, counts) * precise, 700.0)
            chi_square = float(chances @ np.expm1(powers) @ chances)
            joined = float(chances @ counts**2) * precise / 2
            mean = min(joined, math.log1p(chi_square))
            variance = min(joined * (records**2 * precise / 2 + 2), chi_square)
            largest = records**2 * precise / 2 + 10 * records / event.noise_multiplier
        case SampledGaussian() | Gaussian():
            q = 1.0 if isinstance(event, Gaussian) else event.sample_rate
            unsampled = precision(event.noise_multiplier) / 2
            # The chi-square divergence gives mean and variance where the noise is large. Where it
            # is small, a record in the batch shows plainly and one outside of it not at all.
            chi_square = q * q * math.expm1(min(2 * unsampled, 700.0))
            mean = min(q * unsampled, math.log1p(chi_square))
            variance = min(q * unsampled * (unsampled + 2), chi_square)
            largest = unsampled + 10 / event.noise_multiplier
        case _:
            return _Shape(math.inf, 0.0)
    reach = count * mean + 8 * math.sqrt(count * variance) + largest
    alone = count == 1 and not isinstance(event, proven.SelectiveUpdate)
    return _Shape(math.inf if alone else math.sqrt(variance * together), reach)


def cell_width(parts: Sequence[tuple[_Part, int]]) -> float:
    """The width of a cell, by powers of two so that distributions can be used again.

    Narrow enough for the loss of one part, within reason, and wide enough for MOST_CELLS to do.
    """
    shapes = [_shape(part, count) for part, count in parts]
    reach = math.fsum(shape.reach for shape in shapes)
    if not reach < math.inf:
        return math.inf
    least = min(shape.step for shape in shapes) / CELLS_OF_A_STEP
    wanted = math.floor(math.log2(max(min(least, DISCRETIZATION) / DISCRETIZATION, 1e-4)))
    needed = math.ceil(math.log2(max(reach, DISCRETIZATION) / (MOST_CELLS * DISCRETIZATION)))
    return float(DISCRETIZATION * 2.0 ** max(wanted, needed))


def rounding(parts: Sequence[tuple[_Part, int]]) -> float:
    repeats = (part.repeats if isinstance(part, Menu) else 1 for part, _ in parts)
    return ROUNDING * sum(count * each for (_, count), each in zip(parts, repeats, strict=True))


def composed_epsilon(charges: Sequence[tuple[Event, int]], delta: float) -> float:
    """Epsilon at delta of events, each repeated a number of times fixed in advance.

    Formal guarantee: an upper bound for any noise. Where it, or delta, is so small that
    distributions cannot be computed, it is the bound by Rényi divergences, which is looser, or
    infinity.
    """
    parts = [(part, count) for event, count in charges if count for part in mechanisms(event)]
    found = _epsilon(parts, delta)
    return proven.composed_epsilon(proven.compose(parts), delta).upper if found is None else found


def accepted_epsilon(charges: Sequence[tuple[Event, int]], delta: float) -> float:
    """The same where a trial with a gate is an accepted update, and rejections are not charged.

    Formal guarantee: as of `composed_epsilon`, for the sequence of accepted updates together with
    the other events. Infinite where distributions cannot be computed.
    """
    accepted: Counter[proven.SelectiveUpdate] = Counter()
    others: list[tuple[_Part, int]] = []
    for event, count in charges:
        selected = proven.selected_update(event)
        if selected is not None:
            accepted[selected] += count
        elif count:
            others += [(part, count) for part in mechanisms(event)]
    parts = [*((part, count) for part, count in accepted.items() if count), *others]
    store = proven.known(next(iter(accepted))) if any(accepted.values()) else None
    upper, label = math.inf, f"{PROFILES} {BLOCK} {code()} {float(delta).hex()} {parts!r}"
    value = None if store is None else store.get(label)
    if value is not None:
        return value.upper
    with suppress(_NotComputableError):
        found = _epsilon(parts, delta)
        upper = upper if found is None else found
    if store is not None:
        store.put(label, Interval(0.0, upper))
        store.flush()
    return upper


def _epsilon(parts: Sequence[tuple[_Part, int]], delta: float) -> float | None:
    """Epsilon by distributions; None where they cannot be computed."""
    if not parts:
        return 0.0
    if any(isinstance(part, NonPrivate) for part, _ in parts):
        return math.inf
    width, paid = cell_width(parts), rounding(parts)
    if width > WIDEST_CELL or delta <= 2 * paid:
        return None
    return _total(tuple(parts), width).epsilon(delta - paid)


def composed_delta(charges: Sequence[tuple[Event, int]], epsilon: float) -> float:
    """Delta at an epsilon, of the same events; 1 where distributions cannot be computed."""
    parts = [(part, count) for event, count in charges if count for part in mechanisms(event)]
    if not parts:
        return 0.0
    if any(isinstance(part, NonPrivate) for part, _ in parts):
        return 1.0
    width = cell_width(parts)
    if width > WIDEST_CELL:
        return 1.0
    return min(1.0, _total(tuple(parts), width).delta(epsilon) + rounding(parts))


@lru_cache(maxsize=4)
def _total(parts: tuple[tuple[_Part, int], ...], width: float) -> LossDistribution:
    total, *others = (_composed(part, count, width) for part, count in parts)
    for other in others:
        total = total.composed(other)
    return total
