"""Statistical assertions whose tolerance is a stated multiple of the standard error.

Five standard errors: a right mechanism fails with probability below 1e-6, and every test is seeded
besides, so it cannot fail now and then.
"""

import math

import numpy as np
from scipy import stats

STANDARD_ERRORS = 5.0
FALSE_ALARM = 1e-6


def assert_frequency(successes: int, trials: int, probability: float) -> None:
    error = math.sqrt(probability * (1 - probability) / trials)
    observed = successes / trials
    assert abs(observed - probability) <= STANDARD_ERRORS * error, (
        f"observed {observed:.5f}, expected {probability:.5f} +- {STANDARD_ERRORS} * {error:.5f}"
    )


def assert_standard_deviation(samples: np.ndarray, expected: float) -> None:
    """Normal samples: the sample variance has relative standard error sqrt(2 / n)."""
    ratio = float(np.var(samples)) / expected**2
    error = math.sqrt(2 / samples.size)
    assert abs(ratio - 1) <= STANDARD_ERRORS * error, (
        f"variance ratio {ratio:.4f}, expected 1 +- {STANDARD_ERRORS} * {error:.4f}"
    )


def assert_normal(samples: np.ndarray, scale: float) -> None:
    result = stats.kstest(samples / scale, "norm")
    assert result.pvalue > FALSE_ALARM, f"not N(0, {scale}^2): p = {result.pvalue:.2g}"
