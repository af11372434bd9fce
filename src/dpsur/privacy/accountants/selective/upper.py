"""The certificate: an upper value of log(Mom - 1) that no test can pass.

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
from dataclasses import dataclass

import numpy as np

from dpsur.privacy.accountants.selective.frame import LINEAR, RELATIVE, Frame, phi_at
from dpsur.privacy.accountants.selective.pair import Array, Choice

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
    lean: float  # where that choice lies: rho - 1
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
    columns = np.arange(top.shape[1])
    den = float(f.den[choice, columns].sum())
    return Line(
        slope,
        height,
        float(f.lean[choice, columns].sum()) / den,
        float(f.value[choice, columns].sum()) / den,
    )


def edge(f: Frame, sign: float) -> tuple[float, Line]:
    """One end of the feasible range of rho - 1, certified, and the choice that reaches it."""
    top = sign * f.lean
    theta, choice = sup_ratio(top, f.den, -2.0 * f.lean_sum / f.den_floor)
    residual = max(float((top - theta * f.den).max(axis=0).sum()), 0.0)
    slack = (
        residual
        + LINEAR * (abs(theta) * f.den_sum + f.lean_sum)
        + f.tail_linear * (1.0 + abs(theta))
    )
    columns = np.arange(top.shape[1])
    den = float(f.den[choice, columns].sum())
    lean = float(f.lean[choice, columns].sum()) / den
    level = float(f.value[choice, columns].sum()) / den
    return sign * (theta + slack / f.den_floor), Line(math.inf, math.inf, lean, level)


def log_excess(f: Frame, height: float, slope: float, lean: float, margin: float = 0.0) -> float:
    """log of rho^-alpha (height + slope (rho - 1) - phi(rho)) at rho = 1 + lean, scale undone."""
    if lean <= -1.0:
        return math.inf
    exponent = f.alpha * math.log1p(lean)
    if exponent > 30.0:
        curve = math.exp(min(exponent - f.scale, 700.0)) - math.exp(-f.scale) * (
            1.0 + f.alpha * lean
        )
    else:
        curve = phi_at(f.alpha, lean) * math.exp(-f.scale)
    value = height + slope * lean - curve
    value += margin * (abs(height) + abs(slope * lean) + curve)
    if math.isnan(value):
        return math.inf
    return -exponent + f.scale + math.log(value) if value > 0 else -math.inf


def _peak(f: Frame, line: Line, lo: float, hi: float) -> float:
    """The largest bound a line gives on [lo, hi]."""
    if not math.isfinite(line.height):
        return math.inf
    candidates = [lo, hi]
    flat = line.slope + f.alpha * math.exp(-f.scale)
    if flat != 0.0:
        stationary = (line.slope - f.alpha * line.height) / ((f.alpha - 1.0) * flat)
        if lo < stationary < hi:
            candidates.append(stationary)
    return max(log_excess(f, line.height, line.slope, c, RELATIVE) for c in candidates)


@dataclass(frozen=True)
class _Piece:
    """An interval of rho - 1 between two attained points, and the lines that bound it."""

    lo: float
    hi: float
    left: Line  # attained points next to the interval
    right: Line
    roof: tuple[Line, Line]
    bound: float


def _under(f: Frame, roof: tuple[Line, Line], lo: float, hi: float) -> float:
    """The bound on [lo, hi] under two lines: each is used on its own side of the crossing."""
    left, right = roof
    if not math.isfinite(left.height):
        return _peak(f, right, lo, hi)
    if not math.isfinite(right.height):
        return _peak(f, left, lo, hi)
    cross = hi
    if left.slope != right.slope:
        cross = (left.height - right.height) / (right.slope - left.slope)
    cross = min(max(cross, lo), hi)
    return max(_peak(f, left, lo, cross), _peak(f, right, cross, hi))


def _piece(
    f: Frame, lo: float, hi: float, left: Line, right: Line, roofs: list[tuple[Line, Line]]
) -> _Piece:
    """Takes the best roof: steep lines carry wide margins and may be worse than older ones."""
    bound, k = min((_under(f, roof, lo, hi), k) for k, roof in enumerate(roofs))
    return _Piece(lo, hi, left, right, roofs[k], bound)


def envelope(f: Frame, tolerance: float) -> Envelope:
    """Adds lines until the certificate is within `tolerance`, in log, of an attained value."""
    hi, last = edge(f, 1.0)
    lo, first = edge(f, -1.0)
    # a0 and a1 lie in [1, r] and E[L] = 1, so u is in [1/r, r] whatever the margins say
    lo = max(lo, (1.0 / f.accept_ratio) / f.centre * (1.0 - RELATIVE) - 1.0)
    hi = min(hi, f.accept_ratio / f.centre * (1.0 + RELATIVE) - 1.0)
    lines: list[Line] = []
    best, best_lean = -math.inf, 0.0

    def attained(line: Line) -> None:
        nonlocal best, best_lean
        value = log_excess(f, line.level, 0.0, line.lean)
        if value > best:
            best, best_lean = value, line.lean

    attained(first)
    attained(last)
    start = tangent(f, 0.0, 0.0)
    if not (lo <= hi and math.isfinite(start.height) and math.isfinite(start.lean)):
        return Envelope(math.inf, -math.inf, 0.0, (start,))
    lines.append(start)
    attained(start)
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
        a, b, left, right = piece.lo, piece.hi, piece.left, piece.right
        run = right.lean - left.lean
        slope = (right.level - left.level) / run if run > 0 else math.nan
        if not math.isfinite(slope):
            closed = max(closed, piece.bound)
            continue
        new = tangent(f, slope, left.level - slope * left.lean)
        lines.append(new)
        attained(new)
        best = max(best, _chord_best(f, left, right, slope))
        if not a < new.lean < b or new.lean - a < 1e-12 * (b - a) or b - new.lean < 1e-12 * (b - a):
            # the concave function is this chord: the new line is the last word on the piece
            closed = max(closed, min(piece.bound, _peak(f, new, a, b)))
            continue
        old = piece.roof
        pieces.append(_piece(f, a, new.lean, left, new, [(old[0], new), old]))
        pieces.append(_piece(f, new.lean, b, new, right, [(new, old[1]), old]))
    top = max([closed, *(p.bound for p in pieces)])
    return Envelope(top, best, best_lean, tuple(lines))


def _chord_best(f: Frame, left: Line, right: Line, slope: float) -> float:
    """Mixing two choices attains every point of the chord between them."""
    chord = Line(slope, left.level - slope * left.lean, left.lean, left.level)
    flat = slope + f.alpha * math.exp(-f.scale)
    if flat == 0.0:
        return -math.inf
    stationary = (slope - f.alpha * chord.height) / ((f.alpha - 1.0) * flat)
    if not left.lean < stationary < right.lean:
        return -math.inf
    return log_excess(f, chord.height, slope, stationary)
