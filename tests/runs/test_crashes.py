"""Every crash leaves a folder that can be resumed or started again; diagnostics fail alone."""

import errno
import json
import os
import stat
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

import dpsur
from dpsur.environment import cache_folder
from dpsur.errors import DiagnosticsWarning, FileError
from dpsur.runs import observers as recorder
from dpsur.runs.checkpoint import FILE_NAME, FORMAT
from dpsur.runs.files import RunFolder, holds_release, resume_command
from tests.conftest import blobs, small_model
from tests.runs.test_checkpoint import fit, interrupted, weights_file


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    torch.manual_seed(0)
    fit(folder)
    return weights_file(folder)


class Killed(BaseException):
    """What no `except Exception` sees."""


class FileOperations:
    """Counts what a run asks of the file system, and dies before the operation of a number."""

    PLACES = ((os, "fsync"), (tempfile, "mkstemp"), (Path, "replace"), (Path, "rename"),
              (Path, "mkdir"), (Path, "chmod"))  # fmt: skip

    def __init__(self, patch, at=None):
        self.count, self._at = 0, at
        for owner, name in self.PLACES:
            patch.setattr(owner, name, self._counting(getattr(owner, name)))

    def _counting(self, real):
        def operation(*arguments, **options):
            self.count += 1
            if self.count == self._at:
                raise Killed
            return real(*arguments, **options)

        return operation


def short_fit(folder, resume=False):
    return dpsur.fit(
        small_model(), blobs(), budget=dpsur.Budget(3.0, 1e-4), accounting="every-trial",
        method=dpsur.Dpsgd(noise_multiplier=20.0, batch_size=20, updates=2), seed=0, out=folder,
        resume=resume,
    )  # fmt: skip


def test_every_crash_point_continues_or_starts_again(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        operations = FileOperations(patch)
        short_fit(tmp_path / "counted")
    assert operations.count > 30
    resumed = 0
    for number in range(1, operations.count + 1):
        folder = tmp_path / str(number)
        with monkeypatch.context() as patch:
            FileOperations(patch, number)
            with pytest.raises(Killed):
                short_fit(folder)
        begun = (folder / "private" / FILE_NAME).exists()
        short_fit(folder, resume=begun)
        resumed += begun
        assert weights_file(folder) == weights_file(tmp_path / "counted"), number
        left = {path.name for path in folder.iterdir()}
        assert left == {"private", "release"}, number
    assert 0 < resumed < operations.count


def test_the_message_of_a_used_folder_names_the_way_on(tmp_path):
    folder = tmp_path / "a run"
    interrupted(folder)
    with pytest.raises(dpsur.InvalidInputError, match=r"fit\(..., out='.*a run', resume=True\)"):
        fit(folder)
    (folder / "private" / "config.json").write_text("{}")
    with pytest.raises(dpsur.InvalidInputError, match=r"dpsur train --resume '.*/a run'$"):
        fit(folder)


def test_commands_are_quoted():
    assert resume_command(Path("a b")) == "dpsur train --resume 'a b'"
    assert resume_command(Path("-odd")) == "dpsur train --resume ./-odd"
    assert resume_command(Path("plain/run")) == "dpsur train --resume plain/run"


def test_a_lost_checkpoint_is_not_a_new_start(tmp_path):
    interrupted(tmp_path / "out")
    (tmp_path / "out" / "private" / FILE_NAME).unlink()
    with pytest.raises(dpsur.InvalidInputError, match="is not empty"):
        fit(tmp_path / "out")
    with pytest.raises(dpsur.CheckpointError, match="nothing to resume"):
        fit(tmp_path / "out", resume=True)


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_for_metrics_does_not_block_the_release(tmp_path, monkeypatch, whole):
    monkeypatch.setattr(recorder, "_append", no_space)
    with pytest.warns(DiagnosticsWarning, match=r"metrics.jsonl is incomplete .*No space") as seen:
        run = fit(tmp_path / "out")
    assert len([w for w in seen if w.category is DiagnosticsWarning]) == 1
    assert weights_file(tmp_path / "out") == whole
    assert len([row for row in run.private.rows if row["kind"] == "trial"]) == 20


GARBAGE = [
    b"\xff\xfe\x00garbage\n" * 3,
    b'{"kind": "trial", "trial": 1}\n',
    b'{"trial": 1, "updates": 1}\n',
    b'{"kind": "evaluation", "trial": 1, "updates": 1, "epsilon": "much"}\n',
    b'{"kind": "trial", "trial": "one", "updates": []}\n',
    b'{"kind": "evaluation", "trial": 1, "updates": 1}\n',
    b'{"trial": ' + b"9" * 5000 + b"}\n",
    b"[" * 100_000 + b"\n",
    b"null\n7\n[]\n\n",
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_in_metrics_changes_nothing(tmp_path, whole, garbage):
    interrupted(tmp_path / "out")
    path = tmp_path / "out" / "private" / "metrics.jsonl"
    path.write_bytes(garbage + path.read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("error", DiagnosticsWarning)
        fit(tmp_path / "out", resume=True)
    assert weights_file(tmp_path / "out") == whole


def test_a_folder_in_the_place_of_metrics_is_a_warning(tmp_path, whole):
    interrupted(tmp_path / "out")
    path = tmp_path / "out" / "private" / "metrics.jsonl"
    path.unlink()
    path.mkdir()
    with pytest.warns(DiagnosticsWarning, match="metrics.jsonl is incomplete"):
        fit(tmp_path / "out", resume=True)
    assert weights_file(tmp_path / "out") == whole


def test_an_empty_release_is_no_release(tmp_path, whole):
    interrupted(tmp_path / "out")
    (tmp_path / "out" / "release").mkdir()
    assert not RunFolder(tmp_path / "out").finished
    fit(tmp_path / "out", resume=True)
    assert weights_file(tmp_path / "out") == whole


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors", "privacy.json"])
def test_a_foreign_release_is_refused_and_left_alone(tmp_path, whole, name):
    interrupted(tmp_path / "out")
    release = tmp_path / "out" / "release"
    release.mkdir()
    (release / name).write_text("{}")
    with pytest.raises(dpsur.InvalidInputError, match="not a whole release.*move it away"):
        fit(tmp_path / "out", resume=True)
    assert (release / name).read_text() == "{}"
    (release / name).unlink()
    fit(tmp_path / "out", resume=True)
    assert weights_file(tmp_path / "out") == whole


def test_the_release_of_another_run_is_not_taken_for_this_one(tmp_path):
    interrupted(tmp_path / "out")
    fit(tmp_path / "other", seed=1)
    (tmp_path / "other" / "release").rename(tmp_path / "out" / "release")
    with pytest.raises(FileError, match="cannot be written to .*release"):
        fit(tmp_path / "out", resume=True)


def test_a_damaged_release_is_no_release(tmp_path):
    fit(tmp_path / "out")
    release = tmp_path / "out" / "release"
    assert holds_release(release)
    weights = release / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert not holds_release(release)


@pytest.mark.parametrize("version", [1, 3])
def test_a_checkpoint_of_another_version_is_not_called_damaged(tmp_path, version):
    """Neither an older one, which held positions of generators, nor a newer one."""
    interrupted(tmp_path / "out")
    path = tmp_path / "out" / "private" / FILE_NAME
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    facts = header["dpsur"].replace(FORMAT, f"dpsur-checkpoint/{version}")
    assert facts != header["dpsur"]
    path.write_bytes(save_tensors(load_tensors(content), {"dpsur": facts, "digest": "other"}))
    message = f"another version.*format dpsur-checkpoint/{version}; this one reads {FORMAT}"
    with pytest.raises(dpsur.CheckpointError, match=message) as error:
        fit(tmp_path / "out", resume=True)
    assert "whole" not in str(error.value)


@pytest.mark.parametrize("facts", ["[]", "7", '"text"', "[" * 100_000])
def test_odd_facts_of_a_checkpoint_are_refused(tmp_path, facts):
    interrupted(tmp_path / "out")
    path = tmp_path / "out" / "private" / FILE_NAME
    path.write_bytes(save_tensors(load_tensors(path.read_bytes()), {"dpsur": facts}))
    with pytest.raises(dpsur.CheckpointError, match="not a whole checkpoint"):
        fit(tmp_path / "out", resume=True)


def test_temporary_files_are_cleared_and_private_files_are_the_owners(tmp_path, whole):
    before = os.umask(0o022)
    try:
        interrupted(tmp_path / "out")
        private = tmp_path / "out" / "private"
        for name in (".checkpoint.safetensors.k3l_x2", ".metrics.jsonl.a", ".config.json.b"):
            (private / name).write_bytes(b"half")
        (private / "notes").write_text("the user's")
        (private / "metrics.jsonl").chmod(0o644)  # as a copy may be
        partial = tmp_path / "out" / ".release.partial"
        partial.mkdir()
        (partial / "model.safetensors").write_bytes(b"half")
        fit(tmp_path / "out", resume=True)
    finally:
        os.umask(before)
    ours = {FILE_NAME, "metrics.jsonl", "lock"}
    assert {path.name for path in private.iterdir()} == {*ours, "notes"}
    assert {stat.S_IMODE((private / name).stat().st_mode) for name in ours} == {0o600}
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert not partial.exists()
    assert weights_file(tmp_path / "out") == whole


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(FileError, match=rf"{FILE_NAME} cannot be written \(No space left"):
        fit(tmp_path / "out")


def test_a_folder_that_was_removed_is_named(tmp_path):
    class Remove:
        def started(self, plan, progress):
            pass

        def trials(self, progress, verdicts):
            if progress.ledger.trials == 3:
                (tmp_path / "out").rename(tmp_path / "gone")

        def evaluated(self, progress, scores, epsilon):
            pass

    with (
        pytest.warns(DiagnosticsWarning),
        pytest.raises(FileError, match=r"out/private/checkpoint.* \(No such file or directory\)$"),
    ):
        fit(tmp_path / "out", observers=[Remove()])
    fit(tmp_path / "gone", resume=True)


def test_a_name_that_is_too_long(tmp_path):
    with pytest.raises(dpsur.InvalidInputError, match="cannot be made .File name too long"):
        fit(tmp_path / ("x" * 300))


def test_no_home_folder(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(dpsur.InvalidInputError, match="no home folder.*DPSUR_CACHE"):
        cache_folder()


class FrozenFront(nn.Module):
    """A fixed random layer before a trained one."""

    def __init__(self):
        super().__init__()
        self.front = nn.Linear(2, 8).requires_grad_(False)
        self.layer = nn.Linear(8, 3)

    def forward(self, inputs):
        return self.layer(self.front(inputs).tanh())


def test_other_frozen_weights_are_refused_by_name(tmp_path):
    model = FrozenFront()
    interrupted(tmp_path / "out", seed=None, model=model)
    with pytest.raises(dpsur.CheckpointError, match="other frozen parameters or buffers .seed tor"):
        fit(tmp_path / "out", seed=None, model=FrozenFront(), resume=True)
    with pytest.raises(dpsur.CheckpointError, match="with other records;"):
        fit(tmp_path / "out", seed=None, model=model, data=blobs(seed=9), resume=True)
    fit(tmp_path / "out", seed=None, model=model, resume=True)
