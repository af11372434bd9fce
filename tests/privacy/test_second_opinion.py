"""What dp-accounting says of our figures: confirmed, refuted, or that it cannot tell."""

import math
from dataclasses import replace

import pytest

from dpsur.privacy import second_opinion
from dpsur.privacy.accounting import accounting_named, planned_charges
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import (
    CoinTest,
    Gaussian,
    LossTest,
    Menu,
    NoisyChoice,
    SampledGaussian,
    Trial,
)
from dpsur.privacy.planning import block_plan, filtered_plan
from dpsur.privacy.second_opinion import (
    AS_FIXED,
    ONE_CHOICE,
    TOLERANCE,
    UNDERFLOW,
    UNSELECTED,
    WITHOUT_CHOICES,
    opinions,
    statement_opinions,
)
from reproduction.presets.settings import paper_settings

DELTA = 1e-5
UPDATE, TEST = SampledGaussian(0.05, 2.0), LossTest(0.01, 1.2, -1.0)


def opinion_on(accounting, charges, delta=DELTA, factor=1.0):
    """The one opinion on a figure of ours, multiplied by a factor."""
    epsilon = factor * accounting_named(accounting).epsilon(charges, delta)
    (found,) = opinions({accounting.replace("-", "_"): (epsilon, charges)}, delta)
    return found


def agree(found):
    """Ours is never lower by more than a hundredth of the tolerance, nor much higher."""
    lower, higher = 1 - TOLERANCE / 100, 1 + TOLERANCE / 10
    return lower * found.independent <= found.epsilon <= higher * found.independent


def agrees_at(setting, updates):
    """Both accountants find the same, with the tests and without them."""
    trials = planned_charges(setting.setup, setting.trial, updates)
    alone = planned_charges(setting.setup, Trial(setting.trial.update), updates)
    for accounting, charges in (("every-trial", trials), ("proven", alone)):
        found = opinion_on(accounting, charges)
        assert found.instead is None
        assert not found.refuted
        assert agree(found)


def test_figures_at_the_papers_settings_are_confirmed():
    for setting in paper_settings()[1::6]:
        agrees_at(setting, 500)


@pytest.mark.slow
def test_figures_at_all_sixteen_settings_are_confirmed():
    for setting in paper_settings():
        for updates in (20, 500, 5000):
            agrees_at(setting, updates)


def test_blocks_with_tests_are_confirmed():
    for test in (Gaussian(30.0), SampledGaussian(0.1, 10.0)):
        plan = block_plan(
            Budget(8.0, DELTA), "proven", Trial(UPDATE), test, (0, 20, 100), (Gaussian(8.0),)
        )
        (found,) = statement_opinions(plan, {}, plan.figures())
        assert found.figures == ("proven",)
        assert found.instead is None
        assert agree(found)


def test_a_figure_that_is_too_low_is_refuted():
    charges = planned_charges((), Trial(UPDATE, TEST), 300)
    assert not opinion_on("every-trial", charges, factor=1 - TOLERANCE / 2).refuted
    low = opinion_on("every-trial", charges, factor=1 - 2 * TOLERANCE)
    assert low.refuted
    assert "(every_trial) is too low: dp-accounting 0." in low.describe()
    assert not opinion_on("every-trial", charges, factor=2.0).refuted  # looser, and no less true


SIMPLER = [
    ("proven", Trial(UPDATE, TEST), UNSELECTED),
    ("proven-pld", Trial(UPDATE, TEST), UNSELECTED),
    ("proven", Trial(UPDATE, CoinTest(0.01, 1.0)), UNSELECTED),  # which selects nothing
    ("proven", Trial(UPDATE, NoisyChoice(0.05, 0.1)), WITHOUT_CHOICES),
    ("every-trial", Trial(UPDATE, NoisyChoice(0.05, 0.1)), WITHOUT_CHOICES),
    ("proven", Menu((UPDATE, SampledGaussian(0.1, 3.5)), 5), ONE_CHOICE),
]


@pytest.mark.parametrize(("accounting", "event", "instead"), SIMPLER)
def test_what_it_does_not_know_costs_no_less_than_what_it_does(accounting, event, instead):
    found = opinion_on(accounting, [(Gaussian(8.0), 1), (event, 60)])
    assert found.instead == instead
    assert not found.refuted
    assert 0.6 * found.epsilon < found.independent
    assert f"finds for {instead}: " in found.describe()
    assert opinion_on(accounting, [(Gaussian(8.0), 1), (event, 60)], factor=0.6).refuted


def test_the_costliest_choice_of_a_menu_counts():
    costly = SampledGaussian(0.1, 1.5)
    for choices in ((UPDATE, costly), (costly, UPDATE)):
        found = opinion_on("proven", [(Menu(choices, 5), 60)])
        assert found.independent == opinion_on("proven", [(Trial(costly), 300)]).independent


def test_the_steps_behind_a_filter():
    trial = Trial(UPDATE)
    plan = filtered_plan(Budget(3.0, DELTA), "proven", trial, updates=None)
    made = {"kind": "Trial", "test": None}
    steps = [
        {"step": {**made, "update": {"kind": "SampledGaussian", **vars(update)}}, "charged": count}
        for update, count in ((UPDATE, 40), (replace(UPDATE, noise_multiplier=1.9), 30))
    ]
    mechanism = {"filter": {"steps": steps}}
    (found,) = statement_opinions(plan, mechanism, plan.figures())
    assert found.instead == AS_FIXED
    assert 0 < found.independent < found.epsilon
    (found,) = statement_opinions(plan, {"filter": {"steps": []}}, plan.figures())
    assert found.independent == 0.0
    steps[0]["charged"] = 4000
    (found,) = statement_opinions(plan, mechanism, plan.figures())
    assert found.refuted


@pytest.mark.parametrize(
    ("charges", "delta", "reason"),
    [
        ([(SampledGaussian(0.5, 0.5), 1000)], DELTA, UNDERFLOW),
        ([(Gaussian(1.0), 2000)], DELTA, UNDERFLOW),
        ([(UPDATE, 100_000)], 1e-9, "delta is too small for its transforms"),
        ([(SampledGaussian(0.01, 5 + k), 1) for k in range(65)], DELTA, "65 different steps"),
    ],
)
def test_it_says_where_it_cannot_tell(charges, delta, reason, monkeypatch):
    # the missing tail of the noise alone would exceed delta at the first of these
    monkeypatch.setattr("dpsur.privacy.accounting.noise_tail", lambda *_, **__: 0.0)
    found = opinion_on("every-trial", charges, delta)
    assert found.independent is None
    assert not found.refuted
    assert reason in found.cannot_tell
    assert f"cannot tell: {found.cannot_tell}" in found.describe()


def test_it_says_that_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(second_opinion, "package_version", lambda _: "absent")
    assert opinion_on("every-trial", [(UPDATE, 3)]).cannot_tell == "it is not installed"


def test_there_is_none_on_what_is_no_guarantee():
    figures = dict.fromkeys(("published", "proven_lower"), (0.1, [(UPDATE, 3)]))
    assert opinions(figures, DELTA) == []
    assert opinions({"proven": (math.inf, [(UPDATE, 3)])}, DELTA) == []


def test_figures_of_one_value_share_a_line():
    charges = [(Trial(UPDATE), 100)]
    epsilon = accounting_named("proven").epsilon(charges, DELTA)
    (found,) = opinions(dict.fromkeys(("proven", "every_trial"), (epsilon, charges)), DELTA)
    assert found.figures == ("proven", "every_trial")
    assert "(proven, every_trial) confirmed by dp-accounting 0.6" in found.describe()


def test_an_update_and_a_test_that_are_alike_count_as_two():
    trial = Trial(UPDATE, LossTest(UPDATE.sample_rate, UPDATE.noise_multiplier, 0.0))
    (parts,) = second_opinion._known_parts([(trial, 5)], selected=False)
    assert parts == ((UPDATE, 10),)
    (parts,) = second_opinion._known_parts([(trial, 5)], selected=True)
    assert parts == ((UPDATE, 5),)
