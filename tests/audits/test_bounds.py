"""Lower bounds on epsilon from repetitions are exceeded as rarely as they say."""

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from dpsur.errors import InvalidInputError
from reproduction.audits.repetitions import (
    epsilon_lower_bound,
    largest_bound,
    proportion_lower,
    proportion_upper,
)

TRIALS, ERROR = 30, 0.05
PROBABILITIES = np.linspace(0.01, 0.99, 99)


def wrong_as_often(bound_of):
    """The largest probability, over true proportions, that a lower bound is too high."""
    hits = np.arange(TRIALS + 1)
    bounds = bound_of(hits)
    return max(float(binom.pmf(hits[bounds > p], TRIALS, p).sum()) for p in PROBABILITIES)


def test_proportion_bounds_cover():
    assert wrong_as_often(lambda hits: proportion_lower(hits, TRIALS, ERROR)) <= ERROR
    assert wrong_as_often(lambda hits: hits / TRIALS) > 2 * ERROR  # the estimate is no bound


def test_upper_mirrors_lower():
    hits = np.arange(TRIALS + 1)
    lower = proportion_lower(TRIALS - hits, TRIALS, ERROR)
    assert proportion_upper(hits, TRIALS, ERROR) == pytest.approx(1 - lower)
    assert proportion_lower(np.array([0]), TRIALS, ERROR) == 0
    assert proportion_upper(np.array([TRIALS]), TRIALS, ERROR) == 1
    zero_hits = 1 - ERROR ** (1 / TRIALS)
    assert proportion_upper(np.array([0]), TRIALS, ERROR) == pytest.approx(zero_hits)


def gaussian_delta(mu: float, epsilon: float) -> float:
    return float(
        norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    )


def too_high(rng: np.random.Generator, mu: float, epsilon: float, audits: int = 400) -> int:
    """How many audits of a Gaussian mechanism find more than epsilon at its delta."""
    delta = gaussian_delta(1.0, epsilon)
    return sum(
        epsilon_lower_bound(rng.normal(mu, 1, 600), rng.normal(0, 1, 600), delta, 0.95).contradicts(
            epsilon
        )
        for _ in range(audits)
    )


def test_bounds_are_valid_and_a_larger_loss_is_seen():
    rng = np.random.default_rng(3)
    assert too_high(rng, 1.0, 1.0) <= binom.ppf(1 - 1e-6, 400, 0.05)
    assert too_high(rng, 2.0, 1.0) > 200  # the control: noise x 1/2


def test_a_certain_difference_gives_the_most_that_the_runs_allow():
    ones, zeros = np.ones(3000), np.zeros(3000)
    bound = epsilon_lower_bound(ones, zeros, 1e-5, 0.95)
    most = math.log((0.025 ** (1 / 2000) - 1e-5) / (1 - 0.025 ** (1 / 2000)))
    assert bound.epsilon == pytest.approx(most)
    assert largest_bound(2000, 1e-5, 0.95) == bound.epsilon
    assert largest_bound(1, 0.1, 0.95) == 0.0
    assert (bound.likelier, bound.rarer, bound.repetitions) == (2000, 0, 2000)
    assert epsilon_lower_bound(zeros, ones, 1e-5).epsilon == 0.0  # larger scores mean the record
    assert epsilon_lower_bound(ones, ones, 1e-5).epsilon == 0.0


@pytest.mark.parametrize(
    ("runs", "delta", "confidence", "message"),
    [(1, 0.1, 0.9, "two runs"), (9, 1.0, 0.9, "delta"), (9, 0.1, 1.0, "confidence")],
)
def test_bad_input(runs, delta, confidence, message):
    with pytest.raises(InvalidInputError, match=message):
        epsilon_lower_bound(np.ones(runs), np.ones(runs), delta, confidence)
