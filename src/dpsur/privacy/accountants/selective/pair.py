"""Two finite pairs that bracket the Gaussian pair (N(0, s^2), (1-q) N(0, s^2) + q N(1, s^2)).

Both are read off one mesh of the real line. With L the density ratio, increasing in z:

* `chord`: atoms at the nodes. Each cell's mass is moved to its two end-points so that the masses
  under both laws are kept. For every convex f, E[f(L)] over the mesh is at most the sum over
  the atoms.
* `cells`: one atom per cell (and per tail), L replaced by its mean over the cell. For every
  convex f the sum over the atoms is at most E[f(L)]; it is what an adversary sees who learns the
  cell only.

What lies outside the mesh is bounded in closed form by `Tails`.

The moment of one accepted update as a linear-fractional programme.

Write den = a0, num = L a1 for `add` and swapped for `remove`, x = num / (u0 den), rho = E[num] /
(u0 E[den]). With phi(x) = x^alpha - 1 - alpha (x - 1), every choice of a0, a1 satisfies exactly

    rho^alpha (Mom - 1) + phi(rho) = E[den phi(x)] / E[den].                          (*)

`Frame` holds, for each vertex and atom, the weighted den phi(x), den and den (x - 1). The first
is divided by exp(scale), as are all multipliers that are compared with it; scale is 0 unless the
moment is astronomic.
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
    inner, top = slice(first, last + 1), float(moment.max())
    z, log_p0, log_ratio, moment = z[inner], log_p0[inner], log_ratio[inner], moment[inner]
    # A wide cell is harmless only where the integrand lies further below its peak than it varies
    # over the cell.
    patience = 1.0 / np.maximum(top - 35.0 - moment, 20.0)
    density = 0.2 * patience / patience.sum() + 0.04 / z.size
    bulk = np.abs(z) < 5.0 * s + 1.0
    density += 0.12 * bulk / bulk.sum()
    for share, order in ((0.48, alpha), (0.16, 2.0)):
        log_slope = _log_l(z, s) if q > 0 else np.zeros_like(z)
        log_density = log_p0 + (_power(order, direction) - 2.0) * log_ratio + 2.0 * log_slope
        log_monitor = log_density / 3.0
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
    a, width, starting, count = (np.repeat(x, panels)[:, None] for x in (z[:-1], h, starts, panels))
    piece = width / count
    step = piece * (np.arange(a.size)[:, None] - starting + 0.5 * (_GAUSS_X + 1.0))
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


def _row_logsumexp(x: Array) -> Array:  # in these operations, which stored figures were made in
    top = x.max(axis=1)
    total: Array = np.log(np.exp(x - top[:, None]).sum(axis=1)) + top
    return total


def _log_ends(z: Array, s: float) -> tuple[Array, Array]:
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
    ends0, ends1 = _log_ends(z, s)
    cells0 = np.concatenate((ends0[:1], mass0, ends0[1:]))
    cells1 = np.concatenate((ends1[:1], mass1, ends1[1:]))
    power = _power(alpha, direction)
    beyond = np.logaddexp(_left_tail(q, s, power, z[:1]), _right_tail(q, s, power, z[-1:]))
    return Bracket(
        chord=_chord(q, s, z, left, right),
        cells=_pair(q, cells0, cells1 - cells0),
        tails=Tails(_mass_outside(q, ends0, ends1), log_moment=float(beyond[0]) + 1e-9),
    )


def _left_tail(q: float, s: float, power: float, z: Array) -> Array:
    """log E[L^power; below z], from above.

    d log L / dz = q l / (s^2 L) increases in z, so below z log L falls at most at the rate it has
    at z. For a positive power L^power is at most its value at z. Each bound is a Gaussian
    integral of an exponential.
    """
    log_ratio, _ = ratio(q, _log_l(z, s))
    rate: Array | float = 0.0
    if power <= 0 and q > 0:
        slope = np.exp(np.minimum(np.log(q) + _log_l(z, s) - log_ratio, 0.0)) * (1 + 1e-12)
        rate = -power * slope / (s * s)
    tilt, reach = rate * z, (z + rate * s * s) / s
    found: Array = power * log_ratio + tilt + 0.5 * (rate * s) ** 2 + log_ndtr(reach)
    return found


def _right_tail(q: float, s: float, power: float, z: Array) -> Array:
    """log E[L^power; above z], from above: there log L grows at most at rate 1/s^2."""
    log_ratio, _ = ratio(q, _log_l(z, s))
    rate = 0.0 if power < 0 or q == 0 else power / (s * s)
    tilt, reach = rate * z, (rate * s * s - z) / s
    found: Array = power * log_ratio - tilt + 0.5 * (rate * s) ** 2 + log_ndtr(reach)
    return found


# Rounding margins. Weights, logarithms (up to 1e6 in size) and phi are computed to better than
# 1e-10 of themselves; sums of at most 4e4 terms add less than 1e-11 of the sum of their sizes.
RELATIVE = 1e-9  # for phi and for bounds made of it
LINEAR = 1e-10  # for terms linear in the weights
ROUND = 1e-14  # 90 units in the last place, for differences of nearly equal numbers


@dataclass(frozen=True)
class Vertices:
    """Corners of the set of (a0, a1), in units of accept_min: a0 and a1 / a0 - 1."""

    base: Array
    gain: Array


def vertices(accept_ratio: float, val_sample_rate: float) -> Vertices:
    """(1, 1), (1, 1-q_v+q_v r), (r, (1-q_v) r + q_v), (r, r)."""
    step = val_sample_rate * (accept_ratio - 1.0)
    base = np.array([[1.0], [1.0], [accept_ratio], [accept_ratio]])
    return Vertices(base, np.array([[0.0], [step], [-step / accept_ratio], [0.0]]))


@dataclass(frozen=True)
class Frame:
    """One row per vertex, one column per atom; symbols as in the head of this file."""

    alpha: float
    accept_ratio: float
    centre: float  # u0
    scale: float
    value: Array  # w den phi(x) / e^scale, rounded up
    value_error: Array  # how far it was rounded up; twice this lower it is rounded down
    den: Array  # w den
    lean: Array  # w den (x - 1)
    den_floor: float  # E[den] is at least this, for any choice
    den_sum: float  # and at most this
    lean_sum: float  # bounds E|den (x - 1)| and the size of what cancels in it
    tail_value: float
    tail_linear: float


def phi(alpha: float, y: Array) -> Array:
    """x^alpha - 1 - alpha (x - 1) at x = 1 + y for y >= -1, to about 1e-13 of itself."""
    small = np.abs(alpha * y) < 1e-2
    small &= np.abs(y) < 1e-2
    count = np.count_nonzero(small)
    # Each of the two ways only for what it is for.
    total = _series(alpha, y[small]) if count else y[:0]
    if count == y.size:
        return total.reshape(y.shape)
    y_far = y[~small] if count else y
    with np.errstate(over="ignore", divide="ignore"):
        far: Array = np.expm1(alpha * np.log1p(y_far)) - alpha * y_far
    if not count:
        return far
    found = np.empty_like(y)
    found[small], found[~small] = total, far
    return found


def _series(alpha: float, t: Array) -> Array:
    # Term k + 1 is (alpha - k) y / (k + 1) times term k: at most 1e-2 of it. Nine terms leave
    # less than 1e-16.
    coefficient, power, total = alpha, t, np.zeros_like(t)
    for k in range(2, 11):
        coefficient *= (alpha - k + 1) / k
        power = power * t
        total = total + coefficient * power
    return total


def phi_at(alpha: float, y: float) -> float:
    """`phi` of one number, in the same operations."""
    if not (abs(alpha * y) < 1e-2 and abs(y) < 1e-2):
        with np.errstate(over="ignore", divide="ignore"):
            return float(np.expm1(alpha * np.log1p(np.float64(y))) - alpha * y)
    coefficient, power, total = alpha, y, 0.0
    for k in range(2, 11):
        coefficient *= (alpha - k + 1) / k
        power *= y
        total += coefficient * power
    return total


def frame(
    pair: Pair,
    tails: Tails | None,
    corner: Vertices,
    alpha: float,
    direction: Direction,
    dev: float,
) -> Frame:
    """The programme around u0 = 1 + dev. Without tails the numbers belong to the atoms alone."""
    u = 1.0 + dev
    a0, gain = corner.base, corner.gain
    b = 1.0 + gain
    log_b, log_u = np.log1p(gain), np.log1p(dev)
    if direction == "add":
        size = (np.abs(gain) + abs(dev) + b * np.abs(pair.excess)) / u
        y = (gain - dev + b * pair.excess) / u
        log_far = log_b + pair.log_ratio - log_u
        log_den = np.log(a0)
        den = a0 * pair.weight
        lean = a0 * ((gain - dev) * pair.weight + b * pair.weighted_excess) / u
    else:
        t = dev + gain * u + u * b * pair.excess
        log_far = -(log_b + pair.log_ratio + log_u)
        near = np.abs(t) < 0.5
        with np.errstate(over="ignore"):
            y = np.where(near, -t / np.where(near, 1.0 + t, 1.0), np.expm1(log_far))
            spread = 4.0 * (abs(dev) + u * np.abs(gain) + u * b * np.abs(pair.excess))
            size = np.where(
                near,
                spread,
                (1.0 + y) * (1.0 + np.abs(log_b) + np.abs(pair.log_ratio) + abs(log_u)),
            )
        log_den = np.log(a0) + log_b + pair.log_ratio
        den = a0 * b * pair.weighted_ratio
        lean = -a0 * ((dev + gain * u) * pair.weight + u * b * pair.weighted_excess) / u
    # the size of the parts whose difference is den (x - 1), which sets its rounding error
    parts = (np.abs(gain) + abs(dev)) * pair.weight + b * np.abs(pair.weighted_excess)
    cancelled = float((a0 * parts).max(axis=0).sum()) * (1.0 + 1.0 / u)
    lean_sum = np.abs(lean).max(axis=0).sum() + cancelled
    value, error, scale = _values(pair, alpha, y, size, log_far, log_den, den, lean)
    tail_value = tail_linear = 0.0
    if tails is not None:
        r = float(a0.max())
        a1 = a0 * b
        powers = alpha * np.log(a1) + (1 - alpha) * np.log(a0)
        if direction == "remove":
            powers = alpha * np.log(a0) + (1 - alpha) * np.log(a1)
        log_top = float(powers.max()) - alpha * log_u + tails.log_moment - scale
        tail_value = float(np.exp(log_top)) * (1 + RELATIVE) + r * tails.mass * (alpha - 1) * float(
            np.exp(-scale)
        )
        tail_linear = r * tails.mass * (1.0 + 1.0 / u)
    return Frame(
        alpha, float(a0.max()), u, scale, value, error, den, lean,
        float(den.min(axis=0).sum()) * (1 - RELATIVE), float(den.max(axis=0).sum()),
        float(lean_sum), tail_value, tail_linear,
    )  # fmt: skip


def _values(
    pair: Pair,
    alpha: float,
    y: Array,
    size: Array,
    log_far: Array,
    log_den: Array,
    den: Array,
    lean: Array,
) -> tuple[Array, Array, float]:
    with np.errstate(over="ignore", invalid="ignore"):
        log_x = np.where(np.abs(y) < 0.5, np.log1p(np.where(np.abs(y) < 0.5, y, 0.0)), log_far)
        far = np.abs(alpha * log_x) > 30.0
        log_moment = pair.log_weight + log_den + alpha * log_x
        scale = max(0.0, float(log_moment.max()))
        shrink = float(np.exp(-scale))
        near_y = np.where(far, 0.0, y)
        near_value = phi(alpha, near_y) * den * shrink
        moment = np.exp(np.where(far, log_moment, -np.inf) - scale)
        flat = shrink * np.where(far, den + alpha * lean, 0.0)
        value = np.where(far, np.maximum(moment - flat, 0.0), near_value)
        # |phi'| times the rounding error of x, plus the two parts that nearly cancel in phi
        near_x = np.where(far, 0.0, log_x)
        slope = alpha * np.abs(np.expm1((alpha - 1) * near_x)) * np.where(far, 0.0, size)
        parts = np.where(far, 0.0, np.abs(alpha * near_y) * (np.abs(alpha * near_y) > 5e-3))
        powers = np.where(far, 0.0, np.expm1(np.maximum(alpha * near_x, 0.0)))
        parts = parts + powers * (parts > 0)
        error = RELATIVE * value + ROUND * den * shrink * (slope + parts)
        error = error + np.where(far, RELATIVE * moment + ROUND * np.abs(flat), 0.0)
    return value + error, error, scale
