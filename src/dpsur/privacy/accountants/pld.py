"""Composition by privacy loss distributions on a grid.

A loss is a whole number of cells of one width. A mechanism is discretised by connecting the dots:
its hockey-stick divergence is known in closed form at the points of the grid, and between, below
and above them it is replaced by one that lies above it. Mass that is cut off at the upper end
becomes an infinite loss, mass at the lower end moves up. Both directions of adjacency are composed
apart and the larger epsilon is taken. So every figure is an upper bound, but for the rounding of
transforms, which `ROUNDING` pays for. Tests hold the figures against dp-accounting and against
integrals to many digits.

The privacy loss of a menu: a pair of distributions that dominates whatever is chosen from it.

The hockey-stick divergence of every choice, repeated as often as it is, is found on one grid, and
the largest counts at each of its points. That is again the profile of a pair of distributions,
since the largest of convex functions of e^epsilon is convex (docs/privacy.md). Between the points,
below and above them the profile is replaced by one that lies above it (connect the dots).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import gammaln, log_ndtr, logsumexp, ndtr

from dpsur.errors import InvalidInputError
from dpsur.privacy.accountants import proven
from dpsur.privacy.accountants.selective.divergence import COARSE, Interval
from dpsur.privacy.accountants.selective.pair import Direction
from dpsur.privacy.accountants.selective.profile import Profile, block_profiles
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

Floats = NDArray[np.float64]
# Beyond this many standard deviations noise is rounded to an infinite loss (a chance of 1e-23).
FARTHEST_NOISE = 10.0
# More noise is charged as this much: its square is still a floating-point number.
MOST_NOISE = 1e100
# Where the ratio of two densities is looked up first, and steps to the place where it has a value.
COARSE_PLACES, NEWTON_STEPS = 4097, 60
# The chance that a composition rounds up to an infinite loss.
CUT_OFF = 1e-15
TILTS = 2.0 ** np.array([0.0, -0.25, 0.25, -0.5, 0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0, 1.0])
RARE_TILTS = 2.0 ** np.arange(1.0, 6.0)


class Losses(NamedTuple):
    """Chances of privacy losses in whole cells, from cell `first` on, and of an infinite one."""

    first: int
    chances: Floats
    infinite: float

    @property
    def last(self) -> int:
        return self.first + len(self.chances) - 1


@dataclass(frozen=True, eq=False)
class LossDistribution:
    """The losses of a mechanism in both directions of adjacency, in cells of one width.

    `add` has the law with the record in front, `remove` the law without it.
    """

    width: float
    add: Losses
    remove: Losses

    def repeated(self, count: int) -> "LossDistribution":
        if count == 1:
            return self
        return LossDistribution(self.width, repeat(self.add, count), repeat(self.remove, count))

    def composed(self, other: "LossDistribution") -> "LossDistribution":
        if self.width != other.width:
            raise ValueError(f"cells of widths {self.width} and {other.width} cannot be composed")
        return LossDistribution(
            self.width, convolve(self.add, other.add), convolve(self.remove, other.remove)
        )

    def epsilon(self, delta: float) -> float:
        return max(epsilon_at(losses, self.width, delta) for losses in (self.add, self.remove))

    def delta(self, epsilon: float) -> float:
        return max(delta_at(losses, self.width, epsilon) for losses in (self.add, self.remove))


@lru_cache(maxsize=64)
def sampled_gaussian(event: SampledGaussian, width: float) -> LossDistribution:
    return LossDistribution(
        width, discretise(event, width, "add"), discretise(event, width, "remove")
    )


@lru_cache(maxsize=64)
def pure(epsilon: float, width: float) -> LossDistribution:
    """The losses of any mechanism without a delta: randomised response dominates it."""
    high, low = math.ceil(epsilon / width), math.ceil(-epsilon / width)
    chances = np.zeros(high - low + 1)
    chances[0] += 1 / (1 + math.exp(min(epsilon, 700.0)))
    chances[-1] += 1 / (1 + math.exp(-epsilon))
    losses = Losses(low, chances, 0.0)
    return LossDistribution(width, losses, losses)


def on_grid(profile: Profile, width: float) -> Losses:
    """The losses of a pair whose profile lies above the given one."""
    first, last = (math.log(profile.points[end]) / width for end in (0, -1))
    cells = np.arange(math.floor(first), math.ceil(last) + 1)
    return connect(math.floor(first), profile.at(np.exp(cells * width)), width)


def hockey_stick(event: SampledGaussian, epsilons: Floats, direction: Direction) -> Floats:
    """The hockey-stick divergence of a sampled Gaussian at every epsilon, in closed form.

    `add` is the law P with the record against the law Q without it, `remove` the other way round.
    With q the rate and s the noise, P / Q = 1 - q + q e^{(2x-1)/2s^2} rises with x, so that the
    worst event is a half line, which ends where the ratio is e^epsilon.
    """
    if event.records > 1:
        return _mixture(event, epsilons, direction)
    q, s = event.sample_rate, event.noise_multiplier
    sign = 1.0 if direction == "add" else -1.0
    # e^{(2x-1)/2s^2} at the end of the half line is this over q; where it is not above 0, the
    # half line is the whole line or empty.
    log_rest, inside = _log_rest(sign * epsilons, q)
    cut = s * s * (log_rest - math.log(q)) + 0.5
    with np.errstate(over="ignore", invalid="ignore"):
        if direction == "add":
            found = q * ndtr((1 - cut) / s) - np.exp(log_rest + log_ndtr(-cut / s))
            found = np.where(inside, found, -np.expm1(epsilons))
        else:
            apart = np.exp(epsilons + log_rest + log_ndtr(cut / s))
            found = apart - np.exp(epsilons + math.log(q) + log_ndtr((cut - 1) / s))
            found = np.where(inside, found, 0.0)
    # What cannot be computed counts as the worst.
    clipped: Floats = np.clip(np.nan_to_num(found, nan=1.0), 0.0, 1.0)
    return clipped


def joining(event: SampledGaussian) -> tuple[Floats, Floats]:
    """How many of a person's records can join a sample, and with which chances.

    Numbers that are less likely than 1e-30 together are left out.
    """
    counts = np.arange(event.records + 1.0)
    if event.sample_rate == 1.0:
        return counts[-1:], np.ones(1)
    q = event.sample_rate
    logs = gammaln(event.records + 1) - gammaln(counts + 1) - gammaln(event.records - counts + 1)
    chances = np.exp(logs + counts * math.log(q) + (event.records - counts) * math.log1p(-q))
    likely = np.cumsum(chances[::-1])[::-1] > 1e-30
    return counts[likely], chances[likely]


def _log_ratio(event: SampledGaussian, places: Floats) -> Floats:
    """log of P / Q at some places: of a mixture of shifted Gaussians to the one without a shift."""
    counts, chances = joining(event)
    s = event.noise_multiplier
    # one shift after the other, so that memory does not grow with their number
    found = np.full(len(places), -np.inf)
    for count, chance in zip(counts, chances, strict=True):
        found = np.logaddexp(found, math.log(chance) + count * (2 * places - count) / (2 * s * s))
    return found


def _half_lines(event: SampledGaussian, ratios: Floats) -> Floats:
    """Where log P / Q has these values: an end that is off changes a divergence by the square.

    It rises and is convex, so that Newton's steps from the right stay on the right. Beyond the
    farthest noise the half line is the whole line or empty.
    """
    reach = 2 * FARTHEST_NOISE * event.noise_multiplier
    places = np.linspace(-reach - event.records, reach + 2.0 * event.records, COARSE_PLACES)
    after = np.searchsorted(_log_ratio(event, places), ratios)
    low, ends = places[np.maximum(after - 1, 0)], places[np.minimum(after, COARSE_PLACES - 1)]
    counts, chances = joining(event)
    variance = event.noise_multiplier**2
    for _ in range(NEWTON_STEPS):
        above = _log_ratio(event, ends)
        slope = np.zeros(len(ends))
        for count, chance in zip(counts[counts > 0], chances[counts > 0], strict=True):
            exponents = math.log(chance) + count * (2 * ends - count) / (2 * variance) - above
            slope += count / variance * np.exp(exponents)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            step = np.where(slope > 0, (above - ratios) / slope, 0.0)
        following = np.clip(ends - step, low, ends)
        moved = float(np.max(ends - following, initial=0.0))
        ends = following
        if moved <= 1e-13 * event.noise_multiplier:
            break
    return ends


def _mixture(event: SampledGaussian, epsilons: Floats, direction: Direction) -> Floats:
    """The same where each of a person's records joins on its own.

    P is the mixture of Gaussians with a shift of j and the chance that j records join (arXiv
    2407.07737), and P / Q still rises with x.
    """
    counts, chances = joining(event)
    s = event.noise_multiplier
    ends = _half_lines(event, epsilons if direction == "add" else -epsilons)
    found = np.zeros(len(epsilons))
    with np.errstate(over="ignore", invalid="ignore"):
        if direction == "add":
            for count, chance in zip(counts, chances, strict=True):
                found += chance * ndtr((count - ends) / s)
            found -= np.exp(epsilons + log_ndtr(-ends / s))
            found += max(0.0, 1 - float(chances.sum()))  # what was left out
        else:
            found += ndtr(ends / s)
            for count, chance in zip(counts, chances, strict=True):
                found -= np.exp(epsilons + math.log(chance) + log_ndtr((ends - count) / s))
    clipped: Floats = np.clip(np.nan_to_num(found, nan=1.0), 0.0, 1.0)
    return clipped


def _log_rest(epsilons: Floats, q: float) -> tuple[Floats, NDArray[np.bool_]]:
    """log(e^epsilon - 1 + q), and where that exists."""
    if q == 1.0:
        return epsilons, np.ones(len(epsilons), dtype=bool)
    inside = epsilons > math.log1p(-q)
    small = np.where(inside, np.minimum(epsilons, 1.0), 0.0)
    large = np.maximum(epsilons, 1.0)
    # Each of the two where it does not cancel: beside a rate near 1 the rest is far below it.
    rest = np.where(small < -math.log(2), np.exp(small) - (1 - q), np.expm1(small) + q)
    rest = np.maximum(rest, 1e-300)
    return np.where(
        epsilons > 1.0, large + np.log1p((q - 1) * np.exp(-large)), np.log(rest)
    ), inside


def discretise(event: SampledGaussian, width: float, direction: Direction) -> Losses:
    event = replace(event, noise_multiplier=min(event.noise_multiplier, MOST_NOISE))
    q, s = event.sample_rate, event.noise_multiplier
    ends = np.array([-FARTHEST_NOISE * s, event.records + FARTHEST_NOISE * s])
    if event.records > 1:
        losses = _log_ratio(event, ends)
    else:
        with np.errstate(divide="ignore"):
            outside = np.log1p(np.float64(-q))
        losses = np.logaddexp(outside, math.log(q) + (2 * ends - 1) / (2 * s * s))
    low, high = losses if direction == "add" else -losses[::-1]
    first = math.floor(low / width)
    last = max(first + 1, math.ceil(high / width))  # of huge noise both ends are a loss of 0
    grid = np.arange(first, last + 1) * width
    return connect(first, hockey_stick(event, grid, direction), width)


def connect(first: int, deltas: Floats, width: float) -> Losses:
    """The losses on a grid whose profile goes through the deltas and is straight between them.

    Straight over e^epsilon, so that it lies above every convex profile through the same points.
    """
    # A profile falls. Where rounding says otherwise, the larger value counts.
    deltas = np.maximum.accumulate(np.minimum(deltas, 1.0)[::-1])[::-1]
    steps = np.diff(deltas)
    chances = np.empty_like(deltas)
    chances[0] = 1 - deltas[0] + steps[0] / math.expm1(width)
    # (next step - step e^width) / (e^width - 1), without the rounding of e^width, which adds up.
    chances[1:-1] = np.diff(steps) / math.expm1(width) - steps[:-1]
    chances[-1] = steps[-1] / math.expm1(-width)
    return Losses(first, np.maximum(chances, 0.0), float(deltas[-1]))


def repeat(losses: Losses, count: int) -> Losses:
    """The losses of this many independent repetitions; their farthest tails count as infinite."""
    if count == 1:
        return losses
    low, high = ends(losses.chances, count)
    length = high - low + 1
    size = next_fast_len(max(length, len(losses.chances)), real=True)
    around = irfft(rfft(losses.chances, size) ** count, size)  # in a circle, tails on top
    chances = np.maximum(np.roll(around, -low)[:length], 0.0)
    infinite = CUT_OFF - math.expm1(count * math.log1p(-min(losses.infinite, 1 - 1e-16)))
    return Losses(count * losses.first + low, chances, min(infinite, 1.0))


def convolve(one: Losses, other: Losses) -> Losses:
    """The losses of two independent mechanisms together, without the ends where nothing is."""
    length = len(one.chances) + len(other.chances) - 1
    size = next_fast_len(length, real=True)
    chances = irfft(rfft(one.chances, size) * rfft(other.chances, size), size)[:length]
    np.maximum(chances, 0.0, out=chances)
    first = one.first + other.first
    infinite = one.infinite + other.infinite - one.infinite * other.infinite
    # The lower end moves up into the first cell that is left, the upper end to infinity.
    low = int(np.searchsorted(np.cumsum(chances), CUT_OFF / 2, side="right"))
    high = length - int(np.searchsorted(np.cumsum(chances[::-1]), CUT_OFF / 2, side="right"))
    low = min(low, length - 1)
    high = max(high, low + 1)
    left = chances[low:high].copy()
    left[0] += chances[:low].sum()
    return Losses(first + low, left, min(infinite + float(chances[high:].sum()), 1.0))


def ends(chances: Floats, count: int) -> tuple[int, int]:
    """Cells between which a sum of this many draws lies but for a chance of CUT_OFF.

    By Chernoff's bound, for any tilts; near the first of them it is best for a Gaussian,
    near the last ones where a few rare draws make up the sum.
    """
    cells = np.arange(len(chances))
    mean = float(chances @ cells)
    spread = math.sqrt(max(float(chances @ (cells - mean) ** 2), 1e-12))
    unlikely = -math.log(CUT_OFF / 2)
    usual = math.sqrt(2 * unlikely / count) / spread
    tilts = np.concatenate((usual * TILTS, RARE_TILTS / len(chances)))
    with np.errstate(divide="ignore"):
        logs = np.log(chances)
    below, above = (
        min((count * float(logsumexp(tilt * side + logs)) + unlikely) / tilt for tilt in tilts)
        for side in (mean - cells, cells - mean)
    )
    low, high = count * mean - below, count * mean + above
    return math.floor(max(low, 0)), math.ceil(min(high, (len(chances) - 1) * count))


def delta_at(losses: Losses, width: float, epsilon: float) -> float:
    start = max(math.floor(epsilon / width) + 1 - losses.first, 0)
    above = losses.chances[start:]
    cells = (np.arange(len(above)) + (losses.first + start)) * width
    return losses.infinite - float(np.expm1(np.minimum(epsilon - cells, 0.0)) @ above)


def epsilon_at(losses: Losses, width: float, delta: float) -> float:
    """The smallest epsilon of at least 0 at which the hockey-stick divergence is at most delta."""
    if losses.infinite > delta:
        return math.inf
    if delta_at(losses, width, 0.0) <= delta:
        return 0.0
    # The divergence falls from cell to cell, and is at most delta at the last one.
    over, fits = 0, losses.last
    while fits - over > 1:
        middle = (over + fits) // 2
        if delta_at(losses, width, middle * width) <= delta:
            fits = middle
        else:
            over = middle
    # Between two cells it is all - e^(epsilon - over) lower, over the losses above.
    above = losses.chances[max(fits - losses.first, 0) :]
    cells = np.arange(len(above)) + max(fits, losses.first) - over
    lower = float(np.exp(-cells * width) @ above)
    rest = losses.infinite + float(above.sum()) - delta
    if lower == 0.0:  # cells so wide that their weights vanish
        return fits * width
    return min(over * width + max(math.log(rest / lower), 0.0), fits * width)


# --- events, composed -----------------------------------------------------------------------------


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
    """A pair that dominates a block of accepted updates, by infinite losses if need be."""
    both = [Losses(0, np.ones(1), 1.0)] * 2
    for place, direction in enumerate(proven.DIRECTIONS):
        profiles = block_profiles(*update, direction, BLOCK)
        if profiles is not None:
            both[place] = on_grid(profiles[length - 1], width)
    return LossDistribution(width, *both)


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
    return ROUNDING * sum(count * getattr(part, "repeats", 1) for part, count in parts)


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
    label = f"{PROFILES} {BLOCK} {code()} {float(delta).hex()} {parts!r}"
    value = None if store is None else store.get(label)
    if value is not None:
        return value.upper
    found = _epsilon(parts, delta)
    upper = math.inf if found is None else found
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
