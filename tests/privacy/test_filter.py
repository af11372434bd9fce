import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsur.errors import InvalidInputError
from dpsur.privacy.accountants.proven import event_divergence
from dpsur.privacy.accountants.rdp import RenyiFilter, epsilon_at
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Gaussian, SampledGaussian

BUDGET = Budget(2.0, 1e-5)


@pytest.mark.parametrize("order", [5.0, 12.5, 64.0])
def test_the_allowance_is_what_the_budget_converts_to(order):
    allowance = RenyiFilter.for_budget(BUDGET, order).allowance
    assert epsilon_at(order, allowance, BUDGET.delta) <= BUDGET.epsilon
    assert epsilon_at(order, allowance * 1.001, BUDGET.delta) > BUDGET.epsilon


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 0.3), max_size=60))
def test_whatever_is_chosen_on_the_way_the_budget_holds(charges):
    """An adaptive run that asks before every step never spends more than the budget."""
    allowed, spent = RenyiFilter.for_budget(BUDGET, 12.0), 0.0
    for charge in charges:
        if allowed.affords(spent, charge):
            spent += charge
    assert epsilon_at(12.0, spent, BUDGET.delta) <= BUDGET.epsilon


def test_it_stops_before_the_step_that_does_not_fit():
    allowed = RenyiFilter.for_budget(BUDGET, 12.0)
    charge = allowed.allowance / 3.5
    assert [allowed.affords(made * charge, charge) for made in range(4)] == [True] * 3 + [False]


def test_asking_too_late_is_caught():
    """The mutant that checks what was spent, not what would be."""
    current = RenyiFilter.for_budget(BUDGET, 12.0)
    charge = current.allowance / 3.5
    spent = 0.0
    while spent <= current.allowance:  # too late: the sum is looked at after the step
        spent += charge
    assert epsilon_at(12.0, spent, BUDGET.delta) > BUDGET.epsilon


def test_the_best_order_affords_most():
    event = SampledGaussian(0.02, 1.5)
    best = RenyiFilter.best_for(BUDGET, lambda order: event_divergence(event, order))
    steps = best.allowance / event_divergence(event, best.order)
    for order in (3.0, 40.0):
        other = RenyiFilter.for_budget(BUDGET, order)
        assert steps >= 0.99 * other.allowance / event_divergence(event, order)


def test_a_gaussian_event_has_its_closed_form():
    assert event_divergence(Gaussian(2.0), 10.0) == pytest.approx(10 / 8)


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
def test_bad_charges(bad):
    with pytest.raises(InvalidInputError, match="divergence of a step"):
        RenyiFilter.for_budget(BUDGET, 12.0).affords(0.0, bad)


def test_hopeless_orders():
    with pytest.raises(InvalidInputError, match="above 1"):
        RenyiFilter.for_budget(BUDGET, 1.0)
    assert RenyiFilter.for_budget(Budget(0.01, 1e-5), 2.0).allowance < 1e-4
