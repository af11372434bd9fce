"""Certified and attained Rényi divergence of one accepted update: one order, one direction."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dpsur.privacy.accountants.selective.frame import Vertices, frame, vertices
from dpsur.privacy.accountants.selective.lower import attack
from dpsur.privacy.accountants.selective.pair import Direction, bracket
from dpsur.privacy.accountants.selective.upper import envelope

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
    while nodes <= accuracy.most_nodes and (alpha + 15.0 * s) / s < WIDEST:
        with np.errstate(all="ignore"):
            lower, upper = _log_excess(q, s, corner, alpha, direction, nodes, accuracy.gap / 4)
        if not math.isnan(lower):
            low = max(low, float(np.logaddexp(0.0, lower)) / (alpha - 1.0) * (1.0 - 1e-12))
        if not math.isnan(upper):
            high = min(high, float(np.logaddexp(0.0, upper)) / (alpha - 1.0) * (1.0 + 1e-12))
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
    return (alpha / (2.0 * s * s) + (2.0 * alpha - 1.0) * math.log(r) / (alpha - 1.0)) * (
        1.0 + 1e-12
    )


def _log_excess(
    q: float,
    s: float,
    corner: Vertices,
    alpha: float,
    direction: Direction,
    nodes: int,
    tolerance: float,
) -> tuple[float, float]:
    both = bracket(q, s, alpha, direction, nodes)
    dev, lower, upper = 0.0, -math.inf, math.inf
    for _ in range(4):
        f = frame(both.chord, both.tails, corner, alpha, direction, dev)
        found = envelope(f, tolerance)
        upper = min(upper, found.log_excess)
        best = attack(both.cells, corner, alpha, direction, dev, found.lines, f.scale)
        lower = max(lower, best.log_excess)
        # a frame far from the optimum loses digits to cancellation: look again from the optimum
        if found.log_excess <= found.best + 2.0 * tolerance or dev == best.dev:
            break
        dev = best.dev
    return lower, upper
