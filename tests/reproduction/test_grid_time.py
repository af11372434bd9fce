"""The scripts that estimate how long the grids take."""

import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.nn.functional as F

from dpsur.config import RunConfig
from dpsur.methods import Dpsgd
from dpsur.privacy.budget import Budget
from dpsur.runs.session import build_session
from reproduction.bench import grid_part, grid_time
from reproduction.rows import read_rows
from reproduction.training import TrainingCell
from tests.conftest import blobs, small_model

ROOT = Path(__file__).parents[2]


def test_every_run_that_was_made_is_of_one_kind():
    rows = [row for name in grid_time.GRIDS for row in read_rows(ROOT / f"results/{name}.jsonl")]
    copies = [row for row in rows if "copied_from" in row]
    kinds = grid_time.kinds()
    assert sum(map(len, kinds.values())) == len(rows) - len(copies)
    assert copies
    assert {kind[0] for kind in grid_time.kinds(["imdb"])} == {"imdb"}


def test_what_a_part_of_a_run_took_is_multiplied_by_what_the_rows_count(monkeypatch):
    data = blobs(200)
    config = RunConfig(
        task=None,
        budget=Budget(3.0, 1e-4),
        method=Dpsgd(updates=40, batch_size=20),
        device="cpu",
        seed=0,
    )
    session = build_session(
        config, small_model(), (data.inputs, data.targets), loss=F.cross_entropy
    )
    monkeypatch.setattr(grid_time, "WARM_UP", 3)
    monkeypatch.setattr(grid_time, "MOST_TRIALS", 10)
    monkeypatch.setattr(grid_time, "MOST_SECONDS", 100.0)
    monkeypatch.setattr(grid_time, "loaded_records", lambda *_: None)
    monkeypatch.setattr(grid_time, "task_run", lambda *_: None)
    monkeypatch.setattr(grid_time, "build_task_session", lambda *_: session)
    ticks = iter(range(1000))
    monkeypatch.setattr(grid_time, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    config = TrainingCell("fmnist", "dpsgd", 3, 0).config()
    found = grid_time.timed(
        [{"config": config, "trials": 100}, {"config": config, "trials": 50}], "cpu"
    )
    assert found["trials_timed"] == 10  # it did not run to its end
    # three ticks for the start with its first three trials; then ten trials, a tick each
    assert found["seconds"] == 2 * 3 + (150 - 2 * 3) * 1
    assert found["config"] == {
        "task": "fmnist", "features": "pixels", "method": "dpsgd", "tf32": False, "batch_size": 2048
    }  # fmt: skip


def test_parts_make_up_the_grid_and_are_taken_from_both_ends():
    everything = grid_part.groups([])
    assert sum(map(len, everything)) == sum(map(len, grid_time.kinds().values()))
    for rows in everything:
        assert len({row["seed"] for row in rows}) == len(rows)
        assert all(row["config"] == rows[0]["config"] for row in rows)
    one, two = (multiprocessing.Value("i", 0) for _ in range(2))
    ends = [0, 1, 1, 0, 1, 0, 1]
    found = [grid_part._next(end, 5, [one, two]) for end in ends]
    assert found == [0, 4, 3, 1, 2, None, None]


def test_records_with_most_work_come_first():
    def group(task, trials):
        return [{"config": TrainingCell(task, "dpsgd", 3, 0).config(), "trials": trials}]

    a, b, c = group("fmnist", 50), group("mnist", 100), group("fmnist", 90)
    known = {"seconds": 70.0, "runs": 10, "trials": 100, "seconds_a_trial": 0.5}
    times = {grid_part.kind_of(rows[0]["config"]): known for rows in (a, b)}
    assert grid_part.in_turn([b, a, c], times) == [c, a, b]
    assert grid_part.seconds_alone([*a, *c], times) == 2 * 2 + 140 * 0.5
    with pytest.raises(SystemExit, match="make it with grid_time.py first"):
        grid_part.seconds_alone(a, {})


def test_the_whole_follows_from_a_part_and_records_are_loaded_once():
    config = TrainingCell("fmnist", "dpsgd", 3, 0).config()
    everything = [[{"config": config, "trials": 100}] for _ in range(8)]
    known = {"seconds": 88.0, "runs": 8, "trials": 800, "seconds_a_trial": 0.1}
    times = {grid_part.kind_of(config): known}
    found = [{"loading": 6.0, "moved": [1.0]}, {"loading": 0.0, "moved": [-2.0, 0.5]}]
    row = grid_part.summary(everything, everything[:2], found, times, 13.0, jobs=2)
    assert row["share"] == 0.25
    assert row["seconds_loading"] == 3.0  # a process is held up for so long
    assert row["minutes_of_all"] == pytest.approx((3 + 10 * 4) / 60)
    assert row["points_moved"] == [-2.0, 0.5, 1.0]
