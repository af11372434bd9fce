"""Plans whose updates are chosen from a menu: what they let pass, and what they promise."""

import itertools
from dataclasses import replace

import pytest

from dpsur.errors import BudgetError, InvalidInputError
from dpsur.privacy.account import replays
from dpsur.privacy.accountants import pld
from dpsur.privacy.accountants.rdp import sampled_gaussian_rdp
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Gaussian, Ledger, LossTest, Menu, SampledGaussian, Trial
from dpsur.privacy.plan import Plan
from reproduction.methods.menus import (
    as_costly,
    best_order,
    fitted_menu_plan,
    menu_around,
    menu_plan,
)

BUDGET = Budget(3.0, 1e-5)
TYPICAL = SampledGaussian(0.1, 2.0)
STEERING = SampledGaussian(0.5, 30.0)
MENU = Menu((TYPICAL, SampledGaussian(0.2, 3.5), SampledGaussian(0.4, 7.0)), 4)
PLAN = menu_plan(BUDGET, "proven", MENU, STEERING, 10)
UPDATES = [Trial(choice) for choice in MENU.choices]


def after(*steps):
    ledger = Ledger()
    for step, count in steps:
        ledger = ledger.record(step, updates=count, trials=count)
    return ledger


WHOLE = [(STEERING, 1), (UPDATES[1], 4), (STEERING, 1), (UPDATES[0], 4), (STEERING, 1)]
RUN = [*WHOLE, (UPDATES[1], 2)]


def test_a_whole_run_passes():
    ledger = Ledger()
    for step, count in RUN:
        for _ in range(count):
            assert not PLAN.completed(ledger)
            assert PLAN.affords(ledger, step)
            ledger = ledger.record(step, updates=1)
    assert ledger == after(*RUN)
    assert PLAN.completed(ledger)
    assert replays(PLAN, ledger)
    assert (PLAN.position(ledger), PLAN.length, PLAN.kept, PLAN.trials) == (10, 10, 10, 10)
    for step in (STEERING, *UPDATES):  # not one more of anything
        assert not PLAN.affords(ledger, step)


@pytest.mark.parametrize(
    ("done", "step"),
    [
        ([], UPDATES[0]),  # nothing was released to choose by
        (RUN[:1], STEERING),  # one release too many
        (RUN[:1], Trial(SampledGaussian(0.1, 1.999))),  # less noise than on the menu
        (RUN[:1], Trial(SampledGaussian(0.101, 2.0))),  # a rate that is not on it
        (RUN[:1], Trial(SampledGaussian(0.2, 2.0))),  # the noise of another rate
        (RUN[:1], Trial(TYPICAL, LossTest(0.1, 1.0, 0.0))),
        (RUN[:1], Gaussian(2.0)),
        (RUN[:2], UPDATES[1]),  # the block is over
        ([RUN[0], (UPDATES[1], 2)], UPDATES[0]),  # a second choice within a block
        ([RUN[0], (UPDATES[1], 2)], STEERING),  # a release within a block
    ],
    ids=str,
)
def test_what_was_not_planned_is_refused(done, step):
    with pytest.raises(BudgetError, match="was not planned: after"):
        PLAN.affords(after(*done), step)
    assert not replays(PLAN, after(*done, (step, 1)))


@pytest.mark.parametrize(
    "steps", [RUN[:-1], [*RUN[:-1], (UPDATES[1], 3)], [*RUN, (STEERING, 1)], RUN[2:], []], ids=str
)
def test_only_a_whole_run_is_allowed(steps):
    assert not replays(PLAN, after(*steps))


@pytest.mark.parametrize("accounting", ["proven", "every-trial"])
def test_epsilon_covers_whatever_was_chosen(accounting):
    plan = replace(PLAN, accounting=accounting, setup=(Gaussian(20.0),))
    for chosen in itertools.combinations_with_replacement(MENU.choices, 3):
        charges = [*zip(chosen, (4, 4, 2), strict=True), (STEERING, 3), (Gaussian(20.0), 1)]
        assert pld.composed_epsilon(charges, BUDGET.delta) <= plan.epsilon() * (1 + 1e-9)
    assert plan.epsilon() > PLAN.epsilon()
    assert PLAN.epsilon(1e-3) < PLAN.epsilon()
    less = replace(
        plan, phases=(replace(plan.phases[0], steering=SampledGaussian(0.5, 3.0)),)
    ).epsilon()
    assert less > plan.epsilon()  # releases are charged, not only updates


def test_what_is_spent_rises_to_what_is_promised():
    ledgers = [after(*RUN[:n]) for n in range(len(RUN) + 1)]
    found = [PLAN.spent(ledger) for ledger in ledgers]
    assert found[0] == 0
    assert found == sorted(found)
    assert found[-1] == PLAN.epsilon()
    assert found[1] == found[2]  # a block counts when it begins


def test_an_end_that_is_known_before_the_run_costs_less():
    short = PLAN.limited(4)
    assert short.updates == 4
    assert short.epsilon() < PLAN.epsilon()
    assert replays(short, after(*RUN[:2]))
    assert PLAN.limited(99) == PLAN


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_noise_is_scaled_to_the_budget(factor):
    rough = [replace(c, noise_multiplier=factor * c.noise_multiplier) for c in MENU.choices]
    plan = fitted_menu_plan(
        BUDGET, "proven", Menu(tuple(rough), 4), STEERING, updates=10, setup=(Gaussian(20.0),)
    )
    assert 0.995 * BUDGET.epsilon <= plan.epsilon() <= BUDGET.epsilon
    ratios = {
        round(new.noise_multiplier / old.noise_multiplier, 9)
        for new, old in zip(plan.menu.choices, rough, strict=True)
    }
    assert len(ratios) == 1
    assert [c.sample_rate for c in plan.menu.choices] == [0.1, 0.2, 0.4]


def test_releases_that_spend_everything_leave_no_plan():
    loud = SampledGaussian(1.0, 0.3)
    assert fitted_menu_plan(BUDGET, "proven", MENU, loud, updates=10) is None


def test_it_is_written_and_read():
    plan = replace(PLAN, setup=(Gaussian(20.0),))
    assert Plan.from_json(plan.to_json()) == plan
    values = plan.to_json()
    values["phases"][0]["steering"] = {"kind": "NonPrivate"}
    with pytest.raises(InvalidInputError, match="a menu and the SampledGaussian"):
        Plan.from_json(values)
    with pytest.raises(InvalidInputError, match="the count of a phase"):
        replace(PLAN.phases[0], count=0)
    with pytest.raises(InvalidInputError, match="not covered by the published accounting"):
        replace(PLAN, accounting="published")


def test_the_nearest_rate_is_offered():
    rates = [choice.sample_rate for choice in MENU.choices]
    wanted = {0.01: 0.1, 0.14: 0.1, 0.15: 0.2, 0.2: 0.2, 0.29: 0.4, 1.0: 0.4}
    assert {rate: PLAN.menu.nearest(rate).sample_rate for rate in wanted} == wanted
    assert [PLAN.menu.nearest(rate) for rate in rates] == list(MENU.choices)


@pytest.mark.parametrize(("rate", "count"), [(0.01, 23), (0.3, 14), (1.0, 1), (0.95, 2)])
def test_rates_go_up_in_small_steps(rate, count):
    typical = SampledGaussian(rate, 2.0)
    offer = menu_around(typical, 8, 5)
    rates = [choice.sample_rate for choice in offer.choices]
    assert offer.repeats == 5
    assert offer.choices[0] == typical
    assert len(rates) == count
    assert rates[-1] == min(1.0, 8 * rate)
    assert all(1 < b / a <= 1.1 + 1e-9 for a, b in itertools.pairwise(rates))
    costs = [sampled_gaussian_rdp(c.sample_rate, c.noise_multiplier, 8) for c in offer.choices]
    assert costs == pytest.approx([costs[0]] * count, rel=1e-3)


def test_noise_by_its_share_of_the_cost():
    order = best_order(TYPICAL, 100, 1e-5)
    noise = as_costly(TYPICAL, 0.5, order, share=0.1)
    price = sampled_gaussian_rdp(0.1, 2.0, order)
    assert sampled_gaussian_rdp(0.5, noise, order) == pytest.approx(0.1 * price, rel=1e-3)
    assert best_order(TYPICAL, 1000, 1e-5) < best_order(TYPICAL, 1, 1e-5)
