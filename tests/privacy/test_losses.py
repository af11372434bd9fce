"""Our privacy loss distributions against dp-accounting's, closed forms and direct sums."""

import math

import numpy as np
import pytest
from dp_accounting.pld import common, privacy_loss_distribution
from scipy.optimize import brentq
from scipy.stats import ncx2, norm

from dpsur.privacy.accountants import pld
from dpsur.privacy.accountants.noise_tail import LARGEST_RADIUS, _beyond
from dpsur.privacy.accountants.pld import LossDistribution, Losses, pure, sampled_gaussian
from dpsur.privacy.events import SampledGaussian
from reproduction.presets.settings import paper_settings

DELTA, WIDTH = 1e-5, 1e-3
CASES = [(0.01, 0.8, 1000), (0.0085, 1.3, 4000), (0.2, 3.0, 60), (1.0, 20.0, 100), (1e-4, 0.6, 90)]


def theirs(q, sigma, width=WIDTH):
    return privacy_loss_distribution.from_gaussian_mechanism(
        sigma, value_discretization_interval=width, sampling_prob=q
    )


def figures_are_those_of_dp_accounting():
    for q, sigma, count in CASES:
        ours = sampled_gaussian(SampledGaussian(q, sigma), WIDTH).repeated(count)
        exact = theirs(q, sigma).self_compose(count)
        for delta in (1e-3, DELTA, 1e-8):
            expected = exact.get_epsilon_for_delta(delta)
            assert ours.epsilon(delta) == pytest.approx(expected, rel=1e-5, abs=1e-9), (q, sigma)
        for epsilon in (0.1, 1.0, 3.0):
            expected = exact.get_delta_for_epsilon(epsilon)
            assert ours.delta(epsilon) == pytest.approx(expected, rel=1e-6, abs=1e-12), (q, sigma)


def no_figure_is_below_that_of_a_finer_grid():
    for q, sigma, count in CASES[:3]:
        ours = sampled_gaussian(SampledGaussian(q, sigma), WIDTH).repeated(count)
        finer = theirs(q, sigma, WIDTH / 5).self_compose(count)
        assert ours.epsilon(DELTA) >= finer.get_epsilon_for_delta(DELTA) - 1e-7, (q, sigma)


def gaussians_cost_what_they_cost():
    """Without sampling epsilon is known, and it is never below."""
    for sigma, count in ((20.0, 100), (5.0, 1), (100.0, 2500)):
        mu = math.sqrt(count) / sigma

        def over(epsilon, mu=mu):
            far = math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
            return norm.cdf(mu / 2 - epsilon / mu) - far - DELTA

        exact = brentq(over, 0.0, 30.0, xtol=1e-12)
        found = sampled_gaussian(SampledGaussian(1.0, sigma), WIDTH).repeated(count)
        assert exact <= found.epsilon(DELTA) <= exact * 1.001 + 1e-3


def sums_of_two_lose_nothing():
    """Two distributions added up by hand: no hockey-stick divergence may come out smaller."""
    one = sampled_gaussian(SampledGaussian(0.2, 1.1), 0.02).add
    other = pld.repeat(sampled_gaussian(SampledGaussian(0.05, 0.8), 0.02).add, 7)
    found = pld.convolve(one, other)
    lost = 1 - (1 - one.infinite) * (1 - other.infinite)
    exact = Losses(one.first + other.first, np.convolve(one.chances, other.chances), lost)
    for epsilon in (-3.0, -0.5, 0.0, 0.3, 1.0, 4.0, 9.0):
        expected = pld.delta_at(exact, 0.02, epsilon)
        delta = pld.delta_at(found, 0.02, epsilon)
        assert expected - 1e-16 <= delta <= expected + 1e-13, epsilon


def epsilon_and_delta_belong_together():
    for q, sigma, count in CASES:
        found = sampled_gaussian(SampledGaussian(q, sigma), WIDTH).repeated(count)
        for delta in (1e-3, DELTA, 1e-8):
            epsilon = found.epsilon(delta)
            assert epsilon == 0.0 or found.delta(epsilon) == pytest.approx(delta, rel=1e-6)
            assert found.delta(epsilon) <= delta * (1 + 1e-9)


LAWS = [
    figures_are_those_of_dp_accounting,
    no_figure_is_below_that_of_a_finer_grid,
    gaussians_cost_what_they_cost,
    sums_of_two_lose_nothing,
    epsilon_and_delta_belong_together,
]


@pytest.fixture
def forgotten():
    sampled_gaussian.cache_clear()
    yield
    sampled_gaussian.cache_clear()


@pytest.mark.parametrize("law", LAWS)
def test_law_holds(law, forgotten):
    law()


REAL = {name: getattr(pld, name) for name in ("connect", "convolve", "epsilon_at", "repeat")}


def losses_rounded_down(monkeypatch):
    """Every chance one cell lower, as rounding the other way would have it."""

    def lower(first, deltas, width):
        found = REAL["connect"](first, deltas, width)
        return found._replace(first=found.first - 1)

    monkeypatch.setattr(pld, "connect", lower)


def only_removal(monkeypatch):
    monkeypatch.setattr(
        LossDistribution, "epsilon",
        lambda self, delta: pld.epsilon_at(self.remove, self.width, delta),
    )  # fmt: skip


def upper_end_dropped(monkeypatch):
    """What is cut off at the top is forgotten, where it should become an infinite loss."""

    def without(one, other):
        found = REAL["convolve"](one, other)
        return found._replace(chances=found.chances[: len(found.chances) // 2], infinite=0.0)

    monkeypatch.setattr(pld, "convolve", without)


def epsilon_of_the_cell_below(monkeypatch):
    monkeypatch.setattr(
        pld, "epsilon_at", lambda found, width, delta: max(
            REAL["epsilon_at"](found, width, delta) - width, 0.0
        ),
    )  # fmt: skip


def one_repetition_too_few(monkeypatch):
    monkeypatch.setattr(pld, "repeat", lambda found, count: REAL["repeat"](found, count - 1))


MUTANTS = [
    (figures_are_those_of_dp_accounting, losses_rounded_down),
    (no_figure_is_below_that_of_a_finer_grid, losses_rounded_down),
    (figures_are_those_of_dp_accounting, only_removal),
    (sums_of_two_lose_nothing, upper_end_dropped),
    (epsilon_and_delta_belong_together, epsilon_of_the_cell_below),
    (gaussians_cost_what_they_cost, one_repetition_too_few),
]


@pytest.mark.parametrize(("law", "mutant"), MUTANTS)
def test_mutant_is_killed(law, mutant, monkeypatch, forgotten):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        law()


def test_the_papers_settings_cost_what_dp_accounting_says():
    for setting in paper_settings()[::5]:
        update = setting.trial.update
        ours = sampled_gaussian(update, WIDTH).repeated(500).epsilon(DELTA)
        exact = theirs(update.sample_rate, update.noise_multiplier).self_compose(500)
        assert ours == pytest.approx(exact.get_epsilon_for_delta(DELTA), rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.05, 0.5, 3.0, 800.0])
def test_a_mechanism_without_delta(epsilon):
    parameters = common.DifferentialPrivacyParameters(min(epsilon, 600.0), 0.0)
    exact = privacy_loss_distribution.from_privacy_parameters(
        parameters, value_discretization_interval=WIDTH
    ).self_compose(12)
    found = pure(epsilon, WIDTH).repeated(12).epsilon(DELTA)
    if epsilon < 600:
        assert found == pytest.approx(exact.get_epsilon_for_delta(DELTA), rel=1e-6)
    else:
        assert 11 * epsilon <= found <= 12 * epsilon + 1


def test_grids_of_two_widths_are_not_mixed():
    one, other = (sampled_gaussian(SampledGaussian(0.1, 1.0), width) for width in (0.01, 0.02))
    with pytest.raises(ValueError, match="widths"):
        one.composed(other)


def test_mass_at_infinity_has_no_finite_epsilon():
    losses_ = Losses(-3, np.full(7, 0.1), 0.3)
    assert pld.epsilon_at(losses_, 0.1, 0.2) == math.inf
    assert pld.epsilon_at(losses_, 0.1, 0.9) == 0.0
    assert 0 < pld.epsilon_at(losses_, 0.1, 0.31) < 0.3


@pytest.mark.parametrize("shift", [0.0, 1e-140, 1e-8, 1e-3, 0.1, 0.5, 1.0, 2.0, 4.0, 8.3])
def test_the_tail_of_shifted_pairs_is_that_of_scipy(shift):
    exact = float(ncx2.sf(LARGEST_RADIUS**2, 2, shift**2))
    assert exact * (1 - 1e-13) <= _beyond(LARGEST_RADIUS, shift) <= exact * (1 + 2e-12)


@pytest.mark.parametrize("noise", [1e20, 1e100])
def test_huge_noise_has_a_figure(noise):
    """Both ends of the loss are 0 then, on a grid of one point."""
    assert 0 <= pld.sampled_gaussian(SampledGaussian(0.5, noise), 1e-4).epsilon(1e-5) < 1e-3
