"""The privacy loss of a menu: a pair of distributions that dominates whatever is chosen from it.

The hockey-stick divergence of every choice, repeated as often as it is, is found on one grid, and
the largest counts at each of its points. That is again the profile of a pair of distributions,
since the largest of convex functions of e^epsilon is convex (docs/privacy.md). Between the points,
below and above them the profile is replaced by one that lies above it (connect the dots).
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import log_ndtr, logsumexp, ndtr

from dpsur.privacy.accountants.selective.pair import Direction
from dpsur.privacy.events import Menu, SampledGaussian

Floats = NDArray[np.float64]
# Beyond so many standard deviations noise is rounded to an infinite loss (a chance of 1e-23).
FARTHEST_NOISE = 10.0
# The chance that repetitions together round up to an infinite loss, as dp-accounting does.
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
        """The cell of the largest finite loss."""
        return self.first + len(self.chances) - 1


def hockey_stick(event: SampledGaussian, epsilons: Floats, direction: Direction) -> Floats:
    """The hockey-stick divergence of a sampled Gaussian at every epsilon, in closed form.

    `add` is the law P with the record against the law Q without it, `remove` the other way round.
    With q the rate and s the noise, P / Q = 1 - q + q e^{(2x-1)/2s^2} rises with x, so that the
    worst event is a half line, which ends where the ratio is e^epsilon.
    """
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


@lru_cache(maxsize=64)
def dominating(menu: Menu, width: float) -> Any:
    """A privacy loss distribution of dp-accounting's that dominates every choice of the menu.

    Formal guarantee: in each direction its hockey-stick divergence is, at every epsilon, at least
    that of each choice repeated `menu.repeats` times, up to the rounding of transforms.
    """
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    both = (_largest(menu, width, "add"), _largest(menu, width, "remove"))
    # What dp-accounting calls removal has the law with the record in front.
    return PrivacyLossDistribution(*(_pmf(one, width) for one in both))


def on_grid(points: Floats, profile: Callable[[Floats], Floats], width: float) -> Any:
    """The losses, in dp-accounting's form, of a pair whose profile lies above the given one.

    The given profile is a convex falling function of e^epsilon that is straight from (0, 1) to the
    first of the points, and constant beyond the last.
    """
    first, last = math.floor(math.log(points[0]) / width), math.ceil(math.log(points[-1]) / width)
    deltas = profile(np.exp(np.arange(first, last + 1) * width))
    return _pmf(_connected(first, deltas, width), width)


def _pmf(losses: Losses, width: float) -> Any:
    from dp_accounting.pld.pld_pmf import DensePLDPmf

    return DensePLDPmf(width, losses.first, losses.chances, losses.infinite, True)


def _largest(menu: Menu, width: float, direction: Direction) -> Losses:
    """The pair whose profile is the largest of the choices' at every point of the grid."""
    parts = [_repeated(_once(choice, width, direction), menu.repeats) for choice in menu.choices]
    first, last = min(part.first for part in parts), max(part.last for part in parts)
    largest = np.zeros(last - first + 1)
    for part in parts:
        np.maximum(largest, _profile(part, first, last, width), out=largest)
    return _connected(first, largest, width)


def _once(choice: SampledGaussian, width: float, direction: Direction) -> Losses:
    """The losses of a sampled Gaussian on a grid that holds all but its farthest tails."""
    q, s = choice.sample_rate, choice.noise_multiplier
    ends = np.array([-FARTHEST_NOISE * s, 1 + FARTHEST_NOISE * s])
    with np.errstate(divide="ignore"):
        outside = np.log1p(np.float64(-q))
    losses = np.logaddexp(outside, math.log(q) + (2 * ends - 1) / (2 * s * s))
    low, high = losses if direction == "add" else -losses[::-1]
    first, last = math.floor(low / width), math.ceil(high / width)
    grid = np.arange(first, last + 1) * width
    return _connected(first, hockey_stick(choice, grid, direction), width)


def _connected(first: int, deltas: Floats, width: float) -> Losses:
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


def _repeated(losses: Losses, count: int) -> Losses:
    """The losses of so many independent repetitions; their farthest tails count as infinite."""
    if count == 1:
        return losses
    low, high = _ends(losses.chances, count)
    length = high - low + 1
    size = next_fast_len(max(length, len(losses.chances)), real=True)
    around = irfft(rfft(losses.chances, size) ** count, size)  # in a circle, tails on top
    chances = np.maximum(np.roll(around, -low)[:length], 0.0)
    infinite = CUT_OFF - math.expm1(count * math.log1p(-min(losses.infinite, 1 - 1e-16)))
    return Losses(count * losses.first + low, chances, min(infinite, 1.0))


def _ends(chances: Floats, count: int) -> tuple[int, int]:
    """Cells between which a sum of so many draws lies but for a chance of CUT_OFF.

    By Chernoff's bound, whatever the tilts are; near the first of them it is best for a Gaussian,
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


def _profile(losses: Losses, first: int, last: int, width: float) -> Floats:
    """The hockey-stick divergence at every cell of a grid that holds those of the losses.

    A chance p of a loss in cell j adds p (1 - e^{-(j - i) width}) at cell i. Summed from above by a
    recurrence of positive terms, so that small values are exact to their last digits.
    """
    falls = math.nextafter(math.exp(-width), 1.0)  # rounded up: its error adds up over the cells
    from scipy.signal import lfilter  # slow to import, and needed by few

    above = lfilter([1.0], [1.0, -falls], losses.chances[::-1])
    rises = np.cumsum(-math.expm1(-width) * above[:-1])
    inner = losses.infinite + np.append(0.0, rises)[::-1]
    # Below the least loss the profile is straight, and it ends at the sum of all chances.
    whole = losses.infinite + float(losses.chances.sum())
    low = np.arange(first, losses.first)
    below = whole - np.exp((low - losses.first) * width) * (whole - inner[0])
    beyond = np.full(last - losses.last, losses.infinite)
    return np.concatenate((below, inner, beyond))
