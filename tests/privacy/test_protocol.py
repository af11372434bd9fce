"""What holds of every privacy plan."""

import json

import pytest

from dpsur.privacy.budget import Budget
from dpsur.privacy.events import CoinTest, Gaussian, Ledger, Menu, SampledGaussian, Trial
from dpsur.privacy.planning import block_plan, repeated_plan
from dpsur.privacy.statement import plan_from_statement, stated_mechanism
from reproduction.methods.menus import menu_plan
from tests.plans import plan_behind_filter

BUDGET = Budget(3.0, 1e-5)
UPDATE = SampledGaussian(0.1, 2.0)
GATED = Trial(UPDATE, CoinTest(0.1, 2.0))
PLANS = {
    "trials": repeated_plan(BUDGET, "every-trial", Trial(UPDATE), 10),
    "updates": repeated_plan(BUDGET, "proven", GATED, 60, 10, run_all_trials=True),
    "filter": plan_behind_filter(BUDGET, "every-trial", 8.0, 0.5, Trial(UPDATE), None),
    "gated filter": plan_behind_filter(BUDGET, "proven", 8.0, 0.5, GATED, 10, 60),
    "menu": menu_plan(BUDGET, "proven", Menu((UPDATE, UPDATE), 5), SampledGaussian(0.2, 20.0), 10),
    "blocks": block_plan(BUDGET, "proven", Trial(UPDATE), Gaussian(20.0), (0, 2, 2, 6)),
}


@pytest.fixture(params=PLANS)
def plan(request):
    return PLANS[request.param]


def test_a_statement_gives_its_plan_back(plan):
    mechanism = json.loads(json.dumps(stated_mechanism(plan, Ledger())))
    statement = {
        "mechanism": mechanism,
        "budget": {"epsilon": BUDGET.epsilon, "delta": BUDGET.delta},
        "guarantee": {"accounting": plan.accounting, "delta": BUDGET.delta},
    }
    read = plan_from_statement(statement)
    assert read == plan
    assert stated_mechanism(read, Ledger()) == stated_mechanism(plan, Ledger())


def test_positions_follow_the_counts_where_a_plan_says_so(plan):
    ledger = Ledger().record(plan.typical, trials=3, updates=3 if plan.typical.test is None else 2)
    counted = ledger.trials if plan.updates is None else ledger.updates
    assert (plan.position(ledger) == counted) == (plan.filter is None or plan.updates is not None)


def test_only_plans_that_repeat_a_trial_have_equal_steps(plan):
    assert plan.steered or len(plan.phases) == 1
    assert set(plan.fixed_counts) <= {"updates", "trials"}
    assert plan.length > 0
    assert plan.describe().endswith(plan.accounting)
