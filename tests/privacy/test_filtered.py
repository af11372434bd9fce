"""Plans that end where a filter says so."""

import math
from dataclasses import replace

import pytest

from dpsur.errors import BudgetError, InvalidInputError
from dpsur.privacy.accountants.proven import event_divergence
from dpsur.privacy.accountants.rdp import RenyiFilter, epsilon_at
from dpsur.privacy.accounting import CAP_SHARE
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import (
    CoinTest,
    Gaussian,
    Ledger,
    LossTest,
    NoisyChoice,
    SampledGaussian,
    Trial,
)
from dpsur.privacy.plan import ALLOWANCE_PARTS, MOST_TRIALS, TAIL_SHARE, Plan, trial_cap
from dpsur.privacy.planning import filtered_plan, repeated_plan
from reproduction.methods.menus import noise_for
from tests.plans import plan_behind_filter

BUDGET = Budget(3.0, 1e-5)
STEP = Trial(SampledGaussian(0.1, 2.0))
FIGURE = SampledGaussian(1.0, 20.0)
COIN = Trial(SampledGaussian(0.1, 2.0), CoinTest(0.05, 1.5))


def plan_of(accounting="proven", typical=STEP, **more):
    """A plan with an order and an allowance of its own choice, which takes no search."""
    usual = {"order": 6.0, "allowance": 1.5, "updates": 12, "trials": 12}
    return plan_behind_filter(BUDGET, accounting, typical=typical, **{**usual, **more})


def until_the_end(plan, step):
    ledger = Ledger(setup=plan.setup)
    while plan.affords(ledger, step):
        ledger = ledger.record(step, updates=1)
    return ledger


@pytest.fixture(scope="module")
def best():
    return filtered_plan(BUDGET, "proven", STEP, updates=None)


@pytest.mark.parametrize("accounting", ["proven", "every-trial"])
def test_it_stops_before_the_allowance_is_passed(accounting):
    plan = plan_of(accounting, updates=None, trials=MOST_TRIALS)
    charge = event_divergence(STEP, plan.filter.order)
    ledger = until_the_end(plan, STEP)
    assert ledger.trials == math.floor(plan.filter.allowance / charge)
    assert plan.divergence(ledger) <= plan.filter.allowance < plan.divergence(ledger) + charge
    cheaper = Trial(SampledGaussian(0.01, 20.0))  # what is left may be spent on a smaller step
    assert plan.affords(ledger, cheaper)


def test_the_allowance_is_met_exactly():
    charge = event_divergence(Gaussian(2.0), 6.0)
    plan = plan_of(allowance=3 * charge, updates=None)
    ledger = Ledger().record(Gaussian(2.0), updates=3, trials=3)
    assert plan.divergence(ledger) == pytest.approx(plan.filter.allowance)
    assert not plan.affords(ledger, Gaussian(2.0))
    assert not replace(
        plan, filter=replace(plan.filter, allowance=3 * charge * (1 - 1e-9))
    ).affords(Ledger().record(Gaussian(2.0), updates=2, trials=2), Gaussian(2.0))


def test_steps_of_all_kinds_are_added_up():
    plan = plan_of(setup=(Gaussian(8.0), Gaussian(8.0)))
    ledger = Ledger(setup=plan.setup).record(FIGURE, updates=1).record(STEP, updates=1)
    expected = 2 * event_divergence(Gaussian(8.0), 6.0)
    expected += event_divergence(FIGURE, 6.0) + event_divergence(STEP, 6.0)
    assert plan.divergence(ledger) == pytest.approx(expected)
    assert plan.left_after_setup() == pytest.approx(1.5 - 2 * event_divergence(Gaussian(8.0), 6.0))


def test_the_planned_updates_end_it_too():
    plan = plan_of(allowance=100.0, updates=3, trials=3)
    ledger = until_the_end(plan, STEP)
    assert ledger.updates == 3
    assert plan.completed(ledger)
    assert plan.length == plan.position(ledger) == plan.kept == 3


def test_without_planned_updates_progress_is_the_allowance():
    plan = plan_of(updates=None, trials=MOST_TRIALS)
    assert plan.length == ALLOWANCE_PARTS
    assert plan.kept is None
    ledger = until_the_end(plan, STEP)
    places = [plan.position(Ledger().record(STEP, updates=n, trials=n)) for n in range(1, 5)]
    assert places == sorted(places)
    assert 0.8 * ALLOWANCE_PARTS < plan.position(ledger) <= ALLOWANCE_PARTS


def test_limited_ends_earlier_and_promises_the_same():
    plan = plan_of(allowance=100.0)
    shorter = plan.limited(2)
    assert until_the_end(shorter, STEP).updates == shorter.kept == 2
    assert shorter.epsilon() == plan.epsilon()
    assert shorter.length == plan.length  # schedules go on as planned
    assert plan.limited(50).kept == 12


@pytest.mark.parametrize("typical", [STEP, COIN], ids=["kept", "gated"])
def test_a_filter_promises_its_whole_allowance(typical):
    plan = plan_of(typical=typical, trials=100)
    share = 1 - TAIL_SHARE - (CAP_SHARE if typical.gate else 0.0)
    assert plan.epsilon() == epsilon_at(
        plan.filter.order, plan.filter.allowance, BUDGET.delta * share
    )
    ledger = Ledger()
    assert plan.spent(ledger) == 0.0
    spent = []
    for _ in range(3):
        ledger = ledger.record(typical, updates=1)
        spent.append(plan.spent(ledger))
    assert spent == sorted(spent)
    assert spent[-1] <= plan.epsilon()


def test_the_best_order_uses_the_budget_up(best):
    assert BUDGET.epsilon * (1 - 1e-6) <= best.epsilon() <= BUDGET.epsilon
    most = best.filter.allowance / event_divergence(STEP, best.filter.order)
    for order in (2.0, 40.0):
        allowance = RenyiFilter.for_budget(BUDGET, order).allowance
        assert most > 1.05 * allowance / event_divergence(STEP, order)


def test_setup_is_in_the_choice_of_the_order(best):
    heavy = filtered_plan(BUDGET, "proven", STEP, updates=None, setup=(Gaussian(2.5),))
    assert heavy.filter.order != best.filter.order
    assert 0 < heavy.left_after_setup() < heavy.filter.allowance
    steps = heavy.left_after_setup() / event_divergence(STEP, heavy.filter.order)
    same_order = replace(best, setup=heavy.setup)
    assert steps > same_order.left_after_setup() / event_divergence(STEP, best.filter.order)


def test_noise_that_costs_a_price():
    plan = plan_of()
    noise = noise_for(plan, 0.2, 0.05)
    assert event_divergence(Trial(SampledGaussian(0.2, noise)), plan.filter.order) <= 0.05
    assert event_divergence(Trial(SampledGaussian(0.2, 0.999 * noise)), plan.filter.order) > 0.05
    beside = noise_for(plan, 0.2, 0.05, NoisyChoice(0.2, 0.5))
    assert beside > noise
    with pytest.raises(BudgetError, match="an update at rate 0.2 costs more than its share"):
        noise_for(plan, 0.2, 0.001, NoisyChoice(0.2, 2.0))


# --- behind a gate ------------------------------------------------------------------------------


def test_rejections_are_not_charged_where_updates_are():
    plan = plan_of(typical=COIN, trials=200)
    ledger = Ledger().record(COIN, updates=2, trials=9)
    assert plan.divergence(ledger) == pytest.approx(2 * event_divergence(COIN, 6.0))
    assert plan.charges_accepted
    always = ledger.record(FIGURE, updates=1)
    assert plan.divergence(always) > plan.divergence(ledger)


def test_rejections_are_charged_where_trials_are():
    gated = Trial(SampledGaussian(0.1, 2.0), LossTest(0.05, 4.0, 0.0))
    plan = plan_of("every-trial", typical=gated, updates=None, trials=9)
    ledger = Ledger().record(gated, updates=0, trials=3)
    both = event_divergence(gated.update, 6.0) + event_divergence(gated.test, 6.0)
    assert plan.divergence(ledger) == pytest.approx(3 * both)
    assert not plan.charges_accepted
    assert not plan.affords(Ledger().record(gated, updates=1, trials=9), gated)


def bernoulli_divergence(p, q, order):
    terms = (p**order * q ** (1 - order), (1 - p) ** order * (1 - q) ** (1 - order))
    return math.log(sum(terms)) / (order - 1)


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_a_verdict_that_is_an_output_is_paid_for(rate):
    """With an update that is all noise, a trial still tells its verdict."""
    test, order = LossTest(rate, 0.5, 3.0), 8.0
    trial = Trial(SampledGaussian(1.0, 1e5), test)
    plan = plan_behind_filter(BUDGET, "every-trial", order, 50.0, trial, updates=None)
    accepts = [(1 - rate) * test.accept_max + rate * p for p in (test.accept_max, test.accept_min)]
    exact = max(
        bernoulli_divergence(*accepts, order), bernoulli_divergence(*reversed(accepts), order)
    )
    assert exact > 1
    assert plan.cost(trial) >= exact
    assert plan.affords(Ledger(), trial)
    assert not replace(plan, filter=replace(plan.filter, allowance=0.9 * plan.cost(trial))).affords(
        Ledger(), trial
    )
    # what an accepted update alone is charged says nothing of it
    assert event_divergence(trial, order) < exact


def test_the_cap_is_that_of_a_fixed_plan():
    plan = filtered_plan(BUDGET, "proven", COIN, updates=5, trials=7)
    assert plan.trials == trial_cap(COIN.test, 5, BUDGET) > 7
    assert plan.epsilon() <= BUDGET.epsilon
    capped = Ledger().record(COIN, updates=4, trials=plan.trials)
    assert not plan.affords(capped, COIN)
    assert not plan.completed(capped)
    assert plan.completed(Ledger().record(COIN, updates=5, trials=plan.trials))
    assert plan.completed(Ledger().record(COIN, updates=4, trials=6))  # the filter ended it


def test_without_a_gate_trials_are_as_given():
    plan = filtered_plan(BUDGET, "proven", STEP, updates=5, trials=5)
    assert plan.trials == 5
    assert plan.completed(Ledger())


# --- refusals and files -------------------------------------------------------------------------


def test_an_accounting_that_is_not_proved_is_refused():
    with pytest.raises(InvalidInputError, match="published accounting; use proven or every-trial"):
        plan_of("published")


def test_a_gate_that_the_accounting_does_not_cover_is_refused():
    with pytest.raises(InvalidInputError, match="coin gate is not covered"):
        plan_of("every-trial", typical=COIN)
    with pytest.raises(InvalidInputError, match="keep-momentum is not covered"):
        plan_of("proven", typical=COIN, on_reject="keep-momentum")


def test_behind_a_gate_updates_are_fixed():
    with pytest.raises(InvalidInputError, match="number of updates must be fixed in advance"):
        plan_of(typical=COIN, updates=None)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"typical": COIN, "trials": 99, "stop_after": 3},
        {"updates": None, "setup": (Gaussian(8.0), Gaussian(40.0))},
        {"typical": Trial(SampledGaussian(0.1, 2.0), NoisyChoice(0.2, 0.5))},
    ],
)
def test_plans_survive_a_file(changes):
    plan = plan_of(**changes)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_file_that_holds_no_trial_is_refused():
    values = plan_of().to_json()
    values["phases"][0]["step"] = {"kind": "Gaussian", "noise_multiplier": 1.0}
    with pytest.raises(InvalidInputError, match="a phase repeats a Trial or a Menu"):
        Plan.from_json(values)


@pytest.mark.parametrize("step", [FIGURE, Gaussian(1.0), Trial(SampledGaussian(0.1, 2.1)), COIN])
def test_a_fixed_plan_refuses_a_step_that_was_not_planned(step):
    plan = repeated_plan(BUDGET, "proven", STEP, trials=5, updates=5)
    assert plan.affords(Ledger(), STEP)
    with pytest.raises(BudgetError, match="was not planned: after 0 steps comes"):
        plan.affords(Ledger(), step)
