"""What observers pass on to trackers: public figures, unless told otherwise."""

import logging
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import dpsur
from dpsur.cli import main


class Recorded:
    """Stands for wandb, a SummaryWriter and mlflow, whose methods are called alike."""

    def __init__(self):
        self.rows = []

    def log(self, figures, step):
        self.rows.append((step, figures))

    def log_metrics(self, figures, step):
        self.rows.append((step, figures))

    def add_scalar(self, name, value, step):
        self.rows.append((step, {name: value}))


def run(*observers, **given):
    torch.manual_seed(0)
    x, y = torch.randn(80, 4), torch.randint(0, 2, (80,))
    return dpsur.fit(
        nn.Linear(4, 2),
        (x, y),
        test_set=(x[:20], y[:20]),
        budget=dpsur.Budget(epsilon=5.0, delta=1e-3),
        method=given.pop("method", dpsur.Dpsur()),
        max_updates=4,
        intervals=dpsur.Intervals(evaluate_every=2),
        observers=observers,
        seed=0,
        **given,
    )


def test_trackers_get_public_figures_only():
    trackers = [Recorded() for _ in range(3)]
    kinds = (dpsur.Tracker.wandb, dpsur.Tracker.tensorboard, dpsur.Tracker.mlflow)
    run(*(kind(tracker) for kind, tracker in zip(kinds, trackers, strict=True)))
    for tracker in trackers:
        check_public(tracker)


def check_public(tracker):
    names = {name for _, figures in tracker.rows for name in figures}
    scores = {"loss", "accuracy", "base_rate", "auc", "log_loss", "constant_log_loss"}
    assert names == {"epsilon", *(f"test/{name}" for name in (*scores, "calibration_error"))}
    assert {step for step, _ in tracker.rows} <= {0, 2, 4}
    assert any(figures.get("epsilon", 0) > 0 for _, figures in tracker.rows)


def test_private_figures_only_when_asked_for():
    tracker = Recorded()
    run(dpsur.Tracker.wandb(tracker, private=True))
    names = {name for _, figures in tracker.rows for name in figures}
    assert {"private/rejections", "private/seconds_per_trial"} < names


def test_the_standard_logging(caplog):
    with caplog.at_level(logging.INFO, "dpsur.progress"):
        run(dpsur.Tracker.logging())
    assert any("update 4: epsilon" in text for text in caplog.messages)
    assert not any("private" in text for text in caplog.messages)


def test_the_bar_shows_updates_epsilon_rate_and_time_left(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    with dpsur.ProgressBar() as bar:
        run(bar)
    shown = capsys.readouterr().err
    assert "4/4" in shown
    assert "/s" in shown
    assert "epsilon" in shown


class Wandb(Recorded):
    """Stands for the package wandb, and for the run that it opens."""

    def __init__(self):
        super().__init__()
        self.finished, self.settings, self.config = False, None, None

    def Settings(self, **settings):  # noqa: N802
        return settings

    def init(self, *, project, name, config, settings):
        self.settings, self.config = settings, config
        return self

    def finish(self):
        self.finished = True


class Mlflow(Recorded):
    """Stands for the package mlflow."""

    def start_run(self, run_name):
        self.name = run_name

    def log_params(self, params):
        self.config = params

    def end_run(self):
        self.finished = True


NOTED = {"method", "budget_epsilon", "delta", "accounting"}


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_track_logs_what_is_released_and_nothing_else(name, monkeypatch):
    package = {"wandb": Wandb, "mlflow": Mlflow}[name]()
    monkeypatch.setitem(sys.modules, name, package)
    run(track=name, method=dpsur.Dpsgd())
    check_public(package)
    assert set(package.config) == NOTED
    assert package.finished
    if name == "wandb":
        assert package.settings["console"] == "off"


def test_track_on_the_command_line(monkeypatch, tmp_path, capsys):
    package = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", package)
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    labels = np.arange(60) % 2
    np.savez(tmp_path / "own.npz", x=x, y=labels, x_test=x, y_test=labels, classes=2)
    words = ["train", "--task", f"npz:{tmp_path / 'own.npz'}", "--delta", "1e-3", "--max-updates"]
    words += ["3", "--out", str(tmp_path / "run"), "--quiet"]
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert main([*words, "--track", "mlflow"]) == 2
    printed = capsys.readouterr().err
    assert "needs the package mlflow; run: pip install mlflow" in printed
    assert printed.count("\n") == 1
    assert main([*words, "--track", "wandb"]) == 0
    assert package.rows
    names = {name for _, figures in package.rows for name in figures}
    assert {name.partition("/")[0] for name in names} <= {"epsilon", "test", "paid"}


def test_track_is_refused_where_its_times_tell_of_rejections(monkeypatch):
    package = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", package)
    with pytest.raises(dpsur.InvalidInputError, match="notes the time of every figure"):
        run(track="wandb", method=dpsur.Dpsur(gate="loss"))
    assert package.config is None
    with pytest.raises(dpsur.InvalidInputError, match="track must be one of tensorboard"):
        run(track="tensorbord")


def test_paid_values_are_passed_on():
    recorded = Recorded()
    tracker = dpsur.Tracker.wandb(recorded)
    progress = SimpleNamespace(ledger=SimpleNamespace(updates=7))
    tracker.measured(progress, [{"quantity": "training accuracy", "value": 0.75}])
    assert recorded.rows == [(7, {"paid/training_accuracy": 0.75})]


def test_tensorboard_writes_into_the_folder_of_the_run(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(track="tensorboard", method=dpsur.Dpsgd(), out=tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {name.partition("/")[0] for name in tags} == {"epsilon", "test"}
