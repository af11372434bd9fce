"""The rule by which a run in blocks finds its learning rate: which is tried next, and which wins.

`RateSearchTraining` (`blocks.py`) follows it. Why this rule and these constants: docs/selection.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# Where the search starts: learning rate times clipping norm of plain SGD, and the rate of Adam.
FIRST_PRODUCT: Final = 24.0
FIRST_ADAM_RATE: Final = 0.08
# Blocks of a search, and updates in each of them.
USUAL_BLOCKS: Final = 3
BLOCKS_PER_RUN, SHORTEST_BLOCK = 16, 40
# A block has learned something if it moved half the Brier score by this much, or the loss by this
# part of its median, and by so many standard errors. Where that is a lot, values are compared.
LEAST_MOVE, MOVE_ERRORS, COARSE_MOVE = 0.005, 3.0, 0.05
# Values within so many standard errors of each other are a tie, which goes to the lower rate.
TIE_ERRORS: Final = 2.0
# Where noise moves the weights, the best rate of a run falls with this power of its length.
LENGTH_POWER: Final = 0.75
ADAM_SHARE: Final = 0.5  # of noise, where steps do not grow with the gradient and none is measured
FIRST, BLOCK, LAST = "first weights", "block", "last block"

SEARCH_STEP: Final = 1.5  # octaves from the best rate to its neighbours
LONG_STEP: Final = 3.0  # octaves, while no rate has learned much, or all were too high
LEARNED: Final = 0.15  # by how much the value of a block that has learned is above the first
HARM: Final = 0.1  # by how much a loss rises where the rate was too high
# What a block did: nothing, harm, little, or something worth comparing with its neighbours.
TOO_LOW, TOO_HIGH, WEAK, USEFUL = "too low", "too high", "weak", "useful"


# --- which rate is tried next, and which one wins: by their logarithm to base 2 ------------------


@dataclass(frozen=True)
class TriedRate:
    """A rate that was tried, the value that its test released, and what that says of the rate."""

    exponent: float
    value: float
    kind: str = USEFUL


def classify(
    exponent: float, value: float, loss: float, first_value: float, first_loss: float, margin: float
) -> TriedRate:
    """A block whose loss and value are compared with those of the first weights.

    A loss that has not moved by the margin means that nothing was learned, at any value: the
    predictions of weights that hardly moved can change a lot.
    """
    fall, gain = first_loss - loss, value - first_value
    if fall > margin and gain > 0:
        return TriedRate(exponent, value, USEFUL if gain >= LEARNED else WEAK)
    if fall < -margin and gain >= LEARNED:  # sure of itself, and right
        return TriedRate(exponent, value, WEAK)
    return TriedRate(exponent, value, TOO_HIGH if fall < -HARM else TOO_LOW)


def next_exponent(start: float, tried: Sequence[TriedRate], tie: float = 0.0) -> float:
    """Which rate to try next.

    The start first. While none has learned anything, long steps up, or down if all were too high,
    or half way between both. If the best has learned little, one long step up. Then the neighbours
    of the best, first towards the nearest other rate, or down, and last the middle between it and
    the better neighbour. Of rates whose values are within a `tie` the lowest is the best.
    """
    if not tried:
        return start
    best = _best(tried, tie)
    high = _exponents(tried, TOO_HIGH)
    highest = max((block.exponent for block in tried if block.kind != TOO_HIGH), default=None)
    if best is None:
        if highest is None:
            return min(high) - LONG_STEP
        return (highest + min(high)) / 2 if high else highest + LONG_STEP
    if best.kind == WEAK and not high and highest is not None and highest <= start:
        return highest + LONG_STEP
    below, above = (_nearest(best, tried, side, SEARCH_STEP) for side in (-1, 1))
    if below is None and above is None:
        ways = [block.exponent - best.exponent for block in tried if block is not best]
        return best.exponent + math.copysign(SEARCH_STEP, min(ways, key=abs, default=-1.0))
    if above is None:
        return best.exponent + SEARCH_STEP
    if below is None:
        return best.exponent - SEARCH_STEP
    better = above if above.value > below.value else below
    return (best.exponent + better.exponent) / 2


def best_exponent(tried: Sequence[TriedRate], tie: float = 0.0) -> float:
    """The top of a parabola through the best value and two beside it, at most half a step away.

    These are its neighbours. At an end they are the neighbour and the one beyond it; where values
    still rise without slowing down, it is half a step further. Where the tests cannot tell rates
    apart, values within a `tie`, it is the lowest of those, without a parabola through noise.
    Without a useful rate it is the highest that did no harm.
    """
    best = _best(tried, tie)
    if best is None:
        low = _exponents(tried, TOO_LOW)
        return max(low) if low else min(_exponents(tried, TOO_HIGH)) - LONG_STEP
    if len(_tied(tried, tie)) > 1:
        return best.exponent
    below, above = (_nearest(best, tried, side, SEARCH_STEP) for side in (-1, 1))
    if below is not None and above is not None:
        first, second = below, above
    else:
        end, side = (below, -1) if above is None else (above, 1)
        beyond = None if end is None else _nearest(end, tried, side, SEARCH_STEP)
        if end is None or beyond is None or TOO_HIGH in (end.kind, beyond.kind):
            return best.exponent
        first, second = end, beyond
    return best.exponent + _top(best, first, second)


def _top(best: TriedRate, first: TriedRate, second: TriedRate) -> float:
    """Where a parabola is highest, from the best on: not beyond the middle to a neighbour."""
    (x, dx), (y, dy) = (
        (block.exponent - best.exponent, block.value - best.value) for block in (first, second)
    )
    low, high = (min(x, y), max(x, y)) if x * y < 0 else (-SEARCH_STEP, SEARCH_STEP)
    curve = (dy / y - dx / x) / (y - x)
    slope = dx / x - curve * x
    if curve >= 0:  # no top
        peak = math.copysign(math.inf, slope) if slope else 0.0
    else:
        peak = -slope / (2 * curve)
    return min(max(peak, low / 2), high / 2)


def between(place: float, places: Sequence[float], heights: Sequence[float]) -> float:
    """A height by linear interpolation, constant beyond the ends."""
    pairs = sorted(zip(places, heights, strict=True))
    known, levels = [place for place, _ in pairs], [height for _, height in pairs]
    for index in range(1, len(known)):
        if place <= known[index] and known[index] > known[index - 1]:
            part = max(0.0, (place - known[index - 1]) / (known[index] - known[index - 1]))
            return levels[index - 1] + part * (levels[index] - levels[index - 1])
    return levels[-1]


def _best(tried: Sequence[TriedRate], tie: float) -> TriedRate | None:
    """The block of the highest value among those that have learned something; the lowest rate."""
    return min(_tied(tried, tie), key=lambda block: block.exponent, default=None)


def _tied(tried: Sequence[TriedRate], tie: float) -> list[TriedRate]:
    """The blocks that have learned something, and whose value may be the highest."""
    useful = [block for block in tried if block.kind in (USEFUL, WEAK)]
    highest = max((block.value for block in useful), default=0.0)
    return [block for block in useful if block.value >= highest - tie]


def _exponents(tried: Sequence[TriedRate], kind: str) -> list[float]:
    return [block.exponent for block in tried if block.kind == kind]


def _nearest(
    block: TriedRate, tried: Sequence[TriedRate], side: int, reach: float
) -> TriedRate | None:
    """The nearest rate on a side, -1 for below and 1 for above, if it is within reach."""
    beside = [b for b in tried if 0 < side * (b.exponent - block.exponent) <= reach * (1 + 1e-9)]
    return min(beside, key=lambda b: abs(b.exponent - block.exponent), default=None)


# --- the settings of a search --------------------------------------------------------------------


def end_of(block: int) -> str:
    """The name of the state at the end of a block of the search, counted from 0."""
    return f"{BLOCK} {block + 1}"


def search_blocks(
    updates: int,
    starts: int,
    *,
    clip_by_median: bool,
    blocks: int | None = None,
    block_updates: int | None = None,
) -> tuple[int, ...]:
    """The updates before each test: of the first weights, of the search, and of the last block."""
    count = blocks or USUAL_BLOCKS + starts - 1
    size = block_updates or max(SHORTEST_BLOCK, -(-updates // BLOCKS_PER_RUN))
    first = (0, 0) if clip_by_median else (0,)
    return (*first, *[size] * count, updates)


@dataclass(frozen=True)
class RateRule:
    """The settings of a search, which are fixed before the run.

    A `learning_rate` is tried by the last block of the search; a bad one costs that block and
    nothing else. Gradients may be rescaled anyway (`scale_free`, Adam), and `momentum` is that of
    the optimizer. `length_power` says how fast the best rate falls with the length of a block where
    noise dominates, and `head_start` whether the last block starts from where the short ones went.
    """

    max_grad_norm: float
    learning_rate: float | None = None
    schedule: str = "linear"
    clip_by_median: bool = True
    scale_free: bool = False
    momentum: float = 0.0
    length_power: float = LENGTH_POWER
    head_start: bool = True

    @property
    def starts(self) -> tuple[float, ...]:
        """Where the search starts, and the rate that was given, as exponents.

        They are log2 of rate times clipping norm, or of the rate where gradients are rescaled.
        """
        by_rule = FIRST_ADAM_RATE if self.scale_free else FIRST_PRODUCT * (1 - self.momentum)
        if self.learning_rate is None:
            return (math.log2(by_rule),)
        given = self.learning_rate * (1.0 if self.scale_free else self.max_grad_norm)
        return math.log2(by_rule), math.log2(given)
