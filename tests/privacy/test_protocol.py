"""What holds of every privacy plan."""

import inspect
import json

import pytest

from dpsur.privacy.budget import Budget
from dpsur.privacy.events import CoinTest, Gaussian, Menu, SampledGaussian, Trial
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.plans import (
    BlockPlan,
    FilteredPlan,
    MenuPlan,
    Plan,
    PrivacyPlan,
    plan_from_statement,
)

BUDGET = Budget(3.0, 1e-5)
UPDATE = SampledGaussian(0.1, 2.0)
GATED = Trial(UPDATE, CoinTest(0.1, 2.0))
PLANS = {
    "trials": Plan(BUDGET, "every-trial", Trial(UPDATE), 10),
    "updates": Plan(BUDGET, "proven", GATED, 60, 10, to_the_cap=True),
    "filter": FilteredPlan(BUDGET, "every-trial", 8.0, 0.5, Trial(UPDATE), None),
    "gated filter": FilteredPlan(BUDGET, "proven", 8.0, 0.5, GATED, 10, 60),
    "menu": MenuPlan(BUDGET, "proven", Menu((UPDATE, UPDATE), 5), SampledGaussian(0.2, 20.0), 10),
    "blocks": BlockPlan(BUDGET, "proven", UPDATE, Gaussian(20.0), (0, 2, 2, 6)),
}


@pytest.fixture(params=PLANS)
def plan(request):
    return PLANS[request.param]


def members():
    return [name for name in vars(PrivacyPlan) if not name.startswith("_")]


def test_every_plan_has_what_the_protocol_asks_for(plan):
    assert len(members()) > 20
    for name in members():
        assert hasattr(plan, name), name
        assert callable(getattr(plan, name)) == inspect.isfunction(vars(PrivacyPlan)[name]), name


def test_a_statement_gives_its_plan_back(plan):
    mechanism = json.loads(json.dumps(plan.to_statement(Ledger())))
    statement = {
        "mechanism": mechanism,
        "budget": {"epsilon": BUDGET.epsilon, "delta": BUDGET.delta},
        "guarantee": {"accounting": plan.accounting, "delta": BUDGET.delta},
    }
    read = plan_from_statement(statement)
    assert read == plan
    assert read.to_statement(Ledger()) == plan.to_statement(Ledger())


def test_positions_follow_the_counts_where_a_plan_says_so(plan):
    ledger = Ledger().record(plan.typical, trials=3, updates=3 if plan.typical.test is None else 2)
    counted = ledger.trials if plan.updates is None else ledger.updates
    assert (plan.position(ledger) == counted) == plan.position_follows_counts


def test_only_plans_that_repeat_a_trial_have_equal_steps(plan):
    assert plan.same_steps == isinstance(plan, Plan)
    assert set(plan.fixed_counts) <= {"updates", "trials"}
    assert plan.length > 0
    assert plan.describe().endswith(plan.accounting)
