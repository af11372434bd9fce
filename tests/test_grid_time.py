"""The script that estimates how long the grids take."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.nn.functional as F

from dpsur.experiments.rows import read_rows
from dpsur.experiments.training import TrainingCell
from dpsur.methods import Dpsgd
from dpsur.privacy.budget import Budget
from dpsur.runs.prepare import prepare
from tests.conftest import blobs, small_model

ROOT = Path(__file__).parent.parent


@pytest.fixture
def grid_time():
    spec = importlib.util.spec_from_file_location("grid_time", ROOT / "benchmarks/grid_time.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_run_that_was_made_is_of_one_kind(grid_time):
    rows = [row for name in grid_time.GRIDS for row in read_rows(ROOT / f"results/{name}.jsonl")]
    copies = [row for row in rows if "copied_from" in row]
    kinds = grid_time.kinds([])
    assert sum(map(len, kinds.values())) == len(rows) - len(copies)
    assert copies
    assert {kind[0] for kind in grid_time.kinds(["imdb"])} == {"imdb"}


def test_what_a_part_of_a_run_took_is_multiplied_by_what_the_rows_count(grid_time, monkeypatch):
    data = blobs(200)
    session = prepare(
        small_model(),
        (data.inputs, data.targets),
        loss=F.cross_entropy,
        budget=Budget(3.0, 1e-4),
        method=Dpsgd(updates=40, batch_size=20),
        test_set=None,
        accounting="proven",
        device="cpu",
        seed=0,
    )
    monkeypatch.setattr(grid_time, "MOST_TRIALS", 10)
    monkeypatch.setattr(grid_time, "MOST_SECONDS", 100.0)
    monkeypatch.setattr(grid_time, "loaded_records", lambda *_: None)
    monkeypatch.setattr(grid_time, "task_run", lambda *_: None)
    monkeypatch.setattr(grid_time, "prepare_task", lambda *_: (session,))
    ticks = iter(range(1000))
    monkeypatch.setattr(grid_time, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    config = TrainingCell("fmnist", "dpsgd", 3, 0).config()
    found = grid_time.timed(
        [{"config": config, "trials": 100}, {"config": config, "trials": 50}], "cpu"
    )
    assert found["trials_timed"] == 10  # it did not run to its end
    # a tick for the start with its first trial; then ten trials, a tick each
    assert found["seconds"] == 2 * 1 + (150 - 2) * 1
