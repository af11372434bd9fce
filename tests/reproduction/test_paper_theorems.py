"""The paper's own analysis: its formulas, checked by quadrature and by simulation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.integrate import quad

from dpsur.errors import InvalidInputError
from reproduction.paper_theorems import (
    acceptance_gap,
    best_threshold,
    log_cdf_ratio,
    selective_gaussian,
    truncated_gaussian_rdp,
)

DIRECTIONS = ("zero-first", "shifted-first")


def by_quadrature(alpha, sigma, direction, below, above, mu=1.0):
    scale = mu * sigma
    first, second = (0.0, mu) if direction == "zero-first" else (mu, 0.0)

    def log_density(x, mean):
        mass = stats.norm.cdf(below, mean, scale) - stats.norm.cdf(above, mean, scale)
        return stats.norm.logpdf(x, mean, scale) - math.log(mass)

    def integrand(x):
        return math.exp(alpha * log_density(x, first) + (1 - alpha) * log_density(x, second))

    low = max(above, -60 * scale)
    high = min(below, 60 * scale)
    value, _ = quad(integrand, low, high, epsabs=0, epsrel=1e-11, limit=500)
    return math.log(value) / (alpha - 1)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("alpha", [1.5, 2.0, 8.0])
@pytest.mark.parametrize(("above", "below"), [(-math.inf, 0.3), (-math.inf, -1.0), (-0.5, 1.2)])
@pytest.mark.parametrize("mu", [1.0, 0.002])
def test_divergence_of_truncated_gaussians(direction, alpha, above, below, mu):
    ours = truncated_gaussian_rdp(alpha, 1.3, direction, below * mu, above * mu, mu)
    exact = by_quadrature(alpha, 1.3, direction, below * mu, above * mu, mu)
    assert ours == pytest.approx(exact, rel=1e-7, abs=1e-10)


@settings(max_examples=200, deadline=None)
@given(
    alpha=st.floats(1.01, 100.0),
    sigma=st.floats(0.2, 20.0),
    below=st.floats(-5.0, 5.0),
    direction=st.sampled_from(DIRECTIONS),
)
def test_the_theorem_on_the_normal_cdf(alpha, sigma, below, direction):
    """A, B <= 1: selecting below a threshold costs a fixed scalar nothing."""
    assert log_cdf_ratio(alpha, sigma, direction, below) <= 1e-9 * alpha


def test_a_wrong_normalisation_breaks_the_theorem():
    """The control: dividing by the mass of the other law, the same inequality fails."""
    alpha, sigma, below = 3.0, 1.0, 0.0

    def mass(mean):
        return stats.norm.logcdf((below - mean) / sigma)

    right = (alpha - 1) * mass(1.0) + mass(1.0 - alpha) - alpha * mass(0.0)
    wrong = (alpha - 1) * mass(1.0) + mass(1.0 - alpha) - alpha * mass(1.0)
    assert log_cdf_ratio(alpha, sigma, "zero-first", below) == pytest.approx(right)
    assert right <= 0 < wrong


def test_algorithm_2_draws_a_truncated_gaussian():
    rng = np.random.default_rng(0)
    draws = np.array(
        [selective_gaussian(0.7, 1.0, 1.5, 0.2, rng.standard_normal) for _ in range(20_000)]
    )
    assert draws.max() <= 0.2
    expected = stats.truncnorm(-np.inf, (0.2 - 0.7) / 1.5, 0.7, 1.5)
    assert stats.kstest(draws, expected.cdf).pvalue > 1e-6
    wrong = stats.truncnorm(-np.inf, 0.2 / 1.5, 0.0, 1.5)  # the value forgotten
    assert stats.kstest(draws, wrong.cdf).pvalue < 1e-6


def test_algorithm_2_clips_first():
    rng = np.random.default_rng(0)
    far = [selective_gaussian(50.0, 1.0, 0.1, 2.0, rng.standard_normal) for _ in range(200)]
    assert np.mean(far) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("sigma_v", [0.5, 0.8, 1.0, 1.3, 3.0])
def test_the_best_threshold_is_zero_not_minus_one(sigma_v):
    assert best_threshold(sigma_v) == pytest.approx(0.0, abs=1e-4)
    assert acceptance_gap(0.0, sigma_v) > acceptance_gap(-1.0, sigma_v)


def test_gaps_of_the_paper():
    assert acceptance_gap(0.0, 1.0) == pytest.approx(0.6915 - 0.3085, abs=1e-4)
    assert acceptance_gap(-1.0, 1.0) == pytest.approx(0.5 - 0.1587, abs=1e-4)


def test_bad_arguments():
    with pytest.raises(InvalidInputError, match="is empty"):
        selective_gaussian(0.5, 1.0, 1.0, 0.0, lambda: 0.0, above=1.0)
    with pytest.raises(InvalidInputError, match="order"):
        truncated_gaussian_rdp(1.0, 1.0, "zero-first", 0.0)
