"""`python -m reproduction data` as a person meets it."""

import json
from dataclasses import replace

import numpy as np
from torch import nn

from dpsur.cli import evaluate
from dpsur.cli import main as dpsur
from dpsur.runs.release import Origin
from reproduction.command import main
from reproduction.datasets import command as data
from tests.reproduction.datasets.server import serve
from tests.reproduction.datasets.test_fetch import NOWHERE, mirror, publish


def command(*arguments, capsys, main=main):
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_help_is_readable(capsys):
    for arguments in ([], ["fetch"], ["list"]):
        status, out, _ = command("data", *arguments, "--help", capsys=capsys)
        assert status == 0
        assert "None" not in out
        assert max(map(len, out.splitlines())) <= 110


def test_list_shows_every_data_set_and_what_to_do(capsys, tmp_path):
    status, out, _ = command("data", "list", "--data-dir", tmp_path, capsys=capsys)
    assert status == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        "mnist-5k", "mnist", "fmnist", "cifar10", "imdb",
    ]  # fmt: skip
    assert lines[1].split()[1] == "ready"
    assert f"run: python -m reproduction data fetch cifar10 --data-dir {tmp_path}" in lines[4]
    rows = json.loads(command("data", "list", "--json", capsys=capsys)[1])
    assert rows["imdb"] == {
        "state": "missing",
        "where": None,
        "remedy": "run: python -m reproduction data fetch imdb",
        "train_records": 25_000,
        "test_records": 25_000,
    }


def test_fetch_then_list(capsys, digits, tmp_path, monkeypatch):
    with serve() as site:
        publish(site, digits.packed())
        sources = (
            mirror("nobody", NOWHERE, digits.packed()),
            mirror("somebody", f"{site.address}/good", digits.packed()),
        )
        known = {"mnist": replace(digits.data_set, sources=sources)}
        monkeypatch.setattr(data, "DATA_SETS", known)
        status, out, err = command("data", "fetch", "all", capsys=capsys)
    assert status == 0
    folder = tmp_path / "cache" / "downloads" / "mnist"
    assert out == f"mnist: {folder}\n"
    assert "trying nobody" in err
    assert "trying somebody" in err
    out = command("data", "list", "--check", capsys=capsys)[1]
    assert out.splitlines()[2].split()[:2] == ["mnist", "ready"]


def test_fetch_says_what_to_do_when_nobody_answers(capsys, digits, tmp_path, monkeypatch):
    sources = (mirror("nobody", NOWHERE, digits.packed()),)
    known = {"mnist": replace(digits.data_set, sources=sources)}
    monkeypatch.setattr(data, "DATA_SETS", known)
    status, out, err = command("data", "fetch", "mnist", "--quiet", capsys=capsys)
    assert status == 2
    assert out == ""
    assert "no source gave the data of mnist" in err
    assert "by hand: put the four files" in err


def test_unknown_names_are_refused_before_anything_is_fetched(capsys):
    status, _, err = command("data", "fetch", "mnist", "minst", capsys=capsys)
    assert status == 2
    assert "'minst'" in err
    assert "fmnist" in err


def test_a_bar_counts_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with data.TransferBar(quiet=False) as bar:
        bar.say("trying [somebody]")
        bar.report("a.bin", 10, None)
        bar.report("a.bin", 50, 100)
        (task,) = bar._bar.tasks
        assert (task.completed, task.total) == (50, 100)


def test_a_task_without_its_data_says_how_to_get_them(capsys, tmp_path):
    run = tmp_path / "run"
    status, _, err = command("train", "--task", "mnist", "--out", run, capsys=capsys, main=dpsur)
    assert status == 2
    assert "python -m reproduction data fetch mnist" in err
    assert not run.exists()


def test_records_without_test_records_cannot_be_tested_on(capsys, tmp_path, monkeypatch):
    path = tmp_path / "own.npz"
    np.savez(path, x=np.zeros((4, 2)), y=np.arange(4))
    release = (nn.Linear(2, 4), {"public": {}}, Origin())
    monkeypatch.setattr(evaluate, "read_release", lambda folder: release)
    monkeypatch.setattr(evaluate, "statement_faults", lambda statement: ([], {}))
    asked = "evaluate", tmp_path, "--task", f"npz:{path}"
    status, _, err = command(*asked, capsys=capsys, main=dpsur)
    assert status == 2
    assert "add x_test and y_test" in err
