"""Errors say what is wrong with private records, and never quote them."""

import stat
import traceback

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpsur
from dpsur.cli import main
from dpsur.cli.terminal import logged_privately
from dpsur.errors import InvalidInputError
from dpsur.runs.data import check_targets
from tests.conftest import blobs, small_model

BUDGET = dpsur.Budget(epsilon=3.0, delta=1e-4)
X, Y = blobs().inputs, blobs().targets
# Numbers that occur in no message for another reason.
LABEL, INDEX, WIDTH = 8317, 137, 4519


def records_with(change):
    inputs, labels = X.clone(), Y.clone()
    change(inputs, labels)
    return inputs, labels


class Ragged:
    """A data set in which one record has another shape."""

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return torch.zeros(WIDTH if index == INDEX else 2), 0


class Named(Ragged):
    """A data set in which one record is a text."""

    def __getitem__(self, index):
        return ("Jane Doe 8317" if index == INDEX else torch.zeros(2)), 0


class Lonely(Ragged):
    """A data set in which one record has no target."""

    def __getitem__(self, index):
        return torch.zeros(2) if index == INDEX else (torch.zeros(2), 0)


def odd_label(inputs, labels):
    labels[INDEX] = LABEL


def not_finite(inputs, labels):
    inputs[INDEX] = float("nan")


def tokens(model_rows=20):
    found = torch.zeros(200, 3, dtype=torch.int64)
    found[INDEX] = LABEL
    model = nn.Sequential(nn.Embedding(model_rows, 4), nn.Flatten(), nn.Linear(12, 3))
    return model, (found, Y)


CASES = {
    "label": lambda: (small_model(), records_with(odd_label)),
    "not finite": lambda: (small_model(), records_with(not_finite)),
    "shape": lambda: (small_model(), Ragged()),
    "text": lambda: (small_model(), Named()),
    "no pair": lambda: (small_model(), Lonely()),
    "token": tokens,
}
SECRETS = (str(LABEL), str(INDEX), str(WIDTH), "Jane")


@pytest.mark.parametrize("case", CASES)
def test_neither_the_message_nor_the_traceback_quotes_a_record(case):
    model, data = CASES[case]()
    with pytest.raises(InvalidInputError) as refused:
        dpsur.fit(model, data, budget=BUDGET, method=dpsur.Dpsgd(updates=2), device="cpu")
    error = refused.value
    shown = "".join(traceback.format_exception(error)) + repr(error) + str(error.args)
    for secret in SECRETS:
        assert secret not in shown.replace(__file__, ""), secret
    assert len(str(error).splitlines()) == 1
    assert error.private
    assert case in ("text", "no pair") or any(secret in error.private for secret in SECRETS)
    assert "attribute `private`" in shown


def quoting(outputs, targets):
    if int(targets.max()) == LABEL:
        raise RuntimeError(f"no such label: {int(targets.max())}")
    return F.cross_entropy(outputs, targets)


def test_what_a_loss_says_of_a_target_is_held_back():
    labels = records_with(odd_label)[1]
    with pytest.raises(
        InvalidInputError, match="some target of train_set .RuntimeError"
    ) as refused:
        check_targets(quoting, torch.zeros(1, 3), labels, "train_set")
    assert str(LABEL) not in "".join(traceback.format_exception(refused.value))
    assert str(LABEL) in refused.value.private


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DPSUR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def save(path, inputs, labels, **more):
    np.savez(path, x=inputs.numpy(), y=labels.numpy(), **more)


def command(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    return status, *capsys.readouterr()


@pytest.mark.parametrize("change", [odd_label, not_finite])
def test_the_command_writes_the_values_to_a_private_log(change, cache, tmp_path, capsys):
    path = tmp_path / "own.npz"
    save(path, *records_with(change))
    arguments = ("train", "--task", f"npz:{path}", "--classes", "3", "--out", tmp_path / "run")
    status, out, err = command(capsys, *arguments)
    log = cache / "private" / "errors.log"
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert f"(the values are private: see {log})" in err
    for secret in SECRETS:
        assert secret not in err
    assert any(secret in log.read_text() for secret in SECRETS)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert stat.S_IMODE(log.parent.stat().st_mode) == 0o700
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_has_the_log_in_its_own_private_folder(cache, tmp_path):
    private = tmp_path / "run" / "private"
    private.mkdir(parents=True)
    error = InvalidInputError("a label is wrong", private=f"it is {LABEL}")
    for _ in range(2):
        assert str(private / "errors.log") in logged_privately(error, str(tmp_path / "run"))
    assert (private / "errors.log").read_text().count(str(LABEL)) == 2
    assert not cache.exists()
    assert logged_privately(InvalidInputError("a label is wrong"), None) == ""
    assert str(cache) in logged_privately(error, str(tmp_path / "other"))


def test_a_log_that_cannot_be_written_is_left_out(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DPSUR_CACHE", str(tmp_path / "file"))
    path = tmp_path / "own.npz"
    save(path, *records_with(odd_label), classes=3)
    status, _, err = command(capsys, "train", "--task", f"npz:{path}", "--out", tmp_path / "run")
    assert status == 2
    assert "private" not in err.replace("private_values", "")
    assert str(LABEL) not in err


def test_words_of_a_decoder_are_held_back(cache, tmp_path, capsys):
    """What is in a file that is no archive may come back in the words of whoever tries to read."""
    path = tmp_path / "own.npz"
    save(path, X, Y, classes=3)
    content = path.read_bytes().replace(b"'descr': '<f4'", b"'descr': 'Jane'")
    path.write_bytes(content)
    status, _, err = command(capsys, "train", "--task", f"npz:{path}", "--out", tmp_path / "run")
    assert status == 2
    assert "own.npz is damaged, or not a file of np.savez" in err
    assert "Jane" not in err
    assert (cache / "private" / "errors.log").read_text().count("\n") == 2
