"""What every method keeps to, by being listed: budgets, statements, seeds, resumption, limits."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file

import dpsur
from dpsur.config import Intervals, RunConfig
from dpsur.methods import METHODS
from dpsur.privacy.statement import render_markdown, render_model_card
from dpsur.runs.checkpoint import FILE_NAME
from dpsur.runs.files import finite
from dpsur.runs.fit import execute
from dpsur.runs.session import build_session
from dpsur.runs.verification import verify
from tests.conftest import StopAt
from tests.methods.problems import (
    BUDGET,
    OPTIONS,
    PROVED,
    SIZE,
    assert_same,
    data_of,
    fit,
    method_of,
    weights,
)

ADAPTIVE = ("dpis", "dpagd")
REMEMBERING = (*ADAPTIVE, "dpsr-cg")
FILTERED = ("dpagd",)
UNCOVERED = {("dpsr-cg", "proven")}  # which it refuses
CASES = [
    (name, accounting)
    for name in METHODS
    for accounting in PROVED
    if (name, accounting) not in UNCOVERED
]
OFTEN = Intervals(checkpoint_every=2)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPSUR_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Every case run once, with its folder."""
    known = {}

    def run(name, accounting):
        if (name, accounting) not in known:
            folder = tmp_path_factory.mktemp("run") / "out"
            known[name, accounting] = (
                fit(method_of(name, accounting), accounting, out=folder, intervals=OFTEN),
                folder,
            )
        return known[name, accounting]

    return run


def test_every_method_has_a_short_setting():
    assert OPTIONS.keys() == METHODS.keys()


def test_every_method_is_in_reach():
    for method in METHODS.values():
        if method.__module__.startswith("dpsur."):
            assert getattr(dpsur, method.__name__) is method
            assert method.__name__ in dir(dpsur)


@pytest.mark.parametrize(("name", "accounting"), CASES)
def test_spends_at_most_its_budget(name, accounting, finished):
    run, _ = finished(name, accounting)
    key = accounting.replace("-", "_")
    assert run.statement["method"] == name
    assert run.epsilon[key] == run.plan.epsilon() == run.statement["guarantee"]["epsilon"]
    if name == "nonprivate":
        assert run.epsilon[key] == math.inf
        return
    assert 0 < run.epsilon[key] <= BUDGET.epsilon
    assert 0 < run.plan.spent(run.private.ledger) <= run.epsilon[key] * (1 + 1e-9)


@pytest.mark.parametrize(("name", "accounting"), CASES)
def test_its_ledger_is_within_its_plan(name, accounting, finished):
    run, _ = finished(name, accounting)
    ledger, plan = run.private.ledger, run.plan
    assert ledger.setup == plan.setup
    assert 0 < ledger.updates <= ledger.trials <= plan.trials
    if plan.updates is not None:
        assert ledger.updates <= plan.updates
    if plan.filter is not None:
        assert plan.divergence(ledger) <= plan.filter.allowance
    if name == "dpagd":  # a retry is among what is compared below
        assert ledger.trials > ledger.updates
    assert not torch.equal(weights(run), weights_before(name))


def weights_before(name):
    state = data_of(name).model().state_dict().values()
    return torch.cat([value.flatten().double() for value in state])


@pytest.mark.parametrize(("name", "accounting"), CASES)
def test_its_release_verifies_and_reads_well(name, accounting, finished):
    run, folder = finished(name, accounting)
    faults, figures = verify(folder)
    assert faults == []
    assert figures == pytest.approx(finite(run.epsilon), nan_ok=True)
    page = (folder / "release" / "PRIVACY.md").read_text()
    assert f"`{name}`" in page
    assert "None" not in page
    assert ("Privacy filter" in page) == (name in FILTERED)
    assert ("choices fixed before the run" in page) == (name == "dpis")
    assert "1000000" not in page


@pytest.mark.parametrize(("name", "accounting"), CASES)
def test_a_seed_repeats_it(name, accounting, finished):
    run, _ = finished(name, accounting)
    again = fit(method_of(name, accounting), accounting)
    assert torch.equal(weights(run), weights(again))
    assert run.private.ledger == again.private.ledger
    if accounting == "proven":
        assert not torch.equal(weights(run), weights(fit(again.method, accounting, seed=1)))


@pytest.mark.parametrize(("name", "accounting"), CASES)
def test_it_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(
    name, accounting, finished, tmp_path
):
    run, whole = finished(name, accounting)
    method = method_of(name, accounting)
    stop = StopAt(min(5, run.private.ledger.trials - 1))
    with pytest.raises(KeyboardInterrupt):
        fit(method, accounting, out=tmp_path / "run", intervals=OFTEN, observers=[stop])
    assert not (tmp_path / "run" / "release").exists()
    resumed = fit(method, accounting, out=tmp_path / "run", intervals=OFTEN, resume=True)
    assert torch.equal(weights(run), weights(resumed))
    assert run.private.ledger == resumed.private.ledger
    last, same = (load_file(f / "private" / FILE_NAME) for f in (whole, tmp_path / "run"))
    assert_same(last, same)
    remembered = [key for key in last if key.startswith("state/memory/")]
    assert bool(remembered) == (name in REMEMBERING)
    rows = (tmp_path / "run" / "private" / "metrics.jsonl").read_text().splitlines()
    numbers = [json.loads(row)["trial"] for row in rows if json.loads(row)["kind"] == "trial"]
    assert numbers == list(range(1, run.private.ledger.trials + 1))


@pytest.mark.parametrize(("name", "accounting"), [one for one in CASES if one[1] == "proven"])
def test_it_can_be_ended_early(name, accounting):
    data = data_of(name)
    config = RunConfig(
        task=None, budget=BUDGET, method=method_of(name, accounting), accounting=accounting, seed=0,
        device="cpu", max_updates=2,
    )  # fmt: skip
    loss = torch.nn.functional.cross_entropy
    session = build_session(config, data.model(), data.train(), loss=loss)
    run = execute(session)
    assert run.private.ledger.updates == run.statement["accepted_updates"] == 2
    if name != "nonprivate":
        assert run.plan.epsilon() <= BUDGET.epsilon
    if name in FILTERED:  # what a filter promises is its allowance
        assert run.plan.epsilon() == pytest.approx(BUDGET.epsilon)


@pytest.mark.parametrize("most", [0, -1, 1.5])
def test_an_odd_limit_is_refused(most):
    with pytest.raises(dpsur.InvalidInputError, match="max_updates must be a whole number"):
        RunConfig(max_updates=most)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_an_adaptive_method_is_not_covered_by_the_paper(name):
    message = "steers itself by released values is not covered by the published accounting; use pr"
    with pytest.raises(dpsur.InvalidInputError, match=message):
        method_of(name, "proven").resolve(SIZE, BUDGET, "published")


@pytest.mark.parametrize("name", FILTERED)
def test_a_filter_holds_for_its_own_delta_only(name, finished):
    run, _ = finished(name, "proven")
    with pytest.raises(dpsur.InvalidInputError, match="made for delta 0.001; plan the run with"):
        run.get_epsilon(1e-2)
    assert run.epsilon["every_trial"] is run.epsilon["published"] is None


def more_steps(statement):
    statement["mechanism"]["filter"]["steps"][-1]["charged"] += 50


def less_noise(statement):
    for row in statement["mechanism"]["filter"]["steps"]:
        event = row["step"].get("update", row["step"])
        event["noise_multiplier"] /= 2


def larger_allowance(statement):
    statement["mechanism"]["filter"]["allowance"] *= 1.01


def smaller_epsilon(statement):
    statement["epsilon"]["proven"] = statement["guarantee"]["epsilon"] = 1.0


def another_order(statement):
    statement["mechanism"]["filter"]["order"] *= 1.5


def no_filter(statement):
    statement["mechanism"].update(filter=None, trials=5, updates=None)


def repeated_steps(statement):
    statement["mechanism"]["filter"]["steps"] *= 40


def as_it_is(statement):
    """The control: the same procedure without an edit."""


EDITS = {
    more_steps: "the steps are not those of a run by the stated plan",
    less_noise: "the steps are not those of a run by the stated plan",
    repeated_steps: "the steps are not those of a run by the stated plan",
    larger_allowance: "epsilon.proven is stated as",
    another_order: "epsilon.proven is stated as",
    smaller_epsilon: "guarantee.epsilon is stated as 1.0",
    no_filter: "",
}


def verified(folder, edit, where):
    """The faults of a copy of a release whose statement was edited, page and all."""
    release = where / "release"
    shutil.copytree(folder / "release", release)
    statement = json.loads((release / "privacy.json").read_text())
    edit(statement)
    (release / "privacy.json").write_text(json.dumps(statement))
    (release / "PRIVACY.md").write_text(render_markdown(statement))
    (release / "README.md").write_text(render_model_card(statement))
    return verify(release)[0]


@pytest.mark.parametrize("edit", [*EDITS, as_it_is], ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("name", FILTERED)
def test_an_edited_filter_does_not_verify(name, edit, finished, tmp_path):
    _, folder = finished(name, "proven")
    faults = verified(folder, edit, tmp_path)
    assert bool(faults) == (edit is not as_it_is)
    assert any(fault.startswith(EDITS.get(edit, "")) for fault in faults or [""])


def test_a_menu_holds_for_any_delta(finished):
    run, _ = finished("dpis", "proven")
    assert run.get_epsilon(BUDGET.delta) == run.epsilon["proven"]
    assert run.get_epsilon(1e-2) < run.epsilon["proven"] < run.get_epsilon(1e-5)
    assert run.epsilon["every_trial"] is run.epsilon["published"] is None


def menu_of(statement):
    return statement["mechanism"]["menu"]


def one_more_update(statement):
    menu_of(statement)["steps"][-1]["charged"] += 1


def one_more_release(statement):
    menu_of(statement)["steps"].append(menu_of(statement)["steps"][0])


def updates_with_less_noise(statement):
    menu_of(statement)["steps"][1]["step"]["update"]["noise_multiplier"] *= 0.9


def menu_with_less_noise(statement):
    for choice in menu_of(statement)["offer"]["choices"]:
        choice["noise_multiplier"] *= 0.9


def steering_with_less_noise(statement):
    menu_of(statement)["steering"]["noise_multiplier"] *= 0.5


def longer_blocks(statement):
    menu_of(statement)["offer"]["repeats"] = 6


def a_step_that_was_not_made(statement):
    row = {**menu_of(statement)["steps"][1], "charged": 0}
    menu_of(statement)["steps"].append(row)


def another_way_to_reject(statement):
    statement["mechanism"]["on_reject"] = statement["settings"]["on_reject"] = "keep-momentum"


def no_menu(statement):
    del statement["mechanism"]["menu"]


MENU_EDITS = {
    one_more_update: "the steps are not those of a run by the stated plan",
    one_more_release: "the steps are not those of a run by the stated plan",
    updates_with_less_noise: "the steps are not those of a run by the stated plan",
    menu_with_less_noise: "epsilon.proven is stated as",
    steering_with_less_noise: "epsilon.proven is stated as",
    longer_blocks: "epsilon.proven is stated as",
    a_step_that_was_not_made: "the steps are not those of a run by the stated plan",
    another_way_to_reject: "privacy.json is not what a run writes",
    smaller_epsilon: "guarantee.epsilon is stated as 1.0",
    no_menu: "epsilon.proven is stated as",
}


@pytest.mark.parametrize("edit", [*MENU_EDITS, as_it_is], ids=lambda edit: edit.__name__)
def test_an_edited_menu_does_not_verify(edit, finished, tmp_path):
    _, folder = finished("dpis", "proven")
    faults = verified(folder, edit, tmp_path)
    assert bool(faults) == (edit is not as_it_is)
    assert any(fault.startswith(MENU_EDITS.get(edit, "")) for fault in faults or [""])
