"""Exact privacy of selective release on one-dimensional instances of Algorithm 1.

N - 1 records are alike ("the others"); the neighbour adds one record x. The model has T weights,
all 0 at the start, and update t trains weight t alone (a public schedule: one unit after the
other). The units are alike and independent, so the accepted updates are independent copies of one
scalar problem and the privacy loss of the run is a T-fold convolution. T = 1 needs no schedule.

One unit with weight w: the others' loss has zero gradient at w = 0, so whatever batch is drawn
their clipped sum is 0; x's gradient at w = 0 has at least the norm of the clip and points to
negative w. With z the noisy sum in units of the clip (sign reversed) and w = step * z, the
candidate has the law N(0, s^2) without x and (1-q) N(0, s^2) + q N(1, s^2) with x.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln, log_ndtr, ndtr

from dpsur.privacy.accountants.selective.pair import Array, Direction
from dpsur.privacy.events import LossTest, SampledGaussian, Trial

CELLS = 20_000
# Mass of the accepted update outside the mesh, which reaches ten standard deviations: below
# 1e-22 of either candidate's law, times the ratio of acceptance probabilities.
OUTSIDE = 1e-20


@dataclass(frozen=True)
class Setting:
    """Public parameters of Algorithm 1."""

    records: int
    batch: int
    noise_multiplier: float
    val_batch: int
    val_noise_multiplier: float
    updates: int
    accept_threshold: float = -1.0
    loss_clip: float = 1e-3
    delta: float = 1e-5

    @property
    def update(self) -> SampledGaussian:
        """The candidate."""
        return SampledGaussian(self.batch / self.records, self.noise_multiplier)

    @property
    def test(self) -> LossTest:
        """The test of the candidate."""
        rate = self.val_batch / self.records
        return LossTest(rate, self.val_noise_multiplier, self.accept_threshold)

    @property
    def trial(self) -> Trial:
        """One trial, as the accountings see it."""
        return Trial(self.update, self.test)

    def accept(self, difference: Array) -> Array:
        """`LossTest.acceptance` of the clipped loss differences (Alg. 1, L12-14), for arrays."""
        clipped = np.clip(difference / self.loss_clip, -1.0, 1.0)
        distance = self.accept_threshold - clipped
        return np.asarray(ndtr(distance / (2.0 * self.val_noise_multiplier)), dtype=np.float64)


@dataclass(frozen=True)
class Instance:
    """Loss differences J(w_new) - J(w_old) as functions of z, for one of the others and for x."""

    setting: Setting
    others: Callable[[Array], Array]
    extra: Callable[[Array], Array]

    def acceptance(self, z: Array) -> tuple[Array, Array]:
        """(a0, a1): averages over the Poisson test batch, an empty one included (difference 0).

        Batch sizes further than nine standard deviations plus 30 from the mean (probability below
        1e-18) are left out and the rest rescaled.
        """
        accept, rate, n = self.setting.accept, self.setting.test.sample_rate, self.setting.records
        n -= 1
        spread = 9.0 * math.sqrt(n * rate * (1 - rate)) + 30.0
        sizes = np.arange(max(0, int(n * rate - spread)), min(n, int(n * rate + spread)) + 1)
        log_p = gammaln(n + 1) - gammaln(sizes + 1) - gammaln(n - sizes + 1)
        p = np.exp(log_p + sizes * math.log(rate) + (n - sizes) * math.log1p(-rate))
        p /= p.sum()
        others, extra = self.others(z), self.extra(z)
        empty = (1.0 - rate) ** n
        a0 = (1.0 - empty) * accept(others) + empty * accept(np.zeros_like(z))
        with_x = np.zeros_like(z)
        for size, weight in zip(sizes, p, strict=True):
            with_x += weight * accept((size * others + extra) / (size + 1.0))
        return a0, (1.0 - rate) * a0 + rate * with_x


@dataclass(frozen=True)
class Losses:
    """Privacy losses of one update on a grid, both ways of rounding, under the numerator's law."""

    width: float
    down: Array  # mass at (index - offset) * width, losses rounded down, cells merged
    up: Array  # losses rounded up
    offset: int


def densities(instance: Instance, cells: int = CELLS) -> tuple[Array, Array, Array]:
    """The accepted update's masses per cell of z without and with x, and how log L changes there.

    The losses are read at weights rounded to the cell's middle, as weights kept in fixed point
    would be. The acceptance probabilities are then constant on a cell and the masses exact.
    """
    s, q = instance.setting.noise_multiplier, instance.setting.update.sample_rate
    z = np.linspace(-10.0 * s, 1.0 + 10.0 * s, cells + 1)
    n0 = _interval_mass(z, 0.0, s)
    n1 = (1 - q) * n0 + q * _interval_mass(z, 1.0, s)
    a0, a1 = instance.acceptance(0.5 * (z[1:] + z[:-1]))
    o0, o1 = n0 * a0, n1 * a1
    return o0 / o0.sum(), o1 / o1.sum(), np.diff(np.log1p(q * np.expm1((2 * z - 1) / (2 * s * s))))


def one_update(
    instance: Instance, direction: Direction, width: float, cells: int = CELLS
) -> Losses:
    """Privacy losses of one accepted update.

    Merging a cell can only lower delta, so cell masses with the loss rounded down give a lower
    value; the loss varies inside a cell by at most the change of log L, which added before rounding
    up gives an upper one.
    """
    top, bottom, change = _ordered(instance, direction, cells)
    loss = np.log(top) - np.log(bottom)
    low, high = np.floor(loss / width).astype(int), np.ceil((loss + change) / width).astype(int)
    offset = -min(int(low.min()), 0)
    size = int(high.max()) + offset + 1
    down: Array = np.bincount(low + offset, weights=top, minlength=size).astype(np.float64)
    up: Array = np.bincount(high + offset, weights=top, minlength=size).astype(np.float64)
    return Losses(width, down, up, offset)


def renyi(instance: Instance, order: float, direction: Direction) -> float:
    """Rényi divergence of one accepted update, on the same cells (from below)."""
    top, bottom, _ = _ordered(instance, direction, CELLS)
    log_moment = np.logaddexp.reduce(order * np.log(top) + (1 - order) * np.log(bottom))
    return float(log_moment) / (order - 1)


def composed_delta(losses: Losses, updates: int, epsilon: float) -> tuple[float, float]:
    """(lower, upper) value of delta(epsilon) after `updates` independent updates, by FFT."""
    down = _tail(losses.down, losses, updates, epsilon, -1)
    return down, _tail(losses.up, losses, updates, epsilon, 1)


def _ordered(instance: Instance, direction: Direction, cells: int) -> tuple[Array, Array, Array]:
    without, with_x, change = densities(instance, cells)
    return (with_x, without, change) if direction == "add" else (without, with_x, change)


def _interval_mass(z: Array, mean: float, s: float) -> Array:
    """Normal masses of the cells, each computed in the tail where it is small."""
    t = (z - mean) / s
    flip = t[:-1] > 0
    high = np.where(flip, -t[:-1], t[1:])
    low = np.where(flip, -t[1:], t[:-1])
    log_high, log_low = log_ndtr(high), log_ndtr(low)
    return np.asarray(np.exp(log_high) * -np.expm1(log_low - log_high), dtype=np.float64)


def _tail(mass: Array, losses: Losses, updates: int, epsilon: float, sign: int) -> float:
    values: Array = (np.arange(mass.size, dtype=np.float64) - losses.offset) * losses.width
    mean = float((mass * values).sum())
    spread = math.sqrt(float((mass * values**2).sum()) - mean**2)
    reach = updates * abs(mean) + 14.0 * spread * math.sqrt(updates) + float(values.max()) + epsilon
    size = 1 << math.ceil(math.log2(2.0 * reach / losses.width + 2 * mass.size))
    padded = np.zeros(size)
    padded[(np.arange(mass.size) - losses.offset) % size] = mass
    total = np.fft.irfft(np.fft.rfft(padded) ** updates, size)
    index = np.arange(size)
    index[index >= size // 2] -= size
    gain = -np.expm1(np.minimum(epsilon - index * losses.width, 0.0))
    delta = float((np.maximum(total, 0.0) * gain).sum())
    return max(0.0, delta + sign * _error(mass, values, updates, size, losses.width))


def _error(mass: Array, values: Array, updates: int, size: int, width: float) -> float:
    """What the FFT may have moved: rounding, mass outside the mesh, mass folded over its ends.

    The spectrum is accurate to updates * 1e-15 of itself, so the result in l1 to the root of its
    length times that. Folding is bounded by Chernoff on both sides.
    """
    edge = 0.5 * size * width
    error = updates * 1e-15 * math.sqrt(size) + updates * OUTSIDE
    with np.errstate(divide="ignore"):
        log_mass = np.log(mass)
    for side in (1.0, -1.0):
        bounds = [
            updates * float(np.logaddexp.reduce(log_mass + side * rate * values)) - rate * edge
            for rate in np.geomspace(0.05, 60.0, 40)
        ]
        error += math.exp(min(*bounds, 0.0))
    return error
