"""`dpsur cache` shows what is kept, and deletes that and nothing else."""

import json

import pytest
import torch

from dpsur.features import cache as features
from dpsur.privacy.accountants.selective.divergence import Interval
from dpsur.privacy.accountants.selective.store import Store
from tests.cli.test_commands import dpsur


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache with something in every part, and files of other people beside it."""
    monkeypatch.setenv("DPSUR_CACHE", str(tmp_path))
    store = Store((0.1, 1.0, 0.0, 1.0), tmp_path)
    store.put("add", Interval(1.0, 2.0))
    store.flush()
    inputs = torch.zeros(2, 1, 4, 4)
    features.write(features.path_for({"name": "none"}, inputs), inputs)
    for name in ("data/mnist/1/x.npy", "downloads/mnist/x.gz", "private/errors.log", *OTHERS):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"123")
    return tmp_path


OTHERS = ("thesis.json", "data/own/x.npy", "downloads/film.gz", "features/notes.txt")
COUNTS = {"accounting": 1, "features": 2, "data": 1, "downloads": 1, "errors": 1}


def listed(capsys):
    found = json.loads(dpsur("cache", "list", "--json", capsys=capsys)[1])
    return {part: row["files"] for part, row in found["parts"].items()}


def test_it_lists_every_part(folder, capsys):
    assert listed(capsys) == COUNTS
    status, out, _ = dpsur("cache", "list", capsys=capsys)
    assert status == 0
    assert str(folder) in out
    assert "downloads        1 files        3 B" in out


@pytest.mark.parametrize("part", COUNTS)
def test_a_part_is_emptied_alone(part, folder, capsys):
    status, out, _ = dpsur("cache", "empty", part, capsys=capsys)
    assert status == 0
    assert f"{part}: {COUNTS[part]} files deleted" in out
    assert listed(capsys) == {**COUNTS, part: 0}


def test_all_leaves_downloads_and_what_is_not_ours(folder, capsys):
    assert dpsur("cache", "empty", "all", capsys=capsys)[0] == 0
    assert listed(capsys) == {**dict.fromkeys(COUNTS, 0), "downloads": 1}
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert left == {*OTHERS, "downloads/mnist/x.gz"}
    assert not (folder / "data" / "mnist").exists()


def test_no_cache_is_an_empty_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DPSUR_CACHE", str(tmp_path / "none"))
    assert listed(capsys) == dict.fromkeys(COUNTS, 0)
    assert dpsur("cache", "empty", "all", capsys=capsys)[0] == 0


def test_an_unknown_part(folder, capsys):
    status, _, err = dpsur("cache", "empty", "everything", capsys=capsys)
    assert status == 2
    assert "choose one of accounting, features, errors, data, downloads, all" in err
    assert listed(capsys) == COUNTS
