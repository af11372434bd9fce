"""Curves against the budget spent: made by real runs, averaged over seeds, drawn in part."""

from dataclasses import replace

import pytest
import torch

from dpsur.functional.records import Examples
from dpsur.tasks import TASKS
from reproduction import training
from reproduction.base import Options
from reproduction.experiments import convergence
from tests.reproduction.made_up import check_every_part_renders, made_up

EXPERIMENT = convergence.EXPERIMENT


def curve(seed, end=2.9):
    """Accuracy grows evenly with epsilon, and begins later for later seeds."""
    start = 0.4 + 0.1 * seed
    epsilons = [start + (end - start) * k / 39 for k in range(40)]
    return {
        "updates": list(range(10, 410, 10)),
        "epsilon": epsilons,
        "loss": [1 - 0.1 * e for e in epsilons],
        "accuracy": [0.6 + 0.1 * e + 0.01 * (seed - 1) for e in epsilons],
    }


def rows():
    found = made_up(EXPERIMENT, lambda *_: 0.88)
    return [{**row, "curve": curve(row["seed"])} for row in found]


def test_a_curve_is_asked_for_in_the_key_of_a_row():
    cells = list(EXPERIMENT.cells(Options()))
    assert {cell["config"]["evaluations"] for cell in cells} == {convergence.POINTS}
    assert {cell["config"]["arm"] for cell in cells} == set(convergence.LOOKS)
    assert "evaluations" not in training.TrainingCell("fmnist", "proven", 3, 0).config()


def test_curves_are_averaged_at_equal_epsilon():
    records = convergence.records(rows())
    assert len(records) == 4 * 6  # five marks and the end
    for record in records:
        assert record["accuracy"] == pytest.approx(60 + 10 * record["epsilon"])
        assert record["spread"] == pytest.approx(1.0)
        assert record["loss"] == pytest.approx(1 - 0.1 * record["epsilon"])
    assert max(record["epsilon"] for record in records) == pytest.approx(2.9)
    assert convergence.shared_range([curve(0), curve(2, end=2.5)]) == pytest.approx((0.6, 2.5))


def test_a_part_of_the_rows_is_rendered(tmp_path):
    check_every_part_renders(EXPERIMENT, rows(), tmp_path)


@pytest.mark.filterwarnings("ignore::dpsur.errors.PrivacyWarning")
@pytest.mark.parametrize("arm", ["dpsgd-hf", "proven", "released-code"])
def test_a_run_keeps_its_curve(monkeypatch, tmp_path, arm):
    """A tiny cell, trained for real."""
    monkeypatch.setenv("DPSUR_CACHE", str(tmp_path / "cache"))
    generator = torch.Generator().manual_seed(0)
    records = Examples(torch.rand(60, 1, 28, 28, generator=generator), torch.arange(60) % 10)
    small = replace(TASKS["fmnist"], load=lambda _: (records, records.select(torch.arange(20))))
    monkeypatch.setitem(TASKS, "fmnist", small)
    training.loaded_records.cache_clear()
    changes = {"batch_size": 10, "noise_multiplier": 20.0, "updates": 6}
    if arm != "dpsgd-hf":
        changes |= {"val_batch_size": 10, "val_noise_multiplier": 20.0}
    cell = training.TrainingCell("fmnist", arm, 3, 0, changes, evaluations=3)
    row = dict(training.trained_rows(cell.config(), [0], "cpu"))[0]
    training.loaded_records.cache_clear()
    found = row["curve"]
    assert found.keys() == set(training.CURVE)
    extra = [7] if arm == "released-code" else []  # it goes one update too far
    assert found["updates"] == [2, 4, 6, *extra]
    assert found["epsilon"] == sorted(found["epsilon"])
    assert found["accuracy"][-1] == pytest.approx(row["accuracy"])
    spent = row["epsilon"][cell.config()["accounting"]]
    assert found["epsilon"][-1] == pytest.approx(spent, rel=1e-4)
