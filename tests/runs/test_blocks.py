"""Whole runs with the gate over blocks: statement, verification, resumption, command line."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import dpsur
from dpsur.cli import main
from dpsur.config import Intervals
from dpsur.errors import InterruptedRunError, InvalidInputError
from dpsur.privacy.account import replays
from dpsur.privacy.statement import plan_from_statement, render_markdown, render_model_card
from dpsur.runs.checkpoint import FILE_NAME
from dpsur.runs.fit import execute
from dpsur.runs.verification import verify
from tests.conftest import StopAt
from tests.methods.problems import assert_same, data_of, weights

BUDGET = dpsur.Budget(3.0, 1e-3)
OPTIONS = {
    "gate": "block",
    "batch_size": 20,
    "updates": 4,
    "blocks": 4,
    "block_updates": 3,
    "average_decay": 0.9,
}
OFTEN = Intervals(checkpoint_every=1)


def fit(name="dpsgd", accounting="proven", **more):
    options = {**OPTIONS, "noise_multiplier": 6.0, "val_noise_multiplier": 20.0}
    method = dpsur.methods.METHODS[name](**{**options, **more.pop("options", {})})
    data = data_of(name)
    arguments = {"budget": BUDGET, "seed": 0, "device": "cpu", "intervals": OFTEN, **more}
    return dpsur.fit(data.model(), data.train(), method=method, accounting=accounting, **arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "out"
    return fit(out=folder), folder


def test_the_statement_lists_tests_and_what_they_released(finished):
    run, folder = finished
    assert run.plan.tests
    assert run.plan.blocks == (0, 0, 3, 3, 3, 3, 4)
    assert run.statement["accepted_updates"] == 16
    assert run.statement["settings"]["updates"] == 4
    metrics = run.statement["metrics"]
    assert list(dict.fromkeys(row["after"] for row in metrics)) == [
        "first weights", *[f"block {n}" for n in (1, 2, 3, 4)], "last block"
    ]  # fmt: skip
    assert [row["test"] for row in metrics] == [0, *(n for n in range(1, 7) for _ in range(3))]
    accuracy = next(row for row in metrics if row["quantity"] == "training accuracy")
    assert accuracy["standard_error"] == pytest.approx(1.25**0.5 * 20 / 60)
    assert run.epsilon["proven"] == run.plan.epsilon() <= 3
    page = (folder / "release" / "PRIVACY.md").read_text()
    assert "every update and every test is charged, kept or not" in page
    assert "Noisy values that were paid for" in page
    assert "None" not in page
    stated = json.loads((folder / "release" / "privacy.json").read_text())
    assert plan_from_statement(stated) == run.plan
    assert verify(folder) == ([], pytest.approx(dict(run.epsilon)))


@pytest.mark.parametrize("stop", [1, 3, 5, 9, 12, 15])
def test_it_continues_from_any_update_as_if_it_had_not_stopped(stop, finished, tmp_path):
    run, whole = finished
    with pytest.raises(KeyboardInterrupt):
        fit(out=tmp_path / "run", observers=[StopAt(stop)])
    resumed = fit(out=tmp_path / "run", resume=True)
    assert torch.equal(weights(run), weights(resumed))
    assert run.private.ledger == resumed.private.ledger
    assert resumed.statement["metrics"] == run.statement["metrics"]
    assert_same(*(load_file(f / "private" / FILE_NAME) for f in (whole, tmp_path / "run")))


def test_it_continues_from_a_test_and_from_other_first_weights(finished, tmp_path, monkeypatch):
    """A checkpoint between two tests; the first weights come from it, not from the model."""
    run, _ = finished
    calls = iter(range(100))
    with pytest.raises(InterruptedRunError):
        stopped(tmp_path / "run", lambda: next(calls) == 5)  # right after the test of block 1
    real = data_of("dpsgd").model

    class Other:
        model, train = staticmethod(lambda: real(seed=5)), data_of("dpsgd").train

    monkeypatch.setattr("tests.runs.test_blocks.data_of", lambda name: Other)
    resumed = fit(out=tmp_path / "run", resume=True)
    assert torch.equal(weights(run), weights(resumed))


def stopped(folder, stop_requested):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "dpsur.runs.fit.execute",
            lambda session, **more: execute(session, **more, stop_requested=stop_requested),
        )
        fit(out=folder)


@pytest.mark.parametrize("accounting", ["proven", "every-trial"])
@pytest.mark.parametrize("name", ["dpsur", "dpsgd-ts", "dpsgd-hf"])
def test_other_methods(name, accounting, tmp_path):
    run = fit(name, accounting, out=tmp_path / "run", options={"optimizer": "adam"})
    assert verify(tmp_path / "run")[0] == []
    assert run.epsilon[accounting.replace("-", "_")] <= 3


class Seen:
    """Keeps what tests released while the run went on."""

    def __init__(self):
        self.rows = []

    def started(self, plan, progress): ...

    def trials(self, progress, verdicts): ...

    def evaluated(self, progress, scores, epsilon): ...

    def measured(self, progress, rows):
        self.rows += rows


MEASURED = {"metrics_budget": 0.05, "updates": 24, "noise_multiplier": None}


@pytest.mark.parametrize("gate", ["none", "block"])
def test_training_loss_and_accuracy_are_paid_for(gate, tmp_path):
    options = {**MEASURED, "gate": gate, "val_noise_multiplier": None}
    if gate == "none":
        options |= {"blocks": None, "block_updates": None}
    seen = Seen()
    run = fit(out=tmp_path / "run", options=options, observers=[seen])
    assert run.epsilon["proven"] <= 3
    assert verify(tmp_path / "run")[0] == []
    rows = run.statement["metrics"]
    assert seen.rows == rows
    found = {row["quantity"] for row in rows}
    assert {"training accuracy", "training Brier score"} <= found
    assert all(row["standard_error"] > 0 for row in rows if row["scale"])
    page = (tmp_path / "run" / "release" / "PRIVACY.md").read_text()
    assert "training accuracy" in page
    if gate == "none":
        assert len(rows) == 20
        assert run.plan.updates == 24
        assert "they measure training accuracy and the Brier score" in page
        shorter = run.plan.limited(9)
        assert shorter.blocks == (2, 2, 3, 2)
    for stop in (5, 20):
        folder = tmp_path / f"stopped-{stop}"
        with pytest.raises(KeyboardInterrupt):
            fit(out=folder, observers=[StopAt(stop)], options=options)
        resumed = fit(out=folder, resume=True, options=options)
        assert torch.equal(weights(run), weights(resumed))
        assert resumed.statement["metrics"] == rows


@pytest.mark.slow
def test_metrics_are_what_they_say(tmp_path):
    """With little noise they are accuracy and loss of the training records."""
    options = {
        **MEASURED,
        "gate": "none",
        "blocks": None,
        "block_updates": None,
        "val_noise_multiplier": None,
    }
    options["average_decay"] = None
    budget = dpsur.Budget(400.0, 1e-3)
    run = fit(budget=budget, options={**options, "metrics_noise_multiplier": 0.4})
    data = data_of("dpsgd")
    inputs, targets = data.train().inputs, data.train().targets
    with torch.no_grad():
        outputs = run.model(inputs)
    (right, loss) = run.statement["metrics"][-2:]
    exact = float((outputs.argmax(1) == targets).double().mean())
    assert abs(right["value"] - exact) < 5 * right["standard_error"]
    mean = float(torch.nn.functional.cross_entropy(outputs, targets))
    assert abs(loss["value"] - mean) < 5 * loss["standard_error"]


def test_a_run_that_stops_early_keeps_the_whole_epsilon(tmp_path):
    """A rate next to nothing improves nothing, so that the run stops; epsilon is the plan's."""
    options = {
        **MEASURED,
        "gate": "none",
        "blocks": None,
        "block_updates": None,
        "val_noise_multiplier": None,
    }
    options |= {"patience": 2, "learning_rate": 1e-9, "metrics_noise_multiplier": 30.0}
    run = fit(out=tmp_path / "run", options=options)
    assert run.private.ledger.updates == sum(run.plan.blocks[:3]) < run.plan.updates == 24
    assert run.statement["accepted_updates"] == run.private.ledger.updates
    assert run.epsilon["proven"] == run.plan.epsilon() > run.plan.spent(run.private.ledger)
    assert run.statement["guarantee"]["epsilon"] == run.plan.epsilon()
    assert verify(tmp_path / "run")[0] == []
    assert len(run.statement["metrics"]) == 6
    # a part of a run is released only right after a test, and only if the plan says that it may be
    assert replays(run.plan, run.private.ledger)
    assert not replays(replace(run.plan, may_stop=False), run.private.ledger)
    one_more = run.private.ledger.record(run.plan.typical, updates=1)
    assert not replays(run.plan, one_more)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patience": 2}, "patience 2 watches the Brier score"),
        ({"test_error": 0.1, "val_noise_multiplier": 3.0}, "test_error 0.1 sets the noise of te"),
        ({"gate": "loss"}, "metrics_budget 0.05 needs the gate none or block"),
        ({"metrics_budget": 0.0}, "metrics_budget must be"),
        ({"metrics_noise_multiplier": 2.0}, "metrics_noise_multiplier 2 is for the gate none"),
        (
            {"metrics_budget": None, "metrics_noise_multiplier": 2.0},
            "metrics_noise_multiplier 2 has no meaning without metrics_budget",
        ),
    ],
)
def test_metrics_that_are_not_paid_for_are_refused(options, message):
    with pytest.raises(InvalidInputError, match=message):
        dpsur.Dpsgd(**{"gate": "block", "metrics_budget": 0.05, **options})


STEERED = {"noise_multiplier": None, "refresh_every": 2, "norm_noise_multiplier": 9.0, "blocks": 2}


def test_importance_sampling_in_blocks(tmp_path):
    options = {**STEERED, "optimizer": "adam"}
    run = fit("dpis", out=tmp_path / "run", options=options)
    assert run.plan.tests
    assert run.plan.blocks == (0, 0, 3, 3, 4)
    assert verify(tmp_path / "run")[0] == []
    assert "None" not in (tmp_path / "run" / "release" / "PRIVACY.md").read_text()
    for stop in (1, 8):
        folder = tmp_path / f"stopped-{stop}"
        with pytest.raises(KeyboardInterrupt):
            fit("dpis", out=folder, observers=[StopAt(stop)], options=options)
        resumed = fit("dpis", out=folder, resume=True, options=options)
        assert torch.equal(weights(run), weights(resumed))
        assert run.private.ledger == resumed.private.ledger


def test_a_sampled_test_and_a_given_clip_norm(tmp_path):
    more = {"val_batch_size": 30, "clip_norm": "given"}
    run = fit(out=tmp_path / "run", options=more)
    assert verify(tmp_path / "run")[0] == []
    errors = [row["standard_error"] for row in run.statement["metrics"]]
    assert min(error for error in errors if error is not None) > 20 / 30
    assert (
        "sample rate 0.5, noise multiplier 20"
        in (tmp_path / "run" / "release" / "PRIVACY.md").read_text()
    )


def test_it_can_be_ended_early(tmp_path):
    run = fit(out=tmp_path / "run", max_updates=14)
    assert run.plan.blocks == (0, 0, 3, 3, 3, 3, 2)
    assert run.statement["settings"]["updates"] == 2
    assert verify(tmp_path / "run")[0] == []
    with pytest.raises(InvalidInputError, match="max_updates 12 ends the run before its last bl"):
        fit(max_updates=12)


def one_update_less(statement):
    statement["mechanism"]["blocks"]["steps"][-2]["charged"] -= 1


def one_test_less(statement):
    statement["mechanism"]["blocks"]["steps"].pop()


def a_shorter_block(statement):
    statement["mechanism"]["blocks"]["updates"][3] = 1


def more_noise_in_tests(statement):
    statement["mechanism"]["blocks"]["test"]["noise_multiplier"] *= 2


def updates_with_more_noise(statement):
    statement["mechanism"]["trial"]["update"]["noise_multiplier"] *= 2


def no_blocks(statement):
    del statement["mechanism"]["blocks"]


def another_gate(statement):
    statement["settings"]["gate"] = "none"


def a_test_without_metrics(statement):
    rows = statement["metrics"]
    statement["metrics"] = [row for row in rows if row["test"] != rows[-1]["test"]]


def no_metrics(statement):
    del statement["metrics"]


def a_smaller_error(statement):
    statement["metrics"][2]["standard_error"] /= 2


def as_it_is(statement):
    """The control: the same procedure without an edit."""


EDITS = [
    one_update_less, one_test_less, a_shorter_block, more_noise_in_tests,
    updates_with_more_noise, no_blocks, another_gate, a_test_without_metrics, no_metrics,
    a_smaller_error, as_it_is,
]  # fmt: skip


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_an_edited_statement_does_not_verify(edit, finished, tmp_path):
    release = tmp_path / "release"
    shutil.copytree(finished[1] / "release", release)
    statement = json.loads((release / "privacy.json").read_text())
    edit(statement)
    (release / "privacy.json").write_text(json.dumps(statement))
    (release / "PRIVACY.md").write_text(render_markdown(statement))
    (release / "README.md").write_text(render_model_card(statement))
    assert bool(verify(release)[0]) == (edit is not as_it_is)


# --- commands -----------------------------------------------------------------------------------

SIZES = ["--dataset-size", "6000", "--batch-size", "200", "--delta", "1e-5"]


def test_what_calibrate_prints_account_confirms(capsys):
    given = [
        "--updates",
        "60",
        "--blocks",
        "4",
        "--block-updates",
        "10",
        "--epsilon",
        "2",
        "--json",
    ]
    assert main(["calibrate", *SIZES, *given]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tests"] == 7
    noise = ["--noise-multiplier", str(found["noise_multiplier"])]
    test = ["--val-noise-multiplier", str(found["val_noise_multiplier"])]
    sizes = ["--block-sizes", "0,0,10,10,10,10,60", "--json"]
    assert main(["account", *SIZES, *noise, *test, *sizes]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["proven"] == pytest.approx(found["epsilon"]) == figures["every_trial"]
    assert figures["published"] is None
    assert 1.99 < found["epsilon"] <= 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--block-sizes", "0,x"], "--block-sizes must be whole numbers with commas, got '0,x'"),
        (["--block-sizes", "0,-1"], "blocks must be whole numbers of updates"),
        (["--block-sizes", "0,5", "--updates", "3"], "--updates has no meaning with --block-sizes"),
    ],
)
def test_odd_blocks_are_refused(given, message, capsys):
    more = ["--noise-multiplier", "4", "--val-noise-multiplier", "9"]
    assert main(["account", *SIZES, *more, *given]) == 2
    assert message in capsys.readouterr().err


def test_calibrate_takes_the_updates_of_the_method_where_none_are_given(capsys):
    words = ["calibrate", *SIZES, "--blocks", "4", "--epsilon", "2", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    method = dpsur.Dpsgd(gate="block", batch_size=200, blocks=4)
    settled, _ = method.resolve(6000, dpsur.Budget(2.0, 1e-5), "proven")
    assert found["updates"] == settled.updates
