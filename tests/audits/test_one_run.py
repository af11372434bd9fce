"""Bounds on guesses about canaries: exact where they can be, never too low, tight where known."""

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.stats import binom, norm

from dpsur.audits.bounds import (
    claimed_curve,
    epsilon_of_guesses,
    gaussian_curve,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_epsilon_of_guesses,
    tail_probability,
    tail_probability_under,
)
from dpsur.errors import InvalidInputError


def right(epsilon: float) -> float:
    return 1 / (1 + math.exp(-epsilon))


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
def test_randomised_response_attains_the_bound(epsilon):
    """All coins, independently told with the largest probability that epsilon allows."""
    m = 6
    for v in range(m + 1):
        told = itertools.product([0, 1], repeat=m)
        tail = sum(
            math.prod(right(epsilon) if bit else 1 - right(epsilon) for bit in bits)
            for bits in told
            if sum(bits) >= v
        )
        assert tail_probability(m, m, v, epsilon, 0.0) == pytest.approx(tail)


def tail_with_betrayals(m: int, v: int, epsilon: float, delta: float, size: int) -> float:
    """Randomised response that betrays a block of `size` canaries with probability delta."""
    honest = binom.sf(v - 1, m, right(epsilon))
    betrayed = sum(
        binom.pmf(j, m - size, right(epsilon)) for j in range(m - size + 1) if j + size >= v
    )
    blocks = m // size
    none = (1 - delta) ** blocks
    return float(none * honest + (1 - none) * betrayed)


@pytest.mark.parametrize("size", [1, 2, 5, 10])
def test_delta_covers_betrayals(size):
    m, epsilon, delta = 10, 0.7, 0.004
    for v in range(m + 1):
        truth = tail_with_betrayals(m, v, epsilon, delta, size)
        # the block mechanism is (epsilon, delta)-DP for each canary: its block fails with delta
        assert tail_probability(m, m, v, epsilon, delta) >= min(1, truth) - 1e-12
    all_right = tail_with_betrayals(m, m, epsilon, delta, m)
    assert tail_probability(m, m, m, epsilon, 0.0) < all_right  # without delta's part: too low


def largest_tail(m: int, r: int, v: int, points: list[tuple[float, float]]) -> float:
    """The same constraints on the numbers of correct guesses, as a linear programme."""
    j = np.arange(r + 1)
    rows, limits = [], []
    for t in range(1, r + 1):
        many = np.where(j >= t, j, 0) / m
        wrong = np.where(j >= t - 1, r - j, 0) / m
        for epsilon, delta in points:
            rows.append(many - math.exp(epsilon) * wrong)
            limits.append(delta)
            rows.append(many - math.exp(-epsilon) * wrong)
            limits.append(1 - math.exp(-epsilon) * (1 - delta))
    found = linprog(
        -(j >= v).astype(float), np.array(rows), limits, np.ones((1, r + 1)), [1.0], (0, 1)
    )
    assert found.success
    return float(-found.fun)


@pytest.mark.parametrize("points", [[(0.5, 0.0)], [(1.0, 0.01)], [(1.0, 0.001), (0.4, 0.05)]])
@pytest.mark.parametrize(("m", "r"), [(6, 6), (9, 6), (12, 12)])
def test_the_recursion_solves_the_programme(points, m, r):
    for v in range(1, r + 1):
        expected = largest_tail(m, r, v, points)
        found = tail_probability_under(claimed_curve(points), m, r, v)
        assert found >= expected - 1e-9
        assert found <= 1.01 * expected + 1e-9


@pytest.mark.parametrize("mu", [0.3, 1.0])
def test_independent_gaussians_obey_their_own_curve_only(mu):
    m = 40
    accuracy = norm.cdf(mu / 2)
    for v in (22, 30, 36, 40):
        truth = binom.sf(v - 1, m, accuracy)
        assert tail_probability_under(gaussian_curve(mu), m, m, v) >= truth
    # the control: as many right as this is usual contradict a quarter of the shift
    usual = round(4000 * accuracy)
    assert tail_probability_under(gaussian_curve(mu / 4), 4000, 4000, usual) < 0.01
    assert tail_probability_under(gaussian_curve(mu), 4000, 4000, usual) > 0.4


def test_monotone():
    tails = [tail_probability(100, 50, v, 1.0, 1e-5) for v in range(25, 51)]
    assert all(a >= b for a, b in itertools.pairwise(tails))
    assert tail_probability(100, 50, 45, 1.0, 1e-5) < tail_probability(100, 50, 45, 1.2, 1e-5)
    assert tail_probability(100, 50, 45, 1.0, 1e-5) < tail_probability(100, 50, 45, 1.0, 1e-4)
    for bound in (epsilon_of_guesses, gaussian_epsilon_of_guesses):
        found = [bound(200, 100, v, 1e-5, 0.95) for v in (50, 60, 75, 90, 100)]
        assert found == sorted(found)
        assert found[0] == 0.0 < found[1]
        assert bound(200, 100, 90, 1e-5, 0.99) < bound(200, 100, 90, 1e-5, 0.95)


def test_all_right_gives_the_most_that_the_guesses_allow():
    p = 0.05 ** (1 / 100)
    assert epsilon_of_guesses(100, 100, 100, 0.0, 0.95) == pytest.approx(
        math.log(p / (1 - p)), abs=1e-3
    )


def test_gaussian_conversions():
    for mu in (0.1, 0.925, 4.0):
        epsilon = gaussian_epsilon(mu, 1e-5)
        assert gaussian_delta(mu, epsilon) == pytest.approx(1e-5, rel=1e-6)
    assert gaussian_epsilon(1e-7, 1e-5) == 0.0
    assert gaussian_delta(0.0, 1.0) == 0.0


def test_bad_counts():
    with pytest.raises(InvalidInputError, match="3 correct guesses of 2"):
        tail_probability(5, 2, 3, 1.0, 0.0)
