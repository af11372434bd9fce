"""`dpsur audit`."""

import json

import pytest

from dpsur.cli import main


def test_one_training(capsys):
    options = ["--updates", "2", "--batch-size", "64", "--count", "40", "--device", "cpu"]
    assert main(["audit", *options, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["details"]["canaries"] == 40
    assert row["lower"] < row["claimed"]
    assert main(["audit", *options, "--canaries", "input"]) == 0
    assert "one run: dpsgd on mnist-5k" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--canaries", "input", "--count", "9999"], "9999 input canaries"),
        (["--epsilon", "-1"], "epsilon must be above 0"),
        (["--method", "nope"], "unknown method"),
        (["--confidence", "1.5"], "confidence must be"),
        (["--confidence", "0"], "confidence must be"),
        (["--count", "0"], "count must be"),
    ],
)
def test_bad_input(options, message, capsys):
    assert main(["audit", "--device", "cpu", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_seed_below_zero(capsys):
    assert main(["audit", "--seed", "-1"]) == 2
    assert "seed must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    "method",
    [
        "dpsgd-hf", "dpis",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("dpsgd-ts", "dpagd")),
    ],
)  # fmt: skip
def test_every_method_can_be_audited(method, capsys):
    """On the network and the features that it trains on."""
    few = ["--count", "40", "--updates", "2", "--batch-size", "32"]
    few += ["--val-batch-size", "8", "--step-sizes", "2"] if method == "dpagd" else []
    command = ["audit", "--method", method, "--device", "cpu", *few]
    assert main(command) == 0
    assert f"one run: {method} on mnist-5k (proven)" in capsys.readouterr().out
