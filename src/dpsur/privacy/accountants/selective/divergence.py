"""Certified and attained Rényi divergence of one accepted update: one order, one direction."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
        """The interval so far, narrowed by what was found."""
        found_low, found_high = low, high
        if not math.isnan(lower):
            size = float(np.logaddexp(0.0, lower)) / (alpha - 1.0)
            found_low = max(low, size * (1.0 - 1e-12))
        if not math.isnan(upper):
            size = float(np.logaddexp(0.0, upper)) / (alpha - 1.0)
            found_high = min(high, size * (1.0 + 1e-12))
        return found_low, found_high

    def enough(upper: float, lower: float) -> bool:
        """Whether no other mesh follows, so that a better attack would change nothing."""
        if 2 * nodes > accuracy.most_nodes:
            return True
        found_low, found_high = narrowed(lower, upper)
        return found_high <= found_low * (1.0 + accuracy.gap)

    while nodes <= accuracy.most_nodes and (alpha + 15.0 * s) / s < WIDEST:
        with np.errstate(all="ignore"):
            found = _log_excess(
                q, s, corner, alpha, direction, nodes, accuracy.gap / 4,
                None if accuracy.attained else enough,
            )  # fmt: skip
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
