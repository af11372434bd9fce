"""Searches: the most repetitions that fit a budget, and the least noise that does.

Both rest on monotonicity alone: epsilon rises with the count and falls with the noise. Brackets
grow geometrically and have ends, so a search always returns or says why it cannot.
"""

from collections.abc import Callable

from dpsur.errors import BudgetError

MOST_REPETITIONS = 10_000_000
LEAST_NOISE, MOST_NOISE = 0.05, 1e5
NOISE_TOLERANCE = 1e-4


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
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if epsilon_of(middle) <= target:
            fits = middle
        else:
            too_many = middle
    return fits


def least_noise(epsilon_of: Callable[[float], float], target: float) -> float | None:
    """Smallest noise multiplier whose epsilon is at most the target, rounded up.

    Returns None where no noise is enough, because something else spends the budget.
    """
    enough = 1.0
    while epsilon_of(enough) > target:
        enough *= 2
        if enough > MOST_NOISE:
            return None
    too_little = enough / 2
    while epsilon_of(too_little) <= target:
        enough, too_little = too_little, too_little / 2
        if too_little < LEAST_NOISE:
            return enough
    while enough / too_little - 1 > NOISE_TOLERANCE:
        middle = (enough * too_little) ** 0.5
        if epsilon_of(middle) <= target:
            enough = middle
        else:
            too_little = middle
    return enough
