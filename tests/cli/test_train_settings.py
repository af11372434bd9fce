"""`dpsur train` with presets, features, subsets, limits and networks of one's own."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import dpsur
from dpsur.cli import main
from dpsur.config import RunConfig
from dpsur.functional.records import Examples
from dpsur.methods import METHODS
from dpsur.runs.fit import execute
from dpsur.runs.session import ActiveRun
from dpsur.tasks import TASKS
from tests.cli.test_commands import dpsur as command
from tests.conftest import blobs

SEED = ["--seed", "0"]
SHORT = ["--batch-size", "20", "--delta", "1e-3", *SEED, "--device", "cpu", "--quiet"]
NETWORKS = """
from torch import nn

def narrow():
    return nn.Sequential(nn.Flatten(), nn.Linear(2, 3))

def odd():
    return 7
"""


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    monkeypatch.setenv("DPSUR_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DPSUR_DATA", raising=False)
    (tmp_path / "own_networks_of_tests.py").write_text(NETWORKS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def points(tmp_path):
    data = blobs(80)
    np.savez(tmp_path / "points.npz", x=data.inputs.numpy(), y=data.targets.numpy(), classes=3)
    return f"npz:{tmp_path / 'points.npz'}"


@pytest.fixture
def pictures(monkeypatch):
    """The task fmnist with a few made-up images in place of its records."""
    generator = torch.Generator().manual_seed(0)
    records = Examples(torch.rand(80, 1, 28, 28, generator=generator), torch.arange(80) % 10)
    task = replace(TASKS["fmnist"], load=lambda _: (records, records.select(torch.arange(10))))
    monkeypatch.setitem(TASKS, "fmnist", task)
    return "fmnist"


def train(folder, *arguments, task):
    return main(["train", "--out", str(folder), "--task", task, *SHORT, *arguments])


def statement(folder):
    return json.loads((folder / "release" / "privacy.json").read_text())


def config(folder):
    return json.loads((folder / "private" / "config.json").read_text())


@pytest.mark.parametrize("method", [name for name in METHODS if name != "dpsgd-hf"])
def test_every_method_trains_on_records_of_ones_own(method, points, tmp_path):
    extra = ["--val-batch-size", "10"] if method in ("dpsur", "dpagd") else []
    limits = ["--updates", "6", "--max-updates", "2", "--keep-fraction", "0.75"]
    noise = ["--noise-multiplier", "8", "--accept-ratio", "1.5"] if method == "dpsur" else []
    status = train(
        tmp_path / "run", "--method", method, *limits, *extra, *noise, task=points
    )  # fmt: skip
    assert status == 0
    found = statement(tmp_path / "run")
    assert found["method"] == method
    assert 40 < found["dataset_size"] < 75
    assert found["public"] == {"classes": 3, "keep_fraction": 0.75}
    assert found["accepted_updates"] == 2
    assert main(["verify", str(tmp_path / "run")]) == 0


def test_a_preset_with_changes(pictures, tmp_path):
    """What is given comes before the preset, what is not is the preset's."""
    status = train(
        tmp_path / "run", "--method", "dpsgd-hf", "--preset", "paper", "--epsilon", "2",
        "--noise-multiplier", "9", "--max-updates", "2", task=pictures,
    )  # fmt: skip
    assert status == 0
    stored = config(tmp_path / "run")
    assert stored["features"] == "scattering"
    assert stored["normalisation"] == "group"
    assert stored["options"]["batch_size"] == 20
    assert stored["options"]["noise_multiplier"] == 9.0
    assert stored["options"]["learning_rate"] == 4.0
    assert stored["options"]["schedule"] == "constant"
    loaded = dpsur.load(tmp_path / "run").module
    assert loaded(torch.rand(3, 1, 28, 28)).shape == (3, 10)


def test_features_and_normalisation(pictures, tmp_path):
    status = train(
        tmp_path / "run", "--method", "dpsgd", "--features", "scattering", "--normalisation",
        "private", "--updates", "2", task=pictures,
    )  # fmt: skip
    assert status == 0
    assert len(statement(tmp_path / "run")["mechanism"]["setup"]) == 4
    assert main(["verify", str(tmp_path / "run")]) == 0


def test_an_activation(pictures, tmp_path):
    arguments = ["--method", "dpsgd", "--features", "pixels", "--updates", "1"]
    status = train(tmp_path / "run", *arguments, "--activation", "relu", task=pictures)
    assert status == 0
    model = dpsur.load(tmp_path / "run").module
    assert any(isinstance(layer, torch.nn.ReLU) for layer in model.modules())


def test_a_model_of_ones_own(points, tmp_path, capsys):
    arguments = ["--method", "dpsgd", "--updates", "2", "--model", "own_networks_of_tests:narrow"]
    assert train(tmp_path / "run", *arguments, task=points) == 0
    assert config(tmp_path / "run")["model"] == "own_networks_of_tests:narrow"
    with pytest.raises(dpsur.InvalidInputError, match="pass it in"):
        dpsur.load(tmp_path / "run")
    own = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(2, 3))
    assert dpsur.load(tmp_path / "run", own).module(torch.rand(4, 2)).shape == (4, 3)


def cut_off(folder, arguments, task, monkeypatch):
    """A run that a crash ends after four updates."""
    real = ActiveRun._evaluation_is_due

    def stop_at_four(self, last, position):
        if position == 4:
            raise KeyboardInterrupt
        return real(self, last, position)

    with monkeypatch.context() as patch:
        patch.setattr(ActiveRun, "_evaluation_is_due", stop_at_four)
        assert train(folder, *arguments, task=task) != 0


def test_an_unseeded_run_with_private_statistics_goes_on(pictures, tmp_path, monkeypatch):
    """The paper's settings of some tasks: statistics are drawn once, and the draws go on."""
    monkeypatch.setattr(f"{__name__}.SHORT", [word for word in SHORT if word not in SEED])
    arguments = [
        "--method", "dpsgd-hf", "--normalisation", "private", "--updates", "6",
        "--checkpoint-every", "2",
    ]  # fmt: skip
    cut_off(tmp_path / "cut", arguments, pictures, monkeypatch)
    assert config(tmp_path / "cut")["seed"] is None
    shutil.copytree(tmp_path / "cut", tmp_path / "copy")
    for name in ("cut", "copy"):
        assert main(["train", "--resume", str(tmp_path / name), "--quiet"]) == 0
    assert statement(tmp_path / "cut") == statement(tmp_path / "copy")  # with the weights' hash
    assert len(statement(tmp_path / "cut")["mechanism"]["setup"]) == 4


@pytest.mark.parametrize("method", ["dpsgd", "dpis"])
def test_resume_keeps_what_was_asked_for(method, points, tmp_path, monkeypatch):
    arguments = [
        "--method", method, "--updates", "8", "--max-updates", "6", "--keep-fraction", "0.75",
        "--model", "own_networks_of_tests:narrow", "--checkpoint-every", "2",
    ]  # fmt: skip
    assert train(tmp_path / "whole", *arguments, task=points) == 0
    cut_off(tmp_path / "cut", arguments, points, monkeypatch)
    assert not (tmp_path / "cut" / "release").exists()
    assert main(["train", "--resume", str(tmp_path / "cut"), "--quiet"]) == 0
    whole, cut = (statement(tmp_path / name) for name in ("whole", "cut"))
    assert whole == cut  # the hash of the weights is in it
    assert 40 < cut["dataset_size"] < 75
    assert cut["public"] == {"classes": 3, "keep_fraction": 0.75}
    assert cut["accepted_updates"] == 6
    assert config(tmp_path / "whole") == config(tmp_path / "cut")


BAD = [
    (["--preset", "thesis"], "unknown preset 'thesis'; choose one of paper"),
    (["--preset", "paper"], "preset paper has no settings for task npz:"),
    (["--features", "wavelets"], "unknown features 'wavelets'; choose one of pixels"),
    (["--features", "scattering"], "the features scattering"),
    (
        ["--normalisation", "batch"],
        "normalisation|got 'batch'|[unknown-name]",
    ),
    (["--normalisation", "private"], "normalisation private needs channels"),
    (["--keep-fraction", "0"], "keep_fraction|got 0|[out-of-range]"),
    (["--keep-fraction", "1.5"], "keep_fraction|got 1.5|[out-of-range]"),
    (["--keep-fraction", "1e-9"], "keep_fraction 1e-09 keeps none of the records"),
    (["--classes", "4"], "classes 4 contradicts"),
    (["--max-updates", "0"], "max_updates|got 0|[out-of-range]"),
    (["--model", "narrow"], "model 'narrow' must have the form module:function"),
    (["--model", "own_networks_of_tests:wide"], "cannot be imported"),
    (["--model", "own_networks_of_tests:odd"], "must return a torch.nn.Module, it returned int"),
    (["--model", "json:dumps"], "model json:dumps cannot be built (TypeError:"),
    (["--loss-clip", "0.5"], "loss_clip 0.5 belongs to the gate loss"),
    (["--method", "dpsgd-hf"], "has no network for the features scattering"),
    (["--method", "dpsgd", "--refresh-every", "2"], "method dpsgd has no option --refresh-every"),
    (["--method", "dpagd", "--optimizer", "adam"], "method dpagd has no option --optimizer"),
    (["--method", "dpagd", "--range-schedule", "never"], "choose from"),
    (["--method", "dpis", "--accounting", "published"], "published|[not-covered]"),
    (["--method", "dpagd", "--accounting", "published"], "published|[not-covered]"),
    (["--method", "dpsgd", "--val-batch-size", "5"], "has no meaning without a test of candidates"),
    (["--method", "dpsgd", "--on-reject", "keep-momentum"], "no meaning where nothing is rejected"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), BAD, ids=lambda v: " ".join(v) if isinstance(v, list) else ""
)
def test_bad_input_is_one_line_and_writes_nothing(arguments, message, points, tmp_path, capsys):
    known = [] if "--method" in arguments else ["--method", "dpsgd"]
    out = tmp_path / "run"
    status, printed, err = command(
        "train", "--out", str(out), "--task", points, *SHORT, *known, *arguments, capsys=capsys
    )
    assert status == 2
    assert printed == ""
    assert all(part in err for part in message.split("|"))
    assert len(err.splitlines()) == 1
    assert not out.exists()


def test_presets_are_for_the_budgets_of_the_paper(pictures, tmp_path, capsys):
    arguments = ["--out", str(tmp_path / "run"), "--preset", "paper", "--epsilon", "2.5"]
    status, _, err = command("train", "--task", pictures, *arguments, capsys=capsys)
    assert status == 2
    assert "epsilon 2.5; choose one of 1, 2, 3, 4" in err


def test_resume_takes_no_settings_of_what_to_train(tmp_path, capsys):
    for option, value in (("--preset", "paper"), ("--features", "pixels"), ("--model", "a:b"),
                          ("--normalisation", "none"), ("--keep-fraction", "0.5"),
                          ("--classes", "3"), ("--max-updates", "5"),
                          ("--refresh-every", "3")):  # fmt: skip
        _, _, err = command("train", "--resume", str(tmp_path), option, value, capsys=capsys)
        assert f"leave out {option}" in err


def test_the_help_names_what_can_be_chosen(capsys):
    _, out, _ = command("train", "--help-all", capsys=capsys)
    asked = (
        "preset",
        "features",
        "normalisation",
        "activation",
        "model",
        "keep-fraction",
        "classes",
    )
    for option in (*asked, "max-updates", "refresh-every", "choice-epsilon"):
        assert f"--{option} " in out
    for method in METHODS:
        assert method in out
    assert RunConfig().preset is None


def test_where_private_records_lie_is_not_released(points, tmp_path, capsys):
    data = blobs(20)
    test = {"x_test": data.inputs.numpy(), "y_test": data.targets.numpy()}
    path = points.removeprefix("npz:")
    np.savez(path, **np.load(path), **test)
    assert train(tmp_path / "run", "--updates", "2", "--method", "dpsgd", task=points) == 0
    for file in (tmp_path / "run" / "release").iterdir():
        assert b"points.npz" not in file.read_bytes()
    assert config(tmp_path / "run")["task"] == points  # the private folder knows it
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run")]) == 2
    assert "name it with --task" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "run"), "--task", points]) == 0


@pytest.mark.parametrize("seed", [SEED, []])
def test_a_seed_is_warned_of(seed, points, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(f"{__name__}.SHORT", [word for word in SHORT if word not in SEED])
    assert train(tmp_path / "run", "--method", "dpsgd", "--updates", "2", *seed, task=points) == 0
    warned = "dpsur: warning: this run was seeded" in capsys.readouterr().err
    assert warned == bool(seed)


def test_a_command_says_a_thing_once(points, tmp_path, capsys, monkeypatch):
    """A command that makes many seeded runs does not warn of every seed."""
    real = execute

    def twice(session, **more):
        real(session)
        return real(session, **more)

    monkeypatch.setattr("dpsur.cli.train.execute", twice)
    for name in ("one", "two"):
        assert train(tmp_path / name, "--method", "dpsgd", "--updates", "2", task=points) == 0
        assert capsys.readouterr().err.count("this run was seeded") == 1
