import json
import stat
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import dpsur
from dpsur.config import Intervals
from dpsur.runs import files
from dpsur.runs.checkpoint import FILE_NAME
from tests.conftest import StopAt, blobs, small_model

BUDGET = dpsur.Budget(epsilon=3.0, delta=1e-4)
METHOD = dpsur.Dpsur(
    noise_multiplier=20.0,
    val_noise_multiplier=4.0,
    trials=20,
    average_decay=0.9,
    optimizer="adam",
    learning_rate=0.05,
)


def fit(out, seed=0, resume=False, observers=(), method=METHOD, data=None, model=None, **more):
    return dpsur.fit(
        small_model() if model is None else model,
        blobs() if data is None else data,
        budget=BUDGET,
        accounting="every-trial",
        method=method,
        seed=seed,
        out=out,
        resume=resume,
        observers=observers,
        intervals=Intervals(checkpoint_every=4, evaluate_every=5),
        test_set=blobs(30, seed=4),
        **more,
    )


def interrupted(folder, at=11, **more):
    with pytest.raises(KeyboardInterrupt):
        fit(folder, observers=[StopAt(at)], **more)


def weights_file(folder):
    return (folder / "release" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("at", [1, 4, 11, 20])
def test_an_interrupted_run_ends_like_an_uninterrupted_one(tmp_path, at):
    whole = fit(tmp_path / "whole")
    interrupted(tmp_path / "broken", at)
    assert not (tmp_path / "broken" / "release").exists()
    resumed = fit(tmp_path / "broken", resume=True)
    assert weights_file(tmp_path / "whole") == weights_file(tmp_path / "broken")
    assert resumed.private.ledger == whole.private.ledger
    rows = [
        {k: v for k, v in row.items() if k != "seconds"}
        for run in (whole, resumed)
        for row in run.private.rows
    ]
    assert rows[: len(rows) // 2] == rows[len(rows) // 2 :]


def test_an_unseeded_run_continues_the_draws_it_would_have_made(tmp_path):
    """Resumed twice from one checkpoint, an unseeded run ends the same: nothing is re-rolled."""
    interrupted(tmp_path / "a", seed=None)
    copy = tmp_path / "b"
    (copy / "private").mkdir(parents=True)
    for name in (FILE_NAME, "metrics.jsonl"):
        (copy / "private" / name).write_bytes((tmp_path / "a" / "private" / name).read_bytes())
    fit(tmp_path / "a", seed=None, resume=True)
    fit(copy, seed=None, resume=True)
    assert weights_file(tmp_path / "a") == weights_file(copy)


def test_folders_keep_release_and_private_apart(tmp_path):
    fit(tmp_path / "out")
    private = tmp_path / "out" / "private"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert {p.name for p in private.iterdir()} == {
        FILE_NAME, "metrics.jsonl", "lock",
    }  # fmt: skip
    rows = [json.loads(line) for line in (private / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["kind"] == "trial" for row in rows) == 20
    assert sum(row["kind"] == "evaluation" for row in rows) == 4


def damage_byte(content, at):
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: damage_byte(content, len(content) - 5),
        lambda content: damage_byte(content, 40),
        lambda content: content.replace(b"trials", b"trialz"),
        lambda content: b"PK\x03\x04 not ours",
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path, damage):
    interrupted(tmp_path / "out")
    path = tmp_path / "out" / "private" / FILE_NAME
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(dpsur.CheckpointError, match="not a whole checkpoint"):
        fit(tmp_path / "out", resume=True)
    assert not (tmp_path / "out" / "release").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"data": blobs(seed=2)},
        {"method": replace(METHOD, trials=21)},
        {"method": replace(METHOD, noise_multiplier=21.0)},
        {"seed": None},
    ],
)
def test_a_foreign_checkpoint_is_refused(tmp_path, change):
    interrupted(tmp_path / "out")
    with pytest.raises(dpsur.CheckpointError, match="belongs to another run"):
        fit(tmp_path / "out", resume=True, **change)


def test_nothing_to_resume(tmp_path):
    with pytest.raises(dpsur.CheckpointError, match="nothing to resume"):
        fit(tmp_path / "none", resume=True)


def test_a_second_process_is_kept_out(tmp_path):
    interrupted(tmp_path / "out")
    folder = files.RunFolder(tmp_path / "out")
    with folder.lock(), pytest.raises(dpsur.InvalidInputError, match="another process"):
        fit(tmp_path / "out", resume=True)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.write_atomically(path, b"old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_cut_off_metrics_line_is_dropped_on_resume(tmp_path):
    interrupted(tmp_path / "out")
    path = tmp_path / "out" / "private" / "metrics.jsonl"
    path.write_text(path.read_text() + '{"kind": "trial", "tri')
    run = fit(tmp_path / "out", resume=True)
    assert [r["trial"] for r in run.private.rows if r["kind"] == "trial"] == list(range(1, 21))


def test_metrics_that_lead_nowhere_do_not_keep_a_run_from_its_release(tmp_path):
    whole = fit(tmp_path / "whole")
    interrupted(tmp_path / "out")
    path = tmp_path / "out" / "private" / "metrics.jsonl"
    path.unlink()
    path.symlink_to("nowhere")
    resumed = fit(tmp_path / "out", resume=True)
    assert resumed.private.ledger == whole.private.ledger
    assert weights_file(tmp_path / "whole") == weights_file(tmp_path / "out")


def test_the_checkpoint_is_plain_tensors(tmp_path):
    interrupted(tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "private" / FILE_NAME)
    assert all(isinstance(value, torch.Tensor) for value in tensors.values())
    assert any(name.startswith("stream/") for name in tensors)
    assert any(name.startswith("state/optimizer") for name in tensors)


def halved(output, target):
    return F.cross_entropy(output, target) / 2


def doubled(output, target):
    return F.cross_entropy(output, target) * 2


def relu_model():
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"loss": doubled}),
        ({"loss": halved}, {"loss": doubled}),
        ({"loss": nn.CrossEntropyLoss()}, {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}),
        ({}, {"model": relu_model()}),
    ],
)
def test_another_loss_or_network_of_the_same_shapes_is_refused(tmp_path, first, second):
    """Two copies that were resumed so would differ by a sum without noise."""
    interrupted(tmp_path / "out", seed=None, **first)
    with pytest.raises(dpsur.CheckpointError, match="belongs to another run.*from two copies"):
        fit(tmp_path / "out", seed=None, resume=True, **{**first, **second})
    assert not (tmp_path / "out" / "release").exists()
    fit(tmp_path / "out", seed=None, resume=True, **first)
