"""Certified and attained Rényi divergence of one accepted update: one order, one direction.

The adversary: step functions a0, a1 of z that attain a value, rounded down.

One vertex per mesh cell is a legitimate pair of step functions. E[a0] and E[L a1] of such a pair
are exact sums over the cells, and replacing L by its mean over a cell lowers the moment (Jensen),
so the value returned is reached by the step functions themselves.

The certificate: an upper value of log(Mom - 1) that no test can pass.

For a multiplier m let theta(m) be any number with

    E[ max over vertices of den phi(x) - m den (x - 1) - theta den ] <= 0.

Then E[den phi(x)] / E[den] <= theta + m (rho - 1) for every choice of a0, a1, and by (*) in `frame`

    Mom - 1 <= rho^-alpha (theta + m (rho - 1) - phi(rho))        for whatever rho that choice has.

So each multiplier gives a line above a concave function of rho, and one pass over the atoms
bounds all u at once. The range of rho is cut at the points where two lines cross; in each piece
the right-hand side has one stationary point, known in closed form. New lines are added where the
bound is largest (chord rule) until it meets what the best choice on the same atoms attains.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from dpsur.privacy.accountants.selective.pair import (
    LINEAR,
    RELATIVE,
    Array,
    Choice,
    Direction,
    Frame,
    Pair,
    Vertices,
    bracket,
    frame,
    phi,
    phi_at,
    vertices,
)

MAX_LINES = 60


@dataclass(frozen=True)
class Line:
    """E[den phi]/E[den] <= height + slope (rho - 1), and a choice that comes close to it."""

    slope: float
    height: float
    lean: float  # rho - 1 of that choice
    level: float  # its E[den phi]/E[den]


@dataclass(frozen=True)
class Envelope:
    """The certificate, and the best choice on the same atoms that it was driven down to."""

    log_excess: float  # certified: log(Mom - 1) is at most this
    best: float  # log(Mom - 1) of the best choice found on the same atoms
    lines: tuple[Line, ...]


def sup_ratio(top: Array, den: Array, start: float) -> tuple[float, Choice]:
    """Dinkelbach: the largest sum(top) / sum(den) over one vertex per atom, and that vertex."""
    theta, columns = start, np.arange(top.shape[1])
    choice = np.argmax(top - theta * den, axis=0)
    for _ in range(60):
        ratio = float(top[choice, columns].sum() / den[choice, columns].sum())
        if not ratio > theta + 1e-13 * abs(theta):
            break
        theta = ratio
        choice = np.argmax(top - theta * den, axis=0)
    return theta, choice


def tangent(f: Frame, slope: float, start: float) -> Line:
    """The line of one multiplier, certified: residual, tails and margins raise its height.

    The expectation in the head of this file falls by at least den_floor per unit of theta.
    """
    top = f.value - slope * f.lean
    theta, choice = sup_ratio(top, f.den, start)
    residual = float((top - theta * f.den).max(axis=0).sum())
    margin = LINEAR * (abs(theta) * f.den_sum + abs(slope) * f.lean_sum)
    tail = f.tail_value + f.tail_linear * (abs(theta) + abs(slope))
    height = theta + (max(residual, 0.0) + margin + tail) / f.den_floor
    return Line(slope, height, *_reached(f, choice))


def _reached(f: Frame, choice: Choice) -> tuple[float, float]:
    columns = np.arange(choice.size)
    den = float(f.den[choice, columns].sum())
    lean = float(f.lean[choice, columns].sum()) / den
    return lean, float(f.value[choice, columns].sum()) / den


def edge(f: Frame, sign: float) -> tuple[float, Line]:
    """One end of the feasible range of rho - 1, certified, and the choice that reaches it."""
    top = sign * f.lean
    theta, choice = sup_ratio(top, f.den, -2.0 * f.lean_sum / f.den_floor)
    residual = max(float((top - theta * f.den).max(axis=0).sum()), 0.0)
    margin = LINEAR * (abs(theta) * f.den_sum + f.lean_sum)
    slack = residual + margin + f.tail_linear * (1.0 + abs(theta))
    return sign * (theta + slack / f.den_floor), Line(math.inf, math.inf, *_reached(f, choice))


def log_excess(f: Frame, height: float, slope: float, lean: float, margin: float = 0.0) -> float:
    """log of rho^-alpha (height + slope (rho - 1) - phi(rho)) at rho = 1 + lean, scale undone."""
    if lean <= -1.0:
        return math.inf
    exponent = f.alpha * math.log1p(lean)
    if exponent > 30.0:
        linear = math.exp(-f.scale) * (1.0 + f.alpha * lean)
        curve = math.exp(min(exponent - f.scale, 700.0)) - linear
    else:
        curve = phi_at(f.alpha, lean) * math.exp(-f.scale)
    value = height + slope * lean - curve
    value += margin * (abs(height) + abs(slope * lean) + curve)
    if math.isnan(value):
        return math.inf
    return -exponent + f.scale + math.log(value) if value > 0 else -math.inf


def _peak(f: Frame, line: Line, lo: float, hi: float) -> float:
    if not math.isfinite(line.height):
        return math.inf
    places = [lo, hi, *_stationary(f, line.slope, line.height, lo, hi)]
    return max(log_excess(f, line.height, line.slope, place, RELATIVE) for place in places)


def _stationary(f: Frame, slope: float, height: float, lo: float, hi: float) -> list[float]:
    flat = slope + f.alpha * math.exp(-f.scale)
    if flat == 0.0:
        return []
    place = (slope - f.alpha * height) / ((f.alpha - 1.0) * flat)
    return [place] if lo < place < hi else []


class _Piece(NamedTuple):
    """An interval of rho - 1 between two attained points, and the lines that bound it."""

    bound: float
    roof: tuple[Line, Line]
    lo: float
    hi: float
    left: Line  # attained points next to the interval
    right: Line


def _under(f: Frame, roof: tuple[Line, Line], lo: float, hi: float) -> float:
    """The bound on [lo, hi] under two lines: each is used on its own side of the crossing."""
    left, right = roof
    for line, other in ((left, right), (right, left)):
        if not math.isfinite(line.height):
            return _peak(f, other, lo, hi)
    cross = hi
    if left.slope != right.slope:
        cross = min(max((left.height - right.height) / (right.slope - left.slope), lo), hi)
    return max(_peak(f, left, lo, cross), _peak(f, right, cross, hi))


def _piece(
    f: Frame, lo: float, hi: float, left: Line, right: Line, roofs: list[tuple[Line, Line]]
) -> _Piece:
    """Takes the best roof: steep lines carry wide margins and may be worse than older ones."""
    bounds = [_under(f, roof, lo, hi) for roof in roofs]
    return _Piece(min(bounds), roofs[bounds.index(min(bounds))], lo, hi, left, right)


def envelope(f: Frame, tolerance: float) -> Envelope:
    """Adds lines until the certificate is within `tolerance`, in log, of an attained value."""
    hi, last = edge(f, 1.0)
    lo, first = edge(f, -1.0)
    # a0 and a1 lie in [1, r] and E[L] = 1, so u is in [1/r, r] whatever the margins say
    lo = max(lo, (1.0 / f.accept_ratio) / f.centre * (1.0 - RELATIVE) - 1.0)
    hi = min(hi, f.accept_ratio / f.centre * (1.0 + RELATIVE) - 1.0)
    start = tangent(f, 0.0, 0.0)
    if not (lo <= hi and math.isfinite(start.height) and math.isfinite(start.lean)):
        return Envelope(math.inf, -math.inf, (start,))
    lines = [start]
    best = max(log_excess(f, line.level, 0.0, line.lean) for line in (first, last, start))
    middle = min(max(start.lean, lo), hi)
    pieces = [
        _piece(f, lo, middle, first, start, [(first, start)]),
        _piece(f, middle, hi, start, last, [(start, last)]),
    ]
    closed = -math.inf
    while pieces and len(lines) < MAX_LINES:
        piece = max(pieces, key=lambda p: p.bound)
        if piece.bound <= max(best, closed) + tolerance:
            break
        pieces.remove(piece)
        bound, old, a, b, left, right = piece
        run = right.lean - left.lean
        slope = (right.level - left.level) / run if run > 0 else math.nan
        if not math.isfinite(slope):
            closed = max(closed, bound)
            continue
        chord = left.level - slope * left.lean
        new = tangent(f, slope, chord)
        lines.append(new)
        best = max(best, log_excess(f, new.level, 0.0, new.lean))
        # Mixing two choices attains every point of the chord between them.
        for place in _stationary(f, slope, chord, left.lean, right.lean):
            best = max(best, log_excess(f, chord, slope, place))
        if not a < new.lean < b or new.lean - a < 1e-12 * (b - a) or b - new.lean < 1e-12 * (b - a):
            # the concave function is this chord: the new line is the last word on the piece
            closed = max(closed, min(bound, _peak(f, new, a, b)))
            continue
        pieces.append(_piece(f, a, new.lean, left, new, [(old[0], new), old]))
        pieces.append(_piece(f, new.lean, b, new, right, [(new, old[1]), old]))
    top = max([closed, *(p.bound for p in pieces)])
    return Envelope(top, best, tuple(lines))


@dataclass(frozen=True)
class Attack:
    """Step functions a0, a1 and what they attain."""

    log_excess: float  # log(Mom - 1) of the step functions is at least this
    dev: float  # u - 1
    choice: Choice  # vertex per cell, left tail first, right tail last


def _attained_log_excess(f: Frame, level: Array, lean: Array) -> Array:
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
        reached = _attained_log_excess(f, level, lean)
        value = reached - f.alpha * LINEAR * (1.0 + f.lean_sum / sums[1])
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


VERSION = "selective-2"
WIDEST = 1300.0


class Interval(NamedTuple):
    """Attained and certified value of the same quantity."""

    lower: float
    upper: float


@dataclass(frozen=True)
class Accuracy:
    """How hard to try; the values are valid whatever it says."""

    nodes: int  # of the first mesh; doubled while the gap is too wide
    most_nodes: int
    gap: float  # aimed-for relative distance of the two values
    # Whether the attained value is wanted. Without it the certified one is the same, to the last
    # bit, and takes half the time.
    attained: bool = True


COARSE = Accuracy(nodes=300, most_nodes=300, gap=3e-3)
FINE = Accuracy(nodes=1200, most_nodes=9600, gap=4e-4)


def divergence(
    q: float,
    s: float,
    q_v: float,
    r: float,
    alpha: float,
    direction: Direction,
    accuracy: Accuracy = FINE,
) -> Interval:
    """R(alpha) of one accepted update lies in the interval: `upper` is proven, `lower` is attained.

    q and s: training sample rate and noise multiplier; q_v: validation sample rate; r: largest
    over smallest acceptance probability. What cannot be evaluated falls back on a crude bound, or
    on infinity.
    """
    corner, nodes = vertices(r, q_v), accuracy.nodes
    low, high = 0.0, crude(s, r, alpha)

    def narrowed(lower: float, upper: float) -> tuple[float, float]:
        """The interval so far, narrowed by what was found; nan narrows nothing."""
        least, most = (float(np.logaddexp(0.0, x)) / (alpha - 1.0) for x in (lower, upper))
        return max(low, least * (1.0 - 1e-12)), min(high, most * (1.0 + 1e-12))

    def enough(upper: float, lower: float) -> bool:
        """Whether no other mesh follows, so that a better attack would change nothing."""
        found_low, found_high = narrowed(lower, upper)
        return 2 * nodes > accuracy.most_nodes or found_high <= found_low * (1.0 + accuracy.gap)

    while nodes <= accuracy.most_nodes and (alpha + 15.0 * s) / s < WIDEST:
        stop = None if accuracy.attained else enough
        with np.errstate(all="ignore"):
            found = _log_excess(q, s, corner, alpha, direction, nodes, accuracy.gap / 4, stop)
        low, high = narrowed(*found)
        if high <= low * (1.0 + accuracy.gap):
            break
        nodes *= 2
    return Interval(low, high) if low <= high else Interval(0.0, math.inf)


def crude(s: float, r: float, alpha: float) -> float:
    """A bound without numerics, alone where a mesh would span over WIDEST standard deviations.

    a1^alpha a0^(1-alpha) <= r^alpha (and with the roles swapped), E[den] <= r, E[num] >= 1, and
    what is left is the moment of the Gaussian pair without sampling.
    """
    if s < 1e-100:
        return math.inf
    moment = alpha / (2.0 * s * s) + (2.0 * alpha - 1.0) * math.log(r) / (alpha - 1.0)
    return moment * (1.0 + 1e-12)


def _log_excess(
    q: float,
    s: float,
    corner: Vertices,
    alpha: float,
    direction: Direction,
    nodes: int,
    tolerance: float,
    enough: Callable[[float, float], bool] | None,
) -> tuple[float, float]:
    """Attained and certified value on one mesh; attacks end where `enough` says so."""
    both = bracket(q, s, alpha, direction, nodes)
    dev, lower, upper = 0.0, -math.inf, math.inf
    for _ in range(4):
        f = frame(both.chord, both.tails, corner, alpha, direction, dev)
        found = envelope(f, tolerance)
        upper = min(upper, found.log_excess)
        final = found.log_excess <= found.best + 2.0 * tolerance
        # Where this is not the last frame, the next one depends on the best attack.
        stop = partial(enough, upper) if final and enough is not None else None
        if stop is not None and stop(lower):
            break
        best = attack(
            both.cells, corner, alpha, direction, dev, found.lines, f.scale,
            expected=found.best, enough=stop,
        )  # fmt: skip
        lower = max(lower, best.log_excess)
        # a frame far from the optimum loses digits to cancellation: look again from the optimum
        if final or dev == best.dev:
            break
        dev = best.dev
    return lower, upper
