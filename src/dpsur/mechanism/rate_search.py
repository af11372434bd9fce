"""Which learning rate a block tries next, and which one wins: rates by their logarithm to base 2.

The values come from noisy tests, so all of this is post-processing. Why this rule and these
constants: docs/selection.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

SEARCH_STEP: Final = 1.5  # octaves from the best rate to its neighbours
LONG_STEP: Final = 3.0  # octaves, while no rate has moved the loss, or all were too high
# What a block did to the loss: nothing, more harm than good, or something worth comparing.
TOO_LOW, TOO_HIGH, USEFUL = "too low", "too high", "useful"


@dataclass(frozen=True)
class Block:
    """A rate that was tried, the value that its test released, and what that says of the rate."""

    exponent: float
    value: float
    kind: str = USEFUL


def judged(
    exponent: float, value: float, loss: float, first_value: float, first_loss: float, margin: float
) -> Block:
    """A block whose loss and value are compared with those of the first weights.

    A loss that has not moved by the margin means that nothing was learned, whatever the value: the
    predictions of weights that hardly moved can change a lot.
    """
    if abs(loss - first_loss) <= margin:
        return Block(exponent, value, TOO_LOW)
    harmed = loss > first_loss and value <= first_value
    return Block(exponent, value, TOO_HIGH if harmed else USEFUL)


def next_exponent(starts: Sequence[float], tried: Sequence[Block]) -> float:
    """Which rate to try next.

    All starts first. While none is useful, long steps up, or down if all were too high, or half way
    between both. Then the neighbours of the best, and last the middle between it and the better
    neighbour. So a start that is far off costs one block and nothing else.
    """
    if len(tried) < len(starts):
        return starts[len(tried)]
    best = _best(tried)
    if best is None:
        low, high = _exponents(tried, TOO_LOW), _exponents(tried, TOO_HIGH)
        if not high:
            return max(low) + LONG_STEP
        return (max(low) + min(high)) / 2 if low else min(high) - LONG_STEP
    below, above = _neighbours(best, tried)
    if above is None:
        return best.exponent + SEARCH_STEP
    if below is None:
        return best.exponent - SEARCH_STEP
    better = above if above.value > below.value else below
    return (best.exponent + better.exponent) / 2


def best_exponent(tried: Sequence[Block]) -> float:
    """The top of a parabola through the best value and its neighbours, at most half way to them.

    Without a useful rate it is the highest that did no harm.
    """
    best = _best(tried)
    if best is None:
        low = _exponents(tried, TOO_LOW)
        return max(low) if low else min(_exponents(tried, TOO_HIGH)) - LONG_STEP
    below, above = _neighbours(best, tried)
    if below is None or above is None:
        return best.exponent
    left, middle, right = below.exponent, best.exponent, above.exponent
    rise = (middle - left) * (best.value - above.value)
    fall = (right - middle) * (best.value - below.value)
    if not rise + fall > 0:
        return middle
    peak = middle - ((middle - left) * rise - (right - middle) * fall) / (2 * (rise + fall))
    return min(max(peak, (left + middle) / 2), (middle + right) / 2)


def between(place: float, places: Sequence[float], heights: Sequence[float]) -> float:
    """A height by linear interpolation, constant beyond the ends."""
    pairs = sorted(zip(places, heights, strict=True))
    known, levels = [place for place, _ in pairs], [height for _, height in pairs]
    for index in range(1, len(known)):
        if place <= known[index] and known[index] > known[index - 1]:
            part = max(0.0, (place - known[index - 1]) / (known[index] - known[index - 1]))
            return levels[index - 1] + part * (levels[index] - levels[index - 1])
    return levels[-1]


def _best(tried: Sequence[Block]) -> Block | None:
    """The useful block of the highest value."""
    useful = [block for block in tried if block.kind == USEFUL]
    return max(useful, key=lambda block: block.value, default=None)


def _exponents(tried: Sequence[Block], kind: str) -> list[float]:
    return [block.exponent for block in tried if block.kind == kind]


def _neighbours(best: Block, tried: Sequence[Block]) -> tuple[Block | None, Block | None]:
    """The nearest rates below and above the best, if they are at most a step away."""
    reach = SEARCH_STEP * (1 + 1e-9)
    below = [b for b in tried if 0 < best.exponent - b.exponent <= reach]
    above = [b for b in tried if 0 < b.exponent - best.exponent <= reach]
    return (
        max(below, key=lambda block: block.exponent, default=None),
        min(above, key=lambda block: block.exponent, default=None),
    )
