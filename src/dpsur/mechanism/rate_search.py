"""Which learning rate a block tries next, and which one wins: rates by their logarithm to base 2.

The values come from noisy tests, so all of this is post-processing. Why this rule and these
constants: docs/selection.md.
"""

from collections.abc import Sequence
from typing import Final

SEARCH_STEP: Final = 1.5  # octaves from the best start to its neighbours
FAR_OFF: Final = 2 * SEARCH_STEP  # octaves beyond which another start plays no part


def next_exponent(
    starts: Sequence[float], tried: Sequence[float], values: Sequence[float]
) -> float:
    """Which rate to try next.

    All starts, then one step up and down from the best of them, then beyond an end or beside the
    best. So a start that is far off costs one block and nothing else.
    """
    if len(tried) < len(starts):
        return starts[len(tried)]
    centre, around = _around_best_start(len(starts), tried, values)
    if len(tried) < len(starts) + 2:
        return centre + (SEARCH_STEP, -SEARCH_STEP)[len(tried) - len(starts)]
    places, heights = around
    best = heights.index(max(heights))
    if best == 0:
        return places[0] - SEARCH_STEP
    if best == len(places) - 1:
        return places[-1] + SEARCH_STEP
    better = best + 1 if heights[best + 1] > heights[best - 1] else best - 1
    return (places[best] + places[better]) / 2


def best_exponent(count: int, tried: Sequence[float], values: Sequence[float]) -> float:
    """The top of a parabola through the best value and its neighbours, at most half way to them.

    The first `count` of the rates were starts.
    """
    _, (places, heights) = _around_best_start(count, tried, values)
    best = heights.index(max(heights))
    if best in (0, len(places) - 1):
        return places[best]
    left, middle, right = places[best - 1 : best + 2]
    before, top, after = heights[best - 1 : best + 2]
    rise, fall = (middle - left) * (top - after), (right - middle) * (top - before)
    if not rise + fall > 0:
        return middle
    peak = middle - ((middle - left) * rise - (right - middle) * fall) / (2 * (rise + fall))
    return min(max(peak, (left + middle) / 2), (middle + right) / 2)


def between(place: float, places: Sequence[float], heights: Sequence[float]) -> float:
    """A height by linear interpolation, constant beyond the ends."""
    known, levels = _sorted(places, heights)
    for index in range(1, len(known)):
        if place <= known[index] and known[index] > known[index - 1]:
            part = max(0.0, (place - known[index - 1]) / (known[index] - known[index - 1]))
            return levels[index - 1] + part * (levels[index] - levels[index - 1])
    return levels[-1]


def _around_best_start(
    count: int, tried: Sequence[float], values: Sequence[float]
) -> tuple[float, tuple[list[float], list[float]]]:
    """The best start, and what was tried without the starts that are too far from it to matter."""
    known = min(count, len(tried))
    centre = tried[max(range(known), key=lambda place: values[place])]
    near = [
        place
        for place, exponent in enumerate(tried)
        if place >= known or abs(exponent - centre) <= FAR_OFF
    ]
    return centre, _sorted([tried[place] for place in near], [values[place] for place in near])


def _sorted(places: Sequence[float], heights: Sequence[float]) -> tuple[list[float], list[float]]:
    pairs = sorted(zip(places, heights, strict=True))
    return [place for place, _ in pairs], [height for _, height in pairs]
