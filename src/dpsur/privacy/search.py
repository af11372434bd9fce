"""Searches: the most repetitions that fit a budget, and the least noise that does.

Both rest on monotonicity alone: epsilon rises with the count and falls with the noise. Brackets
grow geometrically and have ends, so a search always returns or says why it cannot.

Noise that was found before is kept on disk, as a hint: its epsilon is computed before it is used.
A damaged or forged file can cost accuracy or time, never privacy. Files hold public numbers only.
"""

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path

from dpsur.environment import cache_folder, versions, write_cache
from dpsur.errors import BudgetError, DpsurError

MOST_REPETITIONS = 10_000_000
LEAST_NOISE, MOST_NOISE = 0.05, 1e5
NOISE_TOLERANCE = 1e-4
RATIO_TOLERANCE = 1e-3
SECANTS = 10


def most_repetitions(epsilon_of: Callable[[int], float], target: float) -> int:
    """Largest count whose epsilon is at most the target; 0 where not even one fits."""
    fits, too_many = 0, 1
    while epsilon_of(too_many) <= target:
        fits, too_many = too_many, 2 * too_many
        if too_many > MOST_REPETITIONS:
            raise BudgetError(
                f"more than {MOST_REPETITIONS} updates fit epsilon {target:g}: "
                "give the number of updates and let the noise be calibrated"
            )
    return fits + bisect_right(range(fits + 1, too_many), target, key=epsilon_of)


def least_noise(epsilon_of: Callable[[float], float], target: float) -> float | None:
    """Smallest noise multiplier whose epsilon is at most the target, rounded up.

    Returns None where no noise is enough, because something else spends the budget.
    """
    epsilon_of = cache(epsilon_of)
    enough = 1.0
    while epsilon_of(enough) > target:
        enough *= 2
        if enough > MOST_NOISE:
            return None
    while epsilon_of(enough / 2) <= target:
        enough /= 2
        if enough / 2 < LEAST_NOISE:
            return enough
    return _smallest_enough(epsilon_of, target, enough / 2, enough)


def noise_at_least(
    epsilon_of: Callable[[float], float], target: float, start: float | None
) -> float | None:
    """The same from a start on that is nearly enough; None where there is no start.

    A search for a figure that is a little larger than another begins at that one's noise.
    """
    if start is None or epsilon_of(start) <= target:
        return start
    too_little, enough = start, start * (1 + NOISE_TOLERANCE)
    while epsilon_of(enough) > target:
        too_little, enough = enough, enough * (enough / start) ** 2
        if enough > MOST_NOISE:
            return None
    return _smallest_enough(epsilon_of, target, too_little, enough)


def noise_near(
    epsilon_of: Callable[[float], float],
    target: float,
    start: float,
    tolerance: float = NOISE_TOLERANCE,
) -> float | None:
    """The same from a guess on, for figures that take long: three or four where the guess is good.

    Log epsilon over log noise is nearly a straight line, so secants find its root. They end at a
    noise that is enough and that exceeds the root by the tolerance or less, by the line's slope.
    """
    epsilon_of = cache(epsilon_of)
    noise, slope, before = start, -1.0, None
    for _ in range(SECANTS):
        level = _height(epsilon_of(noise), target)
        if before is not None:
            slope = (level - before[1]) / math.log(noise / before[0])
        if not slope < 0:
            break
        if before is not None and slope * tolerance <= level <= 0:
            return noise
        before = noise, level
        noise *= math.exp(min(max(-level / slope, -1.0), 1.0)) * (1 + 0.3 * tolerance)
        if not LEAST_NOISE < noise < MOST_NOISE:
            break
    return least_noise(epsilon_of, target)


def _height(epsilon: float, target: float) -> float:
    return math.log(min(max(epsilon, 1e-300), 1e300) / target)


def _smallest_enough(
    epsilon_of: Callable[[float], float], target: float, too_little: float, enough: float
) -> float:
    """Close a bracket by interpolating log epsilon over log noise, a nearly straight line.

    Every other step halves the bracket, so that an odd function cannot stall the search.
    """

    high, low = (_height(epsilon_of(noise), target) for noise in (too_little, enough))
    for step in range(200):
        if enough / too_little - 1 <= NOISE_TOLERANCE:
            break
        share = 0.5
        if step % 2 == 0 and high > low:
            # Aim a little to the side of enough, so that the next bracket is narrow on that side.
            share = min(max(high / (high - low), 0.01), 0.99)
            share += 0.25 * NOISE_TOLERANCE / math.log(enough / too_little)
        middle = too_little * (enough / too_little) ** min(share, 0.999)
        level = _height(epsilon_of(middle), target)
        if level <= 0:
            enough, low = middle, level
        else:
            too_little, high = middle, level
    return enough


def largest_ratio(epsilon_of: Callable[[float], float], target: float, most: float) -> float | None:
    """Largest acceptance ratio in (1, most] whose epsilon is at most the target, rounded down.

    Returns None where even a ratio of 1, a test that decides nothing, does not fit.
    """
    if epsilon_of(1.0) > target:
        return None
    if epsilon_of(most) <= target:
        return most
    fits, too_much = 1.0, most
    while (too_much - fits) / fits > RATIO_TOLERANCE:
        middle = (fits + too_much) / 2
        if epsilon_of(middle) <= target:
            fits = middle
        else:
            too_much = middle
    return fits


_enabled: ContextVar[bool] = ContextVar("calibration_cache_enabled", default=True)


@contextmanager
def ignore_cache() -> Iterator[None]:
    """Search whatever is stored, as a check of somebody's figures should."""
    token = _enabled.set(False)
    try:
        yield
    finally:
        _enabled.reset(token)


def cached(
    question: object, search: Callable[[], float | None], fits: Callable[[float], bool]
) -> float | None:
    """What a search found before for the same question, if it fits; otherwise what it finds now."""
    if not _enabled.get():
        return search()
    name = hashlib.sha256(f"{code()}\n{question!r}".encode()).hexdigest()
    try:
        path = cache_folder() / "calibrations" / f"{name}.json"
    except DpsurError:  # there is no folder for caches
        return search()
    found = None
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))["noise_multiplier"]
    if isinstance(found, float) and 0 < found <= MOST_NOISE and fits(found):
        return found
    noise = search()
    if noise is not None:
        write_cache(path, json.dumps({"noise_multiplier": noise}).encode())
    return noise


@cache
def code() -> str:
    """What a search depends on beside its question: the code of this package, and versions."""
    digest = hashlib.sha256(json.dumps(versions(), sort_keys=True).encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
