"""What observers pass on to trackers: public figures, unless told otherwise."""

import logging

import torch
from torch import nn

import dpsur


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


def run(*observers):
    torch.manual_seed(0)
    x, y = torch.randn(80, 4), torch.randint(0, 2, (80,))
    return dpsur.fit(
        nn.Linear(4, 2),
        (x, y),
        test_set=(x[:20], y[:20]),
        budget=dpsur.Budget(epsilon=5.0, delta=1e-3),
        method=dpsur.Dpsur(),
        max_updates=4,
        intervals=dpsur.Intervals(evaluate_every=2),
        observers=observers,
        seed=0,
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
