"""Two finite pairs that bracket the Gaussian pair (N(0, s^2), (1-q) N(0, s^2) + q N(1, s^2)).

Both are read off one mesh of the real line. With L the density ratio, increasing in z:

* `chord`: atoms at the nodes. Each cell's mass is moved to its two end-points so that the masses
  under both laws are kept. For every convex f, E[f(L)] over the mesh is at most the sum over
  the atoms.
* `cells`: one atom per cell (and per tail), L replaced by its mean over the cell. For every
  convex f the sum over the atoms is at most E[f(L)]; it is what an adversary sees who learns the
  cell only.

What lies outside the mesh is bounded in closed form by `Tails`.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

Array = NDArray[np.float64]
Choice = NDArray[np.intp]  # one vertex per atom
Direction = Literal["add", "remove"]

LOG_SQRT_2PI = 0.5 * float(np.log(2 * np.pi))
REACH = 75.0  # nats below the peak of an integrand at which the mesh ends
_GAUSS_X, _GAUSS_W = np.polynomial.legendre.leggauss(16)
_PANEL_SPAN = 8.0  # nats of variation; 16 Gauss points integrate exp over them to rounding


@dataclass(frozen=True)
class Pair:
    """Atoms of mass w under P0 and w*L under P1; logarithms because both leave the float range."""

    log_weight: Array
    log_ratio: Array  # log L
    excess: Array  # L - 1, accurate near 0; may be inf far out
    weight: Array
    weighted_ratio: Array  # w * L
    weighted_excess: Array  # w * (L - 1)


@dataclass(frozen=True)
class Tails:
    """What the chord pair leaves out, from above."""

    mass: float  # under P0 plus under P1
    log_moment: float  # log E[L^power; tails], power = alpha (add) or 1 - alpha (remove)


@dataclass(frozen=True)
class Bracket:
    """Above (chord with tails) and below (cells) the same pair of laws."""

    chord: Pair
    cells: Pair
    tails: Tails


def ratio(sample_rate: float, log_l: Array) -> tuple[Array, Array]:
    """(log L, L - 1) for L = 1 - q + q l, given log l."""
    q = sample_rate
    with np.errstate(over="ignore", divide="ignore"):
        excess = q * np.expm1(log_l)
        far = np.logaddexp(np.log1p(-q), np.log(q) + log_l)
        near = np.log1p(np.where(np.abs(excess) < 0.5, excess, 0.0))
    return np.where(np.abs(excess) < 0.5, near, far), excess


def _pair(sample_rate: float, log_weight: Array, log_l: Array) -> Pair:
    log_ratio, excess = ratio(sample_rate, log_l)
    weight = np.exp(log_weight)
    weighted_ratio = np.exp(log_weight + log_ratio)
    far = log_l > 30.0
    weighted_excess = np.where(far, weighted_ratio - weight, weight * np.where(far, 0.0, excess))
    return Pair(log_weight, log_ratio, excess, weight, weighted_ratio, weighted_excess)


def _log_l(z: Array, s: float) -> Array:
    return (2.0 * z - 1.0) / (2.0 * s * s)


def _power(alpha: float, direction: Direction) -> float:
    return alpha if direction == "add" else 1.0 - alpha


def mesh(q: float, s: float, alpha: float, direction: Direction, nodes: int) -> Array:
    """Nodes that spread the chord error evenly.

    The error of one cell is about p0 f''(L) (dL/dz)^2 h^3 / 12 with f = L^power, so the cube root
    of that density is equidistributed. A share follows order 2 and a share the bulk, where the
    adversary's thresholds lie. Only tightness depends on this choice, never validity.
    """
    power = _power(alpha, direction)
    z = np.linspace(min(0.0, power) - 14.0 * s, 1.0 + max(0.0, power) + 14.0 * s, 12001)
    log_p0 = -0.5 * (z / s) ** 2
    log_ratio, _ = ratio(q, _log_l(z, s))
    moment = log_p0 + power * log_ratio
    floor = float(moment.max()) - REACH
    outside = _left_tail(q, s, power, z[z < -12.3 * s]) < floor
    first = max(int(outside.sum()) - 1, 0)
    outside = _right_tail(q, s, power, z[z > 12.3 * s + 1.0]) < floor
    last = min(z.size - int(outside.sum()), z.size - 1)
    z, log_p0, log_ratio = (
        z[first : last + 1],
        log_p0[first : last + 1],
        log_ratio[first : last + 1],
    )
    # A wide cell is harmless only where the integrand lies further below its peak than it varies
    # over the cell.
    patience = 1.0 / np.maximum(float(moment.max()) - 35.0 - moment[first : last + 1], 20.0)
    density = 0.2 * patience / patience.sum() + 0.04 / z.size
    bulk = np.abs(z) < 5.0 * s + 1.0
    density += 0.12 * bulk / bulk.sum()
    for share, order in ((0.48, alpha), (0.16, 2.0)):
        log_slope = _log_l(z, s) if q > 0 else np.zeros_like(z)
        log_monitor = (
            log_p0 + (_power(order, direction) - 2.0) * log_ratio + 2.0 * log_slope
        ) / 3.0
        monitor = np.exp(log_monitor - log_monitor.max())
        density += share * monitor / monitor.sum()
    cumulative = np.concatenate(([0.0], np.cumsum(0.5 * (density[1:] + density[:-1]))))
    return np.interp(np.linspace(0.0, cumulative[-1], nodes), cumulative, z)


def _log_sums(z: Array, s: float) -> tuple[Array, Array, Array, Array]:
    """Per cell: log mass under N(0, s^2) and N(1, s^2), log chord weight of left and right end.

    Integrands are positive and the quadrature error is relative, so nothing is lost to
    cancellation however small the cell.
    """
    h = np.diff(z)
    span = (np.maximum(np.abs(z[:-1]), np.abs(z[1:])) * h + h * h + h) / (s * s)
    panels = np.ceil(span / _PANEL_SPAN).astype(np.intp)
    starts = np.cumsum(panels) - panels
    a, width = np.repeat(z[:-1], panels)[:, None], np.repeat(h, panels)[:, None]
    piece = width / np.repeat(panels, panels)[:, None]
    step = piece * (
        (np.arange(a.size) - np.repeat(starts, panels))[:, None] + 0.5 * (_GAUSS_X + 1.0)
    )
    rest = np.maximum(width - step, 0.0) / (s * s)
    local = np.log(0.5 * _GAUSS_W * piece) - step * (2.0 * a + step) / (2.0 * s * s)
    log_right = _log_expm1(step / (s * s)) - _log_expm1(width / (s * s))
    log_left = np.log(-np.expm1(-rest)) - np.log(-np.expm1(-width / (s * s)))

    def per_cell(x: Array) -> Array:
        total: Array = np.logaddexp.reduceat(_row_logsumexp(x), starts) + base
        return total

    base = -0.5 * (z[:-1] / s) ** 2 - np.log(s) - LOG_SQRT_2PI
    mass1 = per_cell(local + step / (s * s)) + _log_l(z[:-1], s)
    return per_cell(local), mass1, per_cell(local + log_left), per_cell(local + log_right)


def _log_expm1(x: Array) -> Array:
    return x + np.log(-np.expm1(-x))


def _row_logsumexp(x: Array) -> Array:
    top = x.max(axis=1)
    total: Array = np.log(np.exp(x - top[:, None]).sum(axis=1)) + top
    return total


def _log_ends(z: Array, s: float) -> tuple[Array, Array]:
    """Log mass below and above the mesh, under N(0, s^2) and N(1, s^2)."""
    lo, hi = float(z[0]), float(z[-1])
    ends0 = np.array([float(log_ndtr(lo / s)), float(log_ndtr(-hi / s))])
    ends1 = np.array([float(log_ndtr((lo - 1.0) / s)), float(log_ndtr((1.0 - hi) / s))])
    return ends0, ends1


def _mass_outside(q: float, ends0: Array, ends1: Array) -> float:
    mass = float(np.exp(ends0).sum() * (2.0 - q) + q * np.exp(ends1).sum())
    return mass * (1 + 1e-9)


def _chord(q: float, s: float, z: Array, left: Array, right: Array) -> Pair:
    log_weight = np.concatenate((left, [-np.inf]))
    log_weight[1:] = np.logaddexp(log_weight[1:], right)
    return _pair(q, log_weight, _log_l(z, s))


def chord(q: float, s: float, z: Array) -> tuple[Pair, float]:
    """The chord pair on a given mesh, and what it leaves out: mass under P0 plus under P1."""
    _, _, left, right = _log_sums(z, s)
    return _chord(q, s, z, left, right), _mass_outside(q, *_log_ends(z, s))


def bracket(q: float, s: float, alpha: float, direction: Direction, nodes: int) -> Bracket:
    """Both finite pairs on one mesh suited to this order and direction."""
    z = mesh(q, s, alpha, direction, nodes)
    mass0, mass1, left, right = _log_sums(z, s)
    lo, hi = float(z[0]), float(z[-1])
    ends0, ends1 = _log_ends(z, s)
    cells0 = np.concatenate((ends0[:1], mass0, ends0[1:]))
    cells1 = np.concatenate((ends1[:1], mass1, ends1[1:]))
    return Bracket(
        chord=_chord(q, s, z, left, right),
        cells=_pair(q, cells0, cells1 - cells0),
        tails=_tails(q, s, _power(alpha, direction), lo, hi, ends0, ends1),
    )


def _left_tail(q: float, s: float, power: float, z: Array) -> Array:
    """log E[L^power; below z], from above.

    d log L / dz = q l / (s^2 L) increases in z, so below z log L falls at most at the rate it has
    at z. For a positive power L^power is at most its value at z. Each bound is a Gaussian
    integral of an exponential.
    """
    log_ratio, _ = ratio(q, _log_l(z, s))
    if power > 0 or q == 0:
        flat: Array = power * log_ratio + log_ndtr(z / s)
        return flat
    slope = np.exp(np.minimum(np.log(q) + _log_l(z, s) - log_ratio, 0.0)) * (1 + 1e-12)
    rate = -power * slope / (s * s)
    steep: Array = (
        power * log_ratio + rate * z + 0.5 * (rate * s) ** 2 + log_ndtr((z + rate * s * s) / s)
    )
    return steep


def _right_tail(q: float, s: float, power: float, z: Array) -> Array:
    """log E[L^power; above z], from above: there log L grows at most at rate 1/s^2."""
    log_ratio, _ = ratio(q, _log_l(z, s))
    if power < 0 or q == 0:
        flat: Array = power * log_ratio + log_ndtr(-z / s)
        return flat
    rate = power / (s * s)
    steep: Array = (
        power * log_ratio - rate * z + 0.5 * (rate * s) ** 2 + log_ndtr((rate * s * s - z) / s)
    )
    return steep


def _tails(
    q: float, s: float, power: float, lo: float, hi: float, ends0: Array, ends1: Array
) -> Tails:
    left, right = _left_tail(q, s, power, np.array([lo])), _right_tail(q, s, power, np.array([hi]))
    return Tails(
        _mass_outside(q, ends0, ends1), log_moment=float(np.logaddexp(left, right)[0]) + 1e-9
    )
