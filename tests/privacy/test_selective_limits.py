"""One accepted update where its cost is known otherwise, at the ends of its range, and in between.

The known limits are the sampled Gaussian (no test), the test alone (no training), and the factor
kappa(r) of small rates and large noise.
"""

import itertools
import math
import sys
from dataclasses import replace

import mpmath as mp
import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant as dp_rdp
from scipy.special import ndtr

from dpsur.privacy.accountants.proven import DIRECTIONS, SelectiveUpdate
from dpsur.privacy.accountants.selective.divergence import COARSE, crude, divergence
from dpsur.privacy.accountants.selective.pair import bracket
from dpsur.privacy.events import CoinTest
from tests.privacy.selective_cases import exact_moment

SAMPLED = [(0.03, 4.0), (0.2, 0.8), (1e-5, 0.5), (0.001, 30.0), (1.0, 2.0), (0.99, 0.6)]


ORDERS = [1.25, 2.0, 5.5, 17.0, 64.0, 256.0]


@pytest.mark.parametrize(
    ("q", "s", "order"),
    [  # a chessboard: every pair with three orders, every order with three pairs
        pytest.param(*pair, order, marks=[pytest.mark.slow] if (row + column) % 2 else [])
        for row, pair in enumerate(SAMPLED)
        for column, order in enumerate(ORDERS)
    ],
)
def test_without_a_test_it_is_the_sampled_gaussian(q, s, order):
    """Never below it, and at most 0.1% above."""
    add, remove = (divergence(q, s, 0.0, 1.0, order, direction) for direction in DIRECTIONS)
    known = dp_rdp._compute_rdp_poisson_subsampled_gaussian(q, s, [order])[0]
    if order == int(order) or q == 1:  # dp_accounting's fractional series loses digits near 0
        assert known * (1 - 1e-7) <= add.upper <= known * 1.001
    if order <= 20:
        for found, power in ((add, order), (remove, 1 - order)):
            with mp.workdps(30):
                exact = float(mp.log(exact_moment(q, s, power)) / (order - 1))
            if exact > 1e-9:
                assert exact * (1 - 1e-10) <= found.upper <= exact * 1.001
                assert exact * 0.999 <= found.lower <= exact * (1 + 1e-10)


def test_gaussian_closed_form():
    for s, order in itertools.product((0.5, 1.0, 10.0, 100.0), (1.1, 3.0, 64.0, 256.0)):
        for direction in DIRECTIONS:
            low, high = divergence(1.0, s, 0.0, 1.0, order, direction)
            assert low <= order / (2 * s * s) <= high <= 1.001 * order / (2 * s * s)


@pytest.mark.parametrize(("q", "s"), [(0.0, 1.0), (1e-9, 100.0)])
def test_no_training_leaves_the_cost_of_the_test(q, s):
    for q_v, r, order in itertools.product((1e-4, 0.01, 1.0), (1.5, 50.0), (1.5, 8.0, 100.0)):
        eta = math.log((1 - q_v + q_v * r) / (1 - q_v + q_v / r))
        for direction in DIRECTIONS:
            low, high = divergence(q, s, q_v, r, order, direction)
            assert high <= order * eta**2 / 8 * (1 + 1e-3)
            assert high >= low > 0
            if order * eta < 0.1:
                assert low >= 0.97 * order * eta**2 / 8
            # a test that is charged nothing would sit here
            assert low > 100 * divergence(q, s, 0.0, r, order, direction).upper


def kappa(r: float) -> float:
    t = np.linspace(0, 4, 4001)
    tail, density = ndtr(-t), np.exp(-t * t / 2) / math.sqrt(2 * math.pi)
    return float(np.max((1 + 2 * (r - 1) * (tail + t * density)) / (1 + 2 * (r - 1) * tail)))


@pytest.mark.parametrize(
    ("r", "figure"), [(1.5, 1.21), (2.0, 1.38), (2.75, 1.58), (3.15, 1.68), (4.7, 1.97)]
)
def test_small_rate_and_large_noise_multiply_by_kappa(r, figure):
    assert kappa(r) == pytest.approx(figure, abs=0.006)
    for direction in DIRECTIONS:
        plain = divergence(1e-3, 100.0, 0.0, 1.0, 2.0, direction).upper
        low, high = divergence(1e-3, 100.0, 0.0, r, 2.0, direction)
        assert low / plain == pytest.approx(kappa(r), rel=0.01)
        assert high / plain == pytest.approx(kappa(r), rel=0.01)


CHAINS = {
    "sample_rate": [0.0, 1e-4, 0.01, 0.05, 0.3, 0.8, 1.0],
    "noise_multiplier": [50.0, 8.0, 3.0, 1.5, 0.9, 0.5],
    "val_sample_rate": [0.0, 0.003, 0.02, 0.2, 0.7, 1.0],
    "accept_ratio": [1.0, 1.2, 2.0, 5.0, 20.0, 50.0],
    "order": [1.05, 1.5, 2.0, 4.0, 16.0, 64.0, 256.0],
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("base", [(0.03, 2.0, 0.01, 3.0, 5.0), (0.4, 1.2, 0.3, 8.0, 2.5)])
def test_monotone_in_every_argument(name, base):
    for direction in DIRECTIONS:
        values = []
        for x in CHAINS[name]:
            arguments = list(base)
            arguments[list(CHAINS).index(name)] = x
            values.append(divergence(*arguments, direction))
        for before, after in itertools.pairwise(values):
            assert before.upper < after.lower * (1 + 4e-4)
            assert before.lower < after.upper


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_extreme_settings_give_finite_ordered_values(direction):
    for q, s, q_v, r, order in itertools.product(
        (0.0, 1e-5, 1.0 - 1e-9, 1.0), (0.5, 100.0), (0.0, 1.0), (1.0, 1.0 + 1e-9, 50.0),
        (1.0001, 256.0),
    ):  # fmt: skip
        low, high = divergence(q, s, q_v, r, order, direction)
        assert 0.0 <= low <= high < math.inf
        plain = order / (2 * s * s) if q == 1.0 else 0.0
        assert high >= plain
        if q == 0.0 and (q_v == 0.0 or r == 1.0):
            assert high < 1e-12


def test_astronomic_moments_are_not_truncated():
    """sigma 0.5, order 32: an exponent capped at 700 would read four times too low."""
    found = divergence(0.5, 0.5, 0.01, 3.0, 32.0, "add")
    floor = (32 * math.log(0.5) + 32 * 31 / (2 * 0.25)) / 31  # L >= q l
    assert found.upper >= found.lower >= floor > 700 / 31
    # too wide for a mesh: a closed form answers, and it is no promise below the truth
    assert divergence(0.5, 0.01, 0.01, 3.0, 256.0, "add").upper >= 256 / 2e-4 - 2
    assert divergence(0.5, 1e-200, 0.01, 3.0, 256.0, "add").upper == math.inf


def test_not_a_number_is_infinite_never_small(monkeypatch):
    def poisoned(*arguments):
        both = bracket(*arguments)
        weight = both.chord.weight.copy()
        weight[weight.size // 2] = math.nan
        return replace(both, chord=replace(both.chord, weight=weight))

    # by name the package gives the function of the same name, not the module
    module = sys.modules["dpsur.privacy.accountants.selective.divergence"]
    monkeypatch.setattr(module, "bracket", poisoned)
    found = divergence(0.1, 1.0, 0.1, 2.0, 3.0, "add", COARSE)
    assert found.upper == crude(1.0, 2.0, 3.0) > found.lower


def test_only_the_ratio_of_acceptances_counts():
    class HalfAsOften:
        """The coin, and another one that must fall right as well."""

        sample_rate, accept_min, accept_max = 0.01, 1 / 6, 1 / 2

    coin = SelectiveUpdate.of(0.03, 2.0, CoinTest(0.01, 3.0))
    assert SelectiveUpdate.of(0.03, 2.0, HalfAsOften()) == coin
    assert 3.0 <= coin.accept_ratio <= 3.0 * (1 + 1e-11)
