"""The moment of one accepted update as a linear-fractional programme.

Write den = a0, num = L a1 for `add` and swapped for `remove`, x = num / (u0 den), rho = E[num] /
(u0 E[den]). With phi(x) = x^alpha - 1 - alpha (x - 1), every choice of a0, a1 satisfies exactly

    rho^alpha (Mom - 1) + phi(rho) = E[den phi(x)] / E[den].                          (*)

`Frame` holds, for each vertex and atom, the weighted den phi(x), den and den (x - 1). The first
is divided by exp(scale), as are all multipliers that are compared with it; scale is 0 unless the
moment is astronomic.
"""

from dataclasses import dataclass

import numpy as np

from dpsur.privacy.accountants.selective.pair import Array, Direction, Pair, Tails

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
    lean_sum = np.abs(lean).max(axis=0).sum() + _cancelled(pair, corner, dev)
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


def _cancelled(pair: Pair, corner: Vertices, dev: float) -> float:
    """The size of the parts whose difference is den (x - 1), which sets its rounding error."""
    b = 1.0 + corner.gain
    parts = (np.abs(corner.gain) + abs(dev)) * pair.weight + b * np.abs(pair.weighted_excess)
    return float((corner.base * parts).max(axis=0).sum()) * (1.0 + 1.0 / (1.0 + dev))


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
        slope = (
            alpha
            * np.abs(np.expm1((alpha - 1) * np.where(far, 0.0, log_x)))
            * np.where(far, 0.0, size)
        )
        parts = np.where(far, 0.0, np.abs(alpha * near_y) * (np.abs(alpha * near_y) > 5e-3))
        parts = parts + np.where(
            far, 0.0, np.expm1(np.maximum(alpha * np.where(far, 0.0, log_x), 0.0))
        ) * (parts > 0)
        error = RELATIVE * value + ROUND * den * shrink * (slope + parts)
        error = error + np.where(far, RELATIVE * moment + ROUND * np.abs(flat), 0.0)
    return value + error, error, scale
