"""The adversary: step functions a0, a1 of z that attain a value, rounded down.

One vertex per mesh cell is a legitimate pair of step functions. E[a0] and E[L a1] of such a pair
are exact sums over the cells, and replacing L by its mean over a cell lowers the moment (Jensen),
so the value returned is reached by the step functions themselves.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from dpsur.privacy.accountants.selective.frame import LINEAR, RELATIVE, Frame, Vertices, frame, phi
from dpsur.privacy.accountants.selective.pair import Array, Choice, Direction, Pair
from dpsur.privacy.accountants.selective.upper import Line, sup_ratio


@dataclass(frozen=True)
class Attack:
    """Step functions a0, a1 and what they attain."""

    log_excess: float  # log(Mom - 1) of the step functions is at least this
    dev: float  # u - 1
    choice: Choice  # vertex per cell, left tail first, right tail last


def _log_excess(f: Frame, level: Array, lean: Array) -> Array:
    """log(Mom - 1) for many choices at once, every error taken downward."""
    exponent = f.alpha * np.log1p(lean)
    curve = phi(f.alpha, lean) * math.exp(-f.scale)
    far = np.abs(exponent) > 30.0
    if far.any():
        large = np.exp(exponent - f.scale) - math.exp(-f.scale) * (1.0 + f.alpha * lean)
        curve = np.where(far, large, curve)
    value = level - curve - RELATIVE * (np.abs(level) + np.abs(curve))
    return np.where(value > 0, np.log(value), -np.inf) - exponent + f.scale - RELATIVE


def _mixtures(f: Frame, one: Choice, other: Choice, slope: float) -> Attack:
    """The best of: `one` on the first k cells, `other` on the rest, in three orders of the cells.

    Where L hardly varies the best choice splits cells that are all alike, and no pointwise rule
    finds the split.
    """
    columns = np.arange(one.size)
    floor = f.value - 2.0 * f.value_error
    parts = [(floor[c, columns], f.den[c, columns], f.lean[c, columns]) for c in (one, other)]
    rise, weight, shift = (a - b for a, b in zip(*parts, strict=True))
    total = [float(p.sum()) for p in parts[1]]
    theta = total[0] / total[1] if math.isinf(slope) else (total[0] - slope * total[2]) / total[1]
    rate = np.nan_to_num((rise - theta * weight) / np.where(shift == 0.0, np.inf, shift))
    best, found = -math.inf, (columns, 0)
    dev = f.centre - 1.0
    for order in (columns, columns[::-1], np.argsort(rate)):
        sums = [
            t + np.concatenate(([0.0], np.cumsum(p[order])))
            for t, p in zip(total, (rise, weight, shift), strict=True)
        ]
        level, lean = sums[0] / sums[1], sums[2] / sums[1]
        value = _log_excess(f, level, lean) - f.alpha * LINEAR * (1.0 + f.lean_sum / sums[1])
        k = int(np.argmax(np.nan_to_num(value, nan=-np.inf)))
        if value[k] > best:
            best, found, dev = float(value[k]), (order, k), (1.0 + float(lean[k])) * f.centre - 1.0
    order, k = found
    choice = other.copy()
    choice[order[:k]] = one[order[:k]]
    return Attack(best, dev, choice)


def _choice(f: Frame, slope: float) -> Choice:
    top = math.copysign(1.0, -slope) * f.lean if math.isinf(slope) else f.value - slope * f.lean
    start = float(top[0].sum() / f.den[0].sum())
    return sup_ratio(top, f.den, start)[1]


def attack(
    cells: Pair,
    corner: Vertices,
    alpha: float,
    direction: Direction,
    dev: float,
    lines: tuple[Line, ...],
    scale: float,
    expected: float = 0.0,
    enough: Callable[[float], bool] | None = None,
) -> Attack:
    """Tries the certificate's multipliers and mixtures of neighbours, then climbs from the best.

    At rho = 1 a best choice has the multiplier alpha (Mom - 1), where the derivative in rho of
    rho^-alpha (height - phi(rho)) vanishes. `enough` ends it early, at the first attack that will
    do; mixtures around the multiplier of the `expected` value are then tried first.
    """
    f = frame(cells, None, corner, alpha, direction, dev)
    shift = math.exp(min(scale - f.scale, 700.0))
    slopes = [math.inf, *sorted({line.slope * shift for line in lines}, reverse=True), -math.inf]
    choice = cache(lambda place: _choice(f, slopes[place]))
    mixture = cache(lambda place: _mixtures(f, choice(place), choice(place + 1), slopes[place + 1]))
    places = range(len(slopes) - 1)
    if enough is not None:
        wanted = alpha * math.exp(min(expected - f.scale, 700.0))
        middle = sum(slope > wanted for slope in slopes) - 1
        for place in sorted(places, key=lambda place: abs(place - middle)):
            if enough(mixture(place).log_excess):
                return mixture(place)
    best = max((mixture(place) for place in places), key=lambda a: a.log_excess)
    for _ in range(3):
        if not math.isfinite(best.log_excess) or (enough and enough(best.log_excess)):
            break
        f = frame(cells, None, corner, alpha, direction, best.dev)
        slope = alpha * math.exp(min(best.log_excess - f.scale, 700.0))
        new = _mixtures(f, _choice(f, slope), best.choice, slope)
        done = new.log_excess <= best.log_excess + 1e-6
        best = max(best, new, key=lambda a: a.log_excess)
        if done:
            break
    return best
