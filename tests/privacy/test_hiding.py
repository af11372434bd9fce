"""Plans of runs that hide their rejections."""

import pytest
from scipy.stats import binom

from dpsur.errors import InvalidInputError
from dpsur.privacy.accounting import CAP_SHARE
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import CoinTest, LossTest, SampledGaussian, Trial
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.plans import FilteredPlan, Plan
from dpsur.privacy.plans.cap import trial_cap
from dpsur.privacy.plans.hiding import duration, elapsed, hiding_plan, least_cap

BUDGET = Budget(3.0, 1e-5)
TRIAL = Trial(SampledGaussian(0.01, 2.0), LossTest(0.01, 1.0, -1.0))


def plan_of(updates=8, trials=100):
    return Plan(BUDGET, "proven", TRIAL, trials, updates)


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
    plan = hiding_plan(plan_of(), "constant")
    assert plan.trials == least_cap(TRIAL.test, 8, BUDGET)
    early, late, end = (
        Ledger().record(TRIAL, updates=updates, trials=trials)
        for updates, trials in ((7, 30), (8, 31), (8, plan.trials))
    )
    assert [plan.drops(ledger) for ledger in (early, late, end)] == [False, True, False]
    assert [plan.affords(ledger, TRIAL) for ledger in (early, late, end)] == [True, False, False]
    failed = Ledger().record(TRIAL, updates=7, trials=plan.trials)
    assert not plan.drops(failed)
    assert not plan.completed(failed)
    assert not plan_of().drops(late)  # the control: as things are without the option


def test_what_it_costs_and_follows_is_left_alone():
    plan = hiding_plan(plan_of(), "constant")
    ledger = Ledger().record(TRIAL, updates=8, trials=40)
    assert plan.epsilon() == plan_of().epsilon()
    assert plan.spent(ledger) == plan_of().spent(ledger)
    assert plan.position(ledger) == plan_of().position(ledger) == 8
    assert (elapsed(plan, ledger), duration(plan)) == (40, plan.trials)
    assert (elapsed(plan_of(), ledger), duration(plan_of())) == (8, 8)
    assert Plan.from_json(plan.to_json()) == plan
    assert hiding_plan(plan_of(), "no") == hiding_plan(plan_of(), "delay") == plan_of()


@pytest.mark.parametrize("way", ["constant", "delay"])
@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (Plan(BUDGET, "proven", Trial(TRIAL.update), 5, 5), "no candidate is rejected"),
        (Plan(BUDGET, "every-trial", TRIAL, 5), "verdicts are charged and public"),
        (FilteredPlan(BUDGET, "proven", 8.0, 1.0, TRIAL, 5), "trials that all take the same work"),
    ],
)
def test_where_there_is_nothing_to_hide(plan, reason, way):
    with pytest.raises(InvalidInputError, match=f"hide_rejections {way} .*{reason}.*leave it out"):
        hiding_plan(plan, way)
    assert hiding_plan(plan, "no") == plan
