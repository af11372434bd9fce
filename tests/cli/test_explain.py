"""`dpsur explain`: which engine serves a model, and why."""

import numpy as np
import pytest

from tests.cli.test_commands import dpsur
from tests.conftest import blobs

NETWORKS = """
import torch
from torch import nn

class Looped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, inputs):
        steps = int(inputs.abs().sum() >= 0)  # no torch.func transform can follow this
        return self.layer(inputs.flatten(1)) * steps + 0 * torch.tensor(self.layer.bias.tolist())

def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(2, 3))

def looped():
    return Looped()

def of_pixels():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))

def mixing():
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(2), nn.Linear(2, 3))
"""


@pytest.fixture
def points(tmp_path, monkeypatch):
    (tmp_path / "networks_to_explain.py").write_text(NETWORKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = blobs(40)
    np.savez(tmp_path / "points.npz", x=data.inputs.numpy(), y=data.targets.numpy(), classes=3)
    return f"npz:{tmp_path / 'points.npz'}"


def test_the_network_of_a_task(capsys):
    status, out, err = dpsur("explain", "--device", "cpu", capsys=capsys)
    assert (status, err) == (0, "")
    assert "engine one-pass" in out


def test_a_custom_model(points, capsys):
    arguments = ["explain", "--task", points, "--device", "cpu", "--model"]
    status, out, _ = dpsur(*arguments, "networks_to_explain:plain", capsys=capsys)
    assert status == 0
    assert "engine one-pass" in out


def test_a_model_that_no_engine_can_be_wrong_about(points, capsys):
    """What is printed is what a run uses."""
    arguments = ["--task", points, "--device", "cpu", "--model", "networks_to_explain:looped"]
    status, out, _ = dpsur("explain", *arguments, capsys=capsys)
    assert status == 0
    assert "model: Looped\nengine " in out


@pytest.mark.parametrize("command", [["explain"], ["train", "--max-updates", "1"]])
def test_a_model_for_pixels_is_told_that_it_gets_features(command, points, capsys, tmp_path):
    arguments = ["--device", "cpu", "--model", "networks_to_explain:of_pixels"]
    arguments += ["--out", str(tmp_path / "run")] if command[0] == "train" else []
    status, _, err = dpsur(*command, *arguments, capsys=capsys)
    assert (status, len(err.splitlines())) == (2, 1)
    assert "these are scattering features: choose --features pixels" in err
    if command[0] == "explain":
        assert dpsur(*command, *arguments, "--features", "pixels", capsys=capsys)[0] == 0


def test_a_model_that_training_refuses(points, capsys):
    arguments = ["--task", points, "--device", "cpu", "--model", "networks_to_explain:mixing"]
    status, _, err = dpsur("explain", *arguments, capsys=capsys)
    assert (status, "BatchNorm1d" in err) == (2, True)


def test_bad_input_is_one_line(points, capsys):
    for words, message in (
        (["--model", "networks_to_explain:missing"], "cannot be imported"),
        (["--model", "missing"], "must have the form module:function"),
        (["--task", "nothing"], "unknown task 'nothing'"),
        (["--features", "scattering"], "has no network for the features scattering"),
        (["--device", "toaster"], "unknown device 'toaster'"),
    ):
        status, out, err = dpsur("explain", "--task", points, *words, capsys=capsys)
        assert (status, out) == (2, "")
        assert message in err
        assert len(err.splitlines()) == 1
