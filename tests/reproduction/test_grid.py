"""Grids of trained runs: shares, limits, tables and the rows that real runs make."""

import argparse
import json
import shutil
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from dpsur.errors import DpsurError, InvalidInputError
from dpsur.functional.records import Examples
from dpsur.tasks import TASKS
from reproduction import command as command_module
from reproduction import training
from reproduction.base import Options
from reproduction.experiments import accuracy, tuning
from reproduction.registry import experiment_named
from reproduction.runner import fill
from tests.reproduction.test_command import reproduce
from tests.reproduction.test_registered import RESULTS

LIMITS = ("--tasks", "fmnist", "--arms", "published", "dpsgd-hf", "--epsilons", "1", "3")
ASKED = Options(tasks=("fmnist",), arms=("published", "dpsgd-hf"), epsilons=(1, 3))


def made_up_rows(config, seeds, device):
    """Rows as runs would make them, without the runs."""
    for seed in seeds:
        yield (
            seed,
            {
                "accuracy": 0.8 + seed / 100,
                "loss": 0.5,
                "updates": 10,
                "trials": 20,
                "epsilon": {"proven": 2.0, "published": 1.0},
                "seconds": 0.1,
                "device": device or "cpu",
            },
        )


@pytest.fixture
def no_training(monkeypatch):
    monkeypatch.setattr(training, "trained_rows", made_up_rows)


def keys(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [accuracy.EXPERIMENT.key(row) for row in rows]


def test_shards_make_the_grid_once(no_training, tmp_path, capsys):
    """Each starts from what the ones before it have left, as processes do that start later."""
    wanted = [accuracy.EXPERIMENT.key(cell) for cell in accuracy.EXPERIMENT.cells(ASKED)]
    path = tmp_path / "results" / "accuracy.jsonl"
    made = []
    for part in (1, 0, 2):
        status, out, _ = reproduce(
            "accuracy", *LIMITS, "--shard", f"{part}/3", folder=tmp_path, capsys=capsys
        )
        assert status == 0
        count = int(out.split(" rows, ")[1].split(" of them new")[0])
        made.append(count)
    assert min(made) > 0
    assert sum(made) == len(wanted) == 4 * 5
    found = keys(path)
    assert len(found) == len(set(found))  # no cell was made twice
    assert set(found) == set(wanted)
    status, out, _ = reproduce("accuracy", *LIMITS, folder=tmp_path, capsys=capsys)
    assert "0 of them new" in out
    assert "without one" not in out


def test_a_shard_that_goes_on_keeps_to_its_share(no_training, tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    options = replace(ASKED, shard=(0, 2))
    assert fill(accuracy.EXPERIMENT, whole, options) > 0
    lines = (whole / "accuracy.jsonl").read_text().splitlines()
    resumed.mkdir()
    (resumed / "accuracy.jsonl").write_text(lines[0] + "\n")
    assert fill(accuracy.EXPERIMENT, resumed, options) == len(lines) - 1
    assert set(keys(resumed / "accuracy.jsonl")) == set(keys(whole / "accuracy.jsonl"))


def test_processes_of_a_machine_share_a_grid(tmp_path, capfd):
    """They are started and end well; there is nothing left to make, so that they take seconds."""
    (tmp_path / "results").mkdir()
    shutil.copy(RESULTS / "convergence.jsonl", tmp_path / "results")
    status, out, err = reproduce("convergence", "--jobs", "2", folder=tmp_path, capsys=capfd)
    assert (status, err) == (0, "")
    assert out.count("convergence: 12 rows, 0 of them new") == 1
    assert (tmp_path / "docs" / "tables" / "convergence.md").exists()


def test_every_process_gets_a_part_of_the_same_command(monkeypatch, tmp_path, capsys):
    asked = []
    monkeypatch.setattr(
        command_module.subprocess, "Popen", lambda command, env: started(command, env, asked)
    )
    limits = (*LIMITS, "--seeds", "0-1", "--device", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    status, _, err = reproduce("accuracy", "--jobs", "3", *limits, folder=tmp_path, capsys=capsys)
    assert status == 2  # no process made a row, and there is nothing to render
    assert "rows of accuracy are missing" in err
    commands, environments = zip(*asked, strict=True)
    assert [command[-1] for command in commands] == ["0/3", "1/3", "2/3"]
    assert all(environment["OMP_NUM_THREADS"] == "7" for environment in environments)
    assert len({command[-3] for command in commands}) == 1  # all note their claims in one folder
    for command in commands:
        options = parsed(command[3:])
        assert options.names == ["accuracy"]
        assert options.rows_only
        assert options.results == str(tmp_path / "results")
        assert (options.seeds, options.device) == ((0, 1), "cpu")
        assert (options.tasks, options.epsilons) == (["fmnist"], [1.0, 3.0])
        assert options.arms == ["published", "dpsgd-hf"]
    asked.clear()
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(command_module.os, "cpu_count", lambda: 16)
    with pytest.raises(DpsurError, match="1 of 3 processes failed"):
        command_module.run_parts(["fail"], 3)
    assert {environment["OMP_NUM_THREADS"] for _, environment in asked} == {"5"}


def test_processes_take_what_no_other_has_begun(no_training, tmp_path):
    """However many rows one makes before the other starts, each is made once."""
    claims = tmp_path / "claims"
    claims.mkdir()
    one, two = (replace(ASKED, shard=(part, 2), claims=claims) for part in range(2))
    wanted = [accuracy.EXPERIMENT.key(cell) for cell in accuracy.EXPERIMENT.cells(ASKED)]
    cells = list(accuracy.EXPERIMENT.cells(ASKED))
    first = accuracy.EXPERIMENT.make(cells, one)
    begun = [next(first)]
    others = list(accuracy.EXPERIMENT.make(cells, two))
    rest = list(first)
    assert len(others) > len(begun) + len(rest)  # who is done first takes more
    made = [accuracy.EXPERIMENT.key(row) for row in (*begun, *rest, *others)]
    assert len(made) == len(wanted)
    assert set(made) == set(wanted)


def test_processes_share_cells_that_are_measured_one_by_one(tmp_path, monkeypatch):
    """Persons of two processes were all measured twice, and each row written twice."""
    persons = experiment_named("persons")
    monkeypatch.setattr(type(persons), "measure", lambda *_: {})
    asked = Options(seeds=(0,), claims=tmp_path)
    cells = list(persons.cells(asked))
    runs = [persons.make(cells, replace(asked, shard=(part, 2))) for part in range(2)]
    made = [persons.key(row) for run in runs for row in islice(run, 9)]
    made += [persons.key(row) for run in runs for row in run]
    assert sorted(made) == sorted(persons.key(cell) for cell in cells)


def started(command, env, asked):
    """A process that has ended; one part of the command `fail` with an error."""
    asked.append((command, env))
    status = int("fail" in command and command[-1] == "1/3")
    return SimpleNamespace(wait=lambda: status, terminate=lambda: None)


def parsed(arguments):
    parser = argparse.ArgumentParser()
    command_module.set_up(parser)
    return parser.parse_args(arguments)


def test_an_experiment_that_is_not_shared_is_made_by_the_first_process(tmp_path):
    experiment = experiment_named("gate-density")
    assert fill(experiment, tmp_path, Options(shard=(1, 2))) == 0
    assert not (tmp_path / "gate-density.jsonl").exists()
    assert fill(experiment, tmp_path, Options(shard=(0, 2))) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--jobs", "2", "--shard", "0/2"), "give one of them"),
        (("--rows-only", "--render-only"), "--rows-only renders nothing"),
        (("--jobs", "0"), "is not a whole number from 1"),
    ],
)
def test_what_does_not_go_together_is_refused(given, message, tmp_path, capsys):
    status, _, err = reproduce("accuracy", *given, folder=tmp_path, capsys=capsys)
    assert status == 2
    assert message in err


@pytest.mark.parametrize("text", ["2/2", "a/b", "1", "-1/3", "0/0"])
def test_odd_shards_are_refused(text, tmp_path, capsys):
    status, _, err = reproduce("accuracy", f"--shard={text}", folder=tmp_path, capsys=capsys)
    assert status == 2
    assert "is not a part K/N with K from 0 to N - 1" in err


def test_limits_choose_cells():
    cells = list(accuracy.EXPERIMENT.cells(ASKED))
    assert {cell["config"]["task"] for cell in cells} == {"fmnist"}
    assert {cell["config"]["arm"] for cell in cells} == {"published", "dpsgd-hf"}
    assert {cell["config"]["epsilon"] for cell in cells} == {1, 3}
    assert not list(accuracy.EXPERIMENT.cells(Options(tasks=("nothing",))))


def test_the_grid_has_every_cell_of_the_paper():
    cells = list(accuracy.EXPERIMENT.cells(Options()))
    found = {(c["config"]["task"], c["config"]["arm"], c["config"]["epsilon"]) for c in cells}
    for (task, method, epsilon), _ in accuracy.paper_accuracy().items():
        if epsilon == 0 or not accuracy.applies(method, task):
            continue
        arm = "published" if method == "dpsur" else method
        assert (task, arm, epsilon) in found
    assert not any(arm == "dpsgd-hf" and task == "imdb" for task, arm, _ in found)
    assert {arm for task, arm, _ in found if arm == "nonprivate"} == {"nonprivate"}


def test_the_table_averages_over_seeds(no_training, tmp_path):
    fill(accuracy.EXPERIMENT, tmp_path, ASKED)
    rows = [json.loads(line) for line in (tmp_path / "accuracy.jsonl").read_text().splitlines()]
    records = accuracy.summary(rows)
    assert len(records) == 4
    one = next(r for r in records if r["arm"] == "published" and r["epsilon"] == 3)
    assert one["seeds"] == 5
    assert one["mean"] == pytest.approx(82.0)
    assert one["spread"] == pytest.approx(2.5**0.5)
    assert one["paper"] == accuracy.paper_accuracy()["fmnist", "dpsur", 3]
    assert one["difference"] == pytest.approx(one["mean"] - one["paper"])
    assert training.mean_and_spread([3.0]) == (3.0, 0.0)


def test_tuning_looks_at_held_out_records_only():
    cells = list(tuning.EXPERIMENT.cells(Options()))
    assert all(cell["config"]["hold_out"] > 0 for cell in cells)
    assert {cell["config"]["arm"] for cell in cells} == {
        "dpis",
        "dpagd",
        "best-dpsgd",
        "best-dpsur",
    }
    for cell in cells:
        tried = cell["config"]["tried"]
        assert tried.items() <= cell["config"]["options"].items()


def test_a_row_is_what_a_run_gives(monkeypatch, tmp_path):
    """Two seeds of a tiny cell, trained for real."""
    monkeypatch.setenv("DPSUR_CACHE", str(tmp_path / "cache"))
    generator = torch.Generator().manual_seed(0)
    records = Examples(torch.rand(60, 1, 28, 28, generator=generator), torch.arange(60) % 10)
    small = replace(TASKS["fmnist"], load=lambda _: (records, records.select(torch.arange(20))))
    monkeypatch.setitem(TASKS, "fmnist", small)
    training.loaded_records.cache_clear()
    changes = {"batch_size": 20, "noise_multiplier": 20.0, "updates": 2}
    cell = training.TrainingCell("fmnist", "dpsgd-hf", 3, 0, changes, hold_out=20)
    rows = dict(training.trained_rows(cell.config(), [0, 1], "cpu"))
    training.loaded_records.cache_clear()
    assert rows.keys() == {0, 1}
    for row in rows.values():
        assert row["updates"] == row["trials"] == 2
        assert 0 <= row["accuracy"] <= 1
        assert row["epsilon"]["proven"] <= 3
        assert row["device"] == "cpu"
    config = cell.config()
    assert config["tried"] == changes
    assert json.loads(json.dumps(config)) == config
    with pytest.raises(InvalidInputError):
        training.task_run({**config, "options": {"batch_size": 0}}, 0, "cpu")


def test_seeds_that_have_no_room_together_are_made_in_parts(monkeypatch):
    tried = []

    def made(config, seeds, device):
        tried.append(list(seeds))
        return None if len(seeds) > 2 else [(seed, {"accuracy": 0.5}) for seed in seeds]

    monkeypatch.setattr(training, "_made_together", made)
    monkeypatch.setattr(training.torch.cuda, "synchronize", lambda: None)
    rows = list(training.trained_rows({}, [3, 1, 4, 0, 5], "cpu"))
    assert tried == [[3, 1, 4, 0, 5], [3, 1], [4, 0, 5], [4], [0, 5]]
    assert [seed for seed, _ in rows] == [3, 1, 4, 0, 5]


@pytest.mark.parametrize("capturing", [True, False])
@pytest.mark.parametrize("seeds", [[0, 1], [0]])
def test_one_run_without_room_is_an_error(seeds, capturing, monkeypatch):
    def full(sessions):
        try:
            raise torch.OutOfMemoryError
        finally:
            if capturing:
                raise RuntimeError("a capture ended with an error")

    monkeypatch.setattr(training, "loaded_records", lambda *_: None)
    monkeypatch.setattr(training, "_session", lambda *_: None)
    monkeypatch.setattr(training, "run_together", full)
    config = training.TrainingCell("fmnist", "dpsgd", 3, 0).config()
    if len(seeds) > 1:
        assert training._made_together(config, seeds, "cpu") is None
    else:
        with pytest.raises(RuntimeError):
            training._made_together(config, seeds, "cpu")


def test_an_error_of_another_kind_is_not_hidden(monkeypatch):
    def broken(sessions):
        raise RuntimeError("something else")

    monkeypatch.setattr(training, "loaded_records", lambda *_: None)
    monkeypatch.setattr(training, "_session", lambda *_: None)
    monkeypatch.setattr(training, "run_together", broken)
    config = training.TrainingCell("fmnist", "dpsgd", 3, 0).config()
    with pytest.raises(RuntimeError, match="something else"):
        training._made_together(config, [0, 1], "cpu")


def test_every_other_process_begins_with_the_last_records(no_training, tmp_path):
    options = Options(tasks=("fmnist", "mnist", "cifar10"), arms=("published",))
    orders = []
    for part in range(3):
        folder = tmp_path / str(part)
        fill(accuracy.EXPERIMENT, folder, replace(options, shard=(part, 3)))
        lines = (folder / "accuracy.jsonl").read_text().splitlines()
        orders.append(list(dict.fromkeys(json.loads(line)["config"]["task"] for line in lines)))
    assert orders[0] == orders[2] == orders[1][::-1] == ["fmnist", "mnist", "cifar10"]


@pytest.mark.parametrize(
    ("shard", "kind", "expected"),
    [
        ((1, 4), "cuda", [(0.25, 3)]),
        ((0, 2), "cuda:1", [(0.5, 1)]),
        ((0, 1), "cuda", []),
        ((1, 4), "cpu", []),
    ],
)
def test_a_shard_takes_its_share_of_the_memory(monkeypatch, shard, kind, expected):
    taken = []
    monkeypatch.setattr(training, "choose_device", lambda _: torch.device(kind))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *given: taken.append(given)
    )
    training.limit_gpu_share(Options(shard=shard))
    assert taken == expected
