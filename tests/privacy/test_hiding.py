"""Plans of runs that hide their rejections."""

import math

import pytest
from scipy.stats import binom

from dpsur.errors import InvalidInputError
from dpsur.privacy import plan as plan_module
from dpsur.privacy.accounting import CAP_SHARE, accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import CoinTest, Ledger, LossTest, SampledGaussian, Trial
from dpsur.privacy.plan import (
    Plan,
    early_end,
    least_cap,
    trial_cap,
)
from dpsur.privacy.planning import repeated_plan
from tests.plans import plan_behind_filter

BUDGET = Budget(3.0, 1e-5)
TRIAL = Trial(SampledGaussian(0.01, 2.0), LossTest(0.01, 1.0, -1.0))


def plan_of(updates=8, trials=100):
    return repeated_plan(BUDGET, "proven", TRIAL, trials, updates)


@pytest.mark.parametrize("test", [TRIAL.test, CoinTest(0.01, 2.0), CoinTest(0.01, 1.0)])
@pytest.mark.parametrize("updates", [1, 30, 2000])
def test_the_least_cap_is_paid_for_and_one_less_is_not(test, updates):
    least = least_cap(test, updates, BUDGET)
    cost = [
        (1 + 2.718281828459045**3) * binom.cdf(updates - 1, trials, test.accept_min)
        for trials in (least, least - 1)
    ]
    assert cost[0] <= CAP_SHARE * BUDGET.delta < cost[1]
    assert updates <= least <= trial_cap(test, updates, BUDGET)


def test_only_trials_after_the_last_update_are_dropped():
    plan = plan_of().hide_rejections("constant")
    assert plan.trials == least_cap(TRIAL.test, 8, BUDGET)
    early, late, end = (
        Ledger().record(TRIAL, updates=updates, trials=trials)
        for updates, trials in ((7, 30), (8, 31), (8, plan.trials))
    )
    assert [plan.dummy_trials_left(ledger) for ledger in (early, late, end)] == [False, True, False]
    assert [plan.affords(ledger, TRIAL) for ledger in (early, late, end)] == [True, False, False]
    failed = Ledger().record(TRIAL, updates=7, trials=plan.trials)
    assert not plan.dummy_trials_left(failed)
    assert not plan.completed(failed)
    assert not plan_of().dummy_trials_left(late)  # the control: as things are without the option


def test_what_it_costs_and_follows_is_left_alone():
    plan = plan_of().hide_rejections("constant")
    ledger = Ledger().record(TRIAL, updates=8, trials=40)
    assert plan.epsilon() == plan_of().epsilon()
    assert plan.spent(ledger) == plan_of().spent(ledger)
    assert plan.position(ledger) == plan_of().position(ledger) == 8
    assert (plan.elapsed(ledger), plan.duration) == (40, plan.trials)
    assert (plan_of().elapsed(ledger), plan_of().duration) == (8, 8)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan_of().hide_rejections("no") == plan_of().hide_rejections("delay") == plan_of()


@pytest.mark.parametrize("way", ["constant", "delay"])
@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (repeated_plan(BUDGET, "proven", Trial(TRIAL.update), 5, 5), "no candidate is rejected"),
        (repeated_plan(BUDGET, "every-trial", TRIAL, 5), "verdicts are public"),
        (
            plan_behind_filter(BUDGET, "proven", 8.0, 1.0, TRIAL, 5),
            "trials that all take the same work",
        ),
    ],
)
def test_where_there_is_nothing_to_hide(plan, reason, way):
    with pytest.raises(InvalidInputError, match=f"hide_rejections {way} .*{reason}.*leave it out"):
        plan.hide_rejections(way)
    assert plan.hide_rejections("no") == plan


# --- the proven figure beside a published run covers the cap of that run --------------------------

# Fashion-MNIST at epsilon 3, as the paper has it: proven epsilon is 4.275.
PAPER = Trial(SampledGaussian(2048 / 60000, 2.15), LossTest(256 / 60000, 0.8, -1.0))


def a_figure_pays_for_its_cap(updates=1076, cap=None):
    """What is left of delta after giving up early still gives the proven epsilon that is shown."""
    budget = Budget(3.0, 1e-5)
    cap = least_cap(PAPER.gate, updates, budget) if cap is None else cap
    plan = repeated_plan(budget, "published", PAPER, cap, updates)
    shown = plan.figures()["proven"]
    given_up = (1 + math.exp(shown)) * early_end(PAPER.gate, updates, cap)
    accounted = accounting_named("proven")
    charges = [(PAPER, updates)]
    tail = accounted.noise_tail(charges)
    kept = (budget.delta - tail - given_up) / (1 - CAP_SHARE)  # the accounting keeps its own share
    assert accounted.ideal_epsilon(charges, kept) <= shown * (1 + 1e-9)
    return shown


def test_a_proven_figure_beside_a_published_run_pays_for_its_cap(monkeypatch):
    covered = a_figure_pays_for_its_cap()
    cap = least_cap(PAPER.gate, 1076, Budget(3.0, 1e-5))
    monkeypatch.setattr(plan_module, "early_end", lambda *_: 0.0)
    with pytest.raises(AssertionError):
        a_figure_pays_for_its_cap(cap=cap)
    plan = repeated_plan(Budget(3.0, 1e-5), "published", PAPER, 10**6, 1076)
    assert covered > plan.figures()["proven"]


def test_a_cap_that_is_hit_for_sure_has_no_proven_figure():
    plan = repeated_plan(Budget(3.0, 1e-5), "published", PAPER, 1076, 1076)
    assert plan.figures()["proven"] == math.inf
    assert plan.figures()["published"] < 3.0


def test_a_cap_that_a_proven_plan_chose_costs_nothing_more():
    plan = repeated_plan(
        Budget(5.0, 1e-5), "proven", PAPER, least_cap(PAPER.gate, 100, Budget(5.0, 1e-5)), 100
    )
    assert plan.figures()["proven"] == plan.epsilon()
