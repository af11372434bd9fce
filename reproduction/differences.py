"""Differences of means over seeds, with intervals and tests."""

from collections.abc import Sequence
from typing import NamedTuple

from scipy import stats

MARGIN = 0.5  # points within which two arms are called equivalent


class Difference(NamedTuple):
    """A difference of two means by Welch's test: 95% interval, p-value, and of equivalence.

    `equivalence` is the p-value of two one-sided tests (TOST) against a difference of at least
    `MARGIN`: below 0.05 the arms are equivalent to within it.
    """

    value: float
    low: float
    high: float
    p: float
    equivalence: float


def difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """The mean of the first minus that of the second; each needs two values at least."""
    found = stats.ttest_ind(first, second, equal_var=False)
    low, high = found.confidence_interval(0.95)
    value = sum(first) / len(first) - sum(second) / len(second)
    shifted = (
        stats.ttest_ind(
            [x + MARGIN for x in first], second, equal_var=False, alternative="greater"
        ),
        stats.ttest_ind([x - MARGIN for x in first], second, equal_var=False, alternative="less"),
    )
    sides = max(float(side.pvalue) for side in shifted)
    return Difference(value, float(low), float(high), float(found.pvalue), sides)


def in_words(found: Difference) -> str:
    """Value and 95% interval."""
    return f"{found.value:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"
