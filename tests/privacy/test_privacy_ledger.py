"""A ledger that is charged step by step, and loops that use it wrongly."""

import contextlib
import json
import math

import pytest

from dpsur.errors import BudgetError, InvalidInputError
from dpsur.privacy import account as account_module
from dpsur.privacy.account import Account
from dpsur.privacy.accountants import pld
from dpsur.privacy.events import CoinTest, Gaussian, LossTest, NonPrivate, SampledGaussian, Trial

STEP = SampledGaussian(0.1, 3.0)
OTHER = SampledGaussian(0.2, 5.0)
DELTA = 1e-5


def fixed(steps=5):
    return Account.for_steps(STEP, steps, delta=DELTA)


def filtered(epsilon=1.0):
    return Account.for_budget(epsilon, DELTA, STEP)


class Mechanism:
    """Steps that were really made, counted apart from any ledger."""

    def __init__(self):
        self.made = []

    def step(self, event):
        self.made.append(event)

    def epsilon(self):
        return pld.composed_epsilon([(event, 1) for event in self.made], DELTA)


def charged_before(ledger, mechanism, event):
    ledger.charge(event)
    mechanism.step(event)


def charged_after(ledger, mechanism, event):
    mechanism.step(event)
    ledger.charge(event)


def not_charged(ledger, mechanism, event):
    if ledger.affords(event):
        mechanism.step(event)


def loop_keeps_its_promise(make, one_step):
    """Make steps until one is refused; what was made must not exceed what was promised."""
    ledger, mechanism = make(), Mechanism()
    with contextlib.suppress(BudgetError):
        for _ in range(1000):
            one_step(ledger, mechanism, STEP)
    assert 0 < len(mechanism.made) < 1000
    assert len(mechanism.made) <= ledger.steps
    assert mechanism.epsilon() <= ledger.guarantee() * (1 + 1e-9)


@pytest.mark.parametrize("make", [fixed, filtered])
def test_a_loop_that_charges_before_each_step_keeps_its_promise(make):
    loop_keeps_its_promise(make, charged_before)


@pytest.mark.parametrize("make", [fixed, filtered])
@pytest.mark.parametrize("wrong", [charged_after, not_charged])
def test_a_loop_that_charges_late_or_never_is_caught(make, wrong):
    with pytest.raises(AssertionError):
        loop_keeps_its_promise(make, wrong)


@pytest.mark.parametrize("name", ["plan", "delta", "charged"])
def test_nothing_of_an_account_can_be_set(name):
    account = Account.for_steps(STEP, 2, delta=DELTA)
    account.charge(STEP)
    with pytest.raises(AttributeError, match=name):
        setattr(account, name, getattr(Account.for_steps(STEP, 3, delta=DELTA), name))
    assert account.steps == 1


def test_equal_steps_compose_by_privacy_loss_distributions():
    ledger = fixed(20)
    assert ledger.guarantee() == pytest.approx(pld.composed_epsilon([(STEP, 20)], DELTA), rel=1e-6)
    for _ in range(7):
        ledger.charge(STEP)
    assert ledger.steps == 7
    assert ledger.spent() == pytest.approx(pld.composed_epsilon([(STEP, 7)], DELTA), rel=1e-6)
    assert ledger.get_epsilon(1e-3) == ledger.spent(1e-3) < ledger.spent()


def test_stopping_early_does_not_lower_the_guarantee():
    for ledger in (fixed(), filtered()):
        before = ledger.guarantee()
        ledger.charge(STEP)
        assert ledger.guarantee() == before > ledger.spent()


def test_a_fixed_number_of_steps_is_of_one_kind():
    ledger = fixed()
    assert not ledger.affords(OTHER)
    with pytest.raises(BudgetError, match="was not planned"):
        ledger.charge(OTHER)
    assert ledger.steps == 0


def test_a_number_of_steps_that_does_not_fit_is_refused_before_the_first():
    with pytest.raises(BudgetError, match="above 0.1: raise epsilon"):
        Account.for_steps(STEP, 1000, delta=DELTA, epsilon=0.1)


def test_behind_a_filter_steps_may_differ_until_the_allowance_is_spent():
    ledger = filtered(2.0)
    assert 0 < ledger.guarantee() <= 2.0
    steps = [STEP, OTHER, Trial(STEP, LossTest(0.1, 2.0, 0.0)), Gaussian(20.0)]
    for step in steps:
        ledger.charge(step)
    while ledger.affords(OTHER):
        ledger.charge(OTHER)
    count = ledger.steps
    assert count > len(steps)
    with pytest.raises(BudgetError, match="does not fit after"):
        ledger.charge(OTHER)
    assert ledger.spent() <= ledger.guarantee()
    with pytest.raises(BudgetError):
        ledger.charge(SampledGaussian(1.0, 0.5))
    assert ledger.steps == count  # what was refused was not charged


def test_many_kinds_of_steps_are_summed_by_the_filter(monkeypatch):
    ledger = filtered(3.0)
    for k in range(3):
        ledger.charge(SampledGaussian(0.01, 2.0 + k))
    exact = ledger.spent()
    monkeypatch.setattr(account_module, "MOST_KINDS", 2)
    assert exact < ledger.spent() < ledger.guarantee()


def test_without_a_limit_nothing_is_promised():
    ledger = Account.without_limit(DELTA)
    assert ledger.spent() == 0.0
    ledger.charge(STEP)
    ledger.charge(OTHER)
    expected = pld.composed_epsilon([(STEP, 1), (OTHER, 1)], DELTA)
    assert ledger.spent() == pytest.approx(expected, rel=1e-6)
    assert ledger.guarantee() == math.inf


def test_setup_is_charged():
    with_setup = Account.for_steps(STEP, 5, delta=DELTA, setup=(Gaussian(2.0),))
    assert with_setup.guarantee() > fixed().guarantee()
    assert with_setup.spent() > 0


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Trial(NonPrivate()), "has no finite epsilon"),
        (NonPrivate(), "a step is a SampledGaussian"),
        (Trial(STEP, CoinTest(0.1, 2.0)), "coin gate is not covered"),
    ],
)
def test_what_cannot_be_charged_is_refused(step, message):
    for ledger in (Account.without_limit(DELTA), filtered()):
        with pytest.raises(InvalidInputError, match=message):
            ledger.charge(step)
        assert ledger.steps == 0


def test_a_ledger_resumes_where_it_was_stored():
    for ledger in (fixed(), filtered(), Account.without_limit(DELTA)):
        ledger.charge(STEP)
        ledger.charge(STEP)
        stored = json.loads(json.dumps(ledger.to_json(), allow_nan=False))
        resumed = Account.from_json(stored)
        assert resumed.to_json() == ledger.to_json()
        assert resumed.steps == 2
        assert (resumed.guarantee(), resumed.spent()) == (ledger.guarantee(), ledger.spent())
    resumed = Account.from_json(fixed(1).to_json())
    resumed.charge(STEP)
    with pytest.raises(BudgetError):
        resumed.charge(STEP)


def test_a_stored_ledger_that_exceeds_its_limit_is_refused():
    for ledger in (fixed(), filtered()):
        ledger.charge(STEP)
        stored = ledger.to_json()
        stored["charged"]["entries"][0] |= {"trials": 5000, "updates": 5000}
        with pytest.raises(BudgetError, match="does not fit after 4999 steps"):
            Account.from_json(stored)
    stored = filtered().to_json()
    stored["plan"]["filter"]["allowance"] *= 2
    with pytest.raises(InvalidInputError, match="above the 1 that it states"):
        Account.from_json(stored)
    with pytest.raises(InvalidInputError, match="another delta"):
        Account.from_json({**filtered().to_json(), "delta": 1e-3})
    with pytest.raises(InvalidInputError, match="not a privacy account"):
        Account.from_json({})


@pytest.mark.parametrize("setup", [(Gaussian(0.5),), (NonPrivate(),)])
def test_a_setup_beyond_the_budget_is_refused(setup):
    """A filter promises its allowance, so nothing may have been spent beyond it before."""
    with pytest.raises(BudgetError, match="before the first step"):
        Account.for_budget(1.0, 1e-5, SampledGaussian(0.01, 1.0), setup=setup)
