"""Privacy loss distributions where noise or losses are tiny: bounds still, and within bounds."""

import math

import pytest
from scipy import optimize, stats
from scipy.special import gammaln, log_ndtr, logsumexp

from dpsur.errors import BudgetError
from dpsur.privacy.accountants import pld, proven, rdp
from dpsur.privacy.accountants.pld import sampled_gaussian
from dpsur.privacy.accounting import ACCOUNTINGS, accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import CoinTest, Gaussian, NoisyChoice, SampledGaussian, Trial
from dpsur.privacy.planning import Request, make_plan

DELTA = 1e-5
TINY = (0.1, 0.05, 0.01, 1e-3)


def attained(q: float, sigma: float, count: int) -> float:
    """Epsilon that an adversary reaches who counts the updates beyond 1 - 3 sigma.

    Fewer than k of them tell against the record, k or more for it; k is the best one.
    """
    seen = q * float(1 - math.exp(log_ndtr(-3.0)))
    log_chance = float(log_ndtr(3.0 - 1.0 / sigma))  # without the record
    best, log_tail = 0.0, -math.inf
    for k in range(count, 0, -1):
        ways = float(gammaln(count + 1) - gammaln(k + 1) - gammaln(count - k + 1))
        term = ways + k * math.log(seen) + (count - k) * math.log1p(-seen)
        log_tail = float(logsumexp([log_tail, term]))
        if log_tail > math.log(2 * DELTA):
            with_record = math.log(math.exp(log_tail) - DELTA)
            best = max(best, with_record - ways - k * log_chance)  # without: a union bound
    return best


@pytest.mark.parametrize("sigma", TINY)
def test_a_tiny_noise_is_charged_what_it_costs(sigma):
    event = SampledGaussian(0.1, sigma)
    found = pld.composed_epsilon([(event, 500)], DELTA)
    reached = attained(0.1, sigma, 500)
    # By Rényi divergences, which are looser: but for what rounding to cells costs, no more.
    by_orders = proven.composed_epsilon(proven.compose([(event, 500)]), DELTA).upper
    assert reached <= found <= by_orders * 1.001
    assert not reached <= 0.5 * found  # the adversary would notice half a charge


@pytest.mark.parametrize(("sigma", "count"), [(0.01, 500), (1e-3, 500), (0.02, 30_000)])
def test_the_cells_are_bounded(sigma, count):
    event = SampledGaussian(0.1, sigma)
    width = pld.cell_width([(event, count)])
    assert width <= pld.WIDEST_CELL
    whole = pld._composed(event, count, width)
    assert len(whole.add.chances) <= 2 * pld.MOST_CELLS
    assert pld._shape(event, count).reach > 1e-3 * pld.MOST_CELLS  # which narrow cells exceed


@pytest.mark.parametrize("sigma", [1e-4, 1e-8, 1e-60])
def test_below_all_distributions_there_is_a_bound(sigma):
    charges = [(Gaussian(1.0), 1), (Trial(SampledGaussian(0.1, sigma)), 50)]
    found = pld.composed_epsilon(charges, DELTA)
    assert pld.composed_epsilon([(SampledGaussian(0.1, 1e-3), 50)], DELTA) < found < math.inf


@pytest.mark.parametrize("accounting", ACCOUNTINGS)
@pytest.mark.parametrize("event", [Trial(SampledGaussian(0.1, 1e-200)), Gaussian(1e-200)])
def test_a_noise_beyond_floating_point_is_none(accounting, event):
    assert accounting_named(accounting).epsilon([(event, 3)], DELTA) == math.inf


def test_the_smallest_noise_has_the_divergence_of_none():
    assert rdp.sampled_gaussian_rdp(0.1, 1e-200, 2) == math.inf
    assert proven.compose([(Gaussian(1e-200), 0)]).precision == 0.0


def test_a_choice_that_is_hardly_private():
    assert NoisyChoice(0.5, 1e6).amplified == pytest.approx(1e6 + math.log(0.5))
    assert NoisyChoice(0.5, 699.0).amplified == pytest.approx(NoisyChoice(0.5, 701.0).amplified - 2)


@pytest.mark.parametrize("noise", [0.05, 0.01, 1e-4, 1e-200])
@pytest.mark.parametrize("test", [None, CoinTest(0.05, 2.0)])
def test_a_plan_with_a_tiny_noise_is_refused(noise, test):
    def trial(noise: float) -> Trial:
        return Trial(SampledGaussian(0.1, noise), test)

    for count in (None, 500):
        with pytest.raises(BudgetError, match="noise multiplier .* is too small for delta"):
            make_plan(Request(trial, noise, count, 1), Budget(3.0, DELTA), "proven")


def test_many_updates_in_two_stages_cost_what_they_cost_in_one():
    distribution = sampled_gaussian(SampledGaussian(0.02, 3.0), 1e-3)
    staged = distribution.repeated(10_000).repeated(2).composed(distribution.repeated(77))
    at_once = distribution.repeated(20_077)
    assert staged.epsilon(DELTA) == pytest.approx(at_once.epsilon(DELTA), rel=1e-6)
    assert len(at_once.add.chances) < 2 * pld.MOST_CELLS


@pytest.mark.parametrize(("q", "sigma", "count"), [(1e-3, 4.0, 100_000), (4e-3, 4.0, 1000)])
def test_small_losses_are_not_rounded_up_to_whole_cells(q, sigma, count):
    event = SampledGaussian(q, sigma)
    found = pld.composed_epsilon([(event, count)], DELTA)
    finer = sampled_gaussian(SampledGaussian(q, sigma), 1e-5).repeated(count).epsilon(DELTA)
    assert finer <= found <= 1.02 * finer
    coarse = sampled_gaussian(SampledGaussian(q, sigma), 1e-3).repeated(count).epsilon(DELTA)
    assert coarse > 1.05 * finer


def gaussian_delta(epsilon):
    """Delta of a Gaussian mechanism of noise 1, in closed form."""
    return stats.norm.cdf(0.5 - epsilon) - math.exp(epsilon) * stats.norm.cdf(-0.5 - epsilon)


@pytest.mark.parametrize("delta", [1e-5, 1e-9, 1e-11, 1e-12, 1e-14])
def test_a_small_delta_is_not_lost_in_rounding(delta):
    """Ten thousand Gaussians of noise 100 are one of noise 1."""
    exact = optimize.brentq(lambda e: gaussian_delta(e) - delta, 0.1, 12, xtol=1e-12)
    found = pld.composed_epsilon([(SampledGaussian(1.0, 100.0), 10_000)], delta)
    assert exact * (1 - 1e-9) <= found <= 1.2 * exact
