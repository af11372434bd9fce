"""`dpsur audit`."""

import json

import pytest

from dpsur.audits import mechanism, repeated
from dpsur.cli import main


@pytest.fixture
def small(monkeypatch):
    name = "gate alone"
    monkeypatch.setattr(mechanism, "UNITS", {name: mechanism.UNITS[name]})
    monkeypatch.setattr(mechanism, "EXACT_ONLY", {})


def test_tiny_problems(small, capsys, tmp_path):
    picture = tmp_path / "audit.png"
    assert main(["audit", "--repetitions", "500", "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "mechanism: gate alone (proven)" in printed
    assert "of at most 3.758 that could be shown" in printed
    assert "not contradicted" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json(small, capsys):
    assert main(["audit", "--repetitions", "500", "--confidence", "0.9", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = [row["accounting"] for row in rows]
    assert names == ["proven", "published", "proven-pld", "every-trial"]
    assert all(row["confidence"] == 0.9 and row["claimed"] > row["lower"] for row in rows)


def test_broken_trainings(monkeypatch, capsys):
    from dpsur.cli import audit

    monkeypatch.setattr(audit, "TINY", {"one step": repeated.TINY["one step"]})
    assert main(["audit", "--against", "broken", "--repetitions", "300", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    verdicts = {row["details"]["fault"]: row["verdict"] for row in rows}
    assert verdicts["none"] == "not contradicted"
    assert verdicts["no-noise"] == "contradicted"


def test_one_training(capsys):
    options = ["--updates", "2", "--batch-size", "64", "--count", "40", "--device", "cpu"]
    assert main(["audit", "--against", "training", *options, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["details"]["canaries"] == 40
    assert row["lower"] < row["claimed"]
    assert main(["audit", "--against", "training", *options, "--canaries", "input"]) == 0
    assert "one run: dpsgd on mnist-5k" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--canaries", "input", "--count", "9999"], "9999 input canaries"),
        (["--epsilon", "-1"], "epsilon must be above 0"),
        (["--method", "nope"], "unknown method"),
        (["--confidence", "1.5"], "confidence"),
        (["--count", "0"], "count must be"),
        (["--fault", "kept-momentum", "--count", "20", "--updates", "1"], "does not have"),
    ],
)
def test_bad_input(options, message, capsys):
    assert main(["audit", "--against", "training", "--device", "cpu", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("against", ["mechanism", "broken", "training"])
@pytest.mark.parametrize(
    ("name", "value"), [("repetitions", "0"), ("repetitions", "-3"), ("confidence", "0")]
)
def test_numbers_that_no_audit_can_be_made_with(against, name, value, capsys):
    assert main(["audit", "--against", against, f"--{name}", value]) == 2
    assert f"{name} must be" in capsys.readouterr().err
    assert main(["audit", "--against", against, "--seed", "-1"]) == 2
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
    command = ["audit", "--against", "training", "--method", method, "--device", "cpu", *few]
    assert main(command) == 0
    assert f"one run: {method} on mnist-5k, fault: none (proven)" in capsys.readouterr().out
