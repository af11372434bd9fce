"""`dpsur attack`, and targets by name."""

import json

import numpy as np
import pytest
import torch

import dpsur
from dpsur.attacks.suite import RunTrainer, attacked_pool
from dpsur.cli import main
from dpsur.config import RunConfig
from dpsur.features import compute, features_named
from dpsur.functional.records import Examples
from dpsur.methods import method_named
from dpsur.privacy.budget import Budget
from dpsur.tasks import task_named
from dpsur.tasks.schema import TestPart

SMALL = ["--max-records", "120", "--epochs", "1", "--device", "cpu"]


def test_a_target_without_privacy(capsys, tmp_path):
    picture = tmp_path / "roc.png"
    options = ["--attacks", "all", "--shadow-models", "3", "--roc", str(picture)]
    assert main(["attack", *SMALL, *options]) == 0
    printed = capsys.readouterr().out
    for name in ("gap", "confidence, shuffled", "lira-online", "rmia-offline, shuffled"):
        assert f"\n{name} " in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_private_target(capsys):
    options = ["--method", "dpsgd", "--updates", "2", "--batch-size", "10", "--json"]
    assert main(["attack", *SMALL, *options, "--delta", "1e-3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["attacks"]) == {
        "gap",
        "confidence",
        "confidence, shuffled",
    }
    assert found["attacks"]["gap"]["members"] == 20


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    out = tmp_path_factory.mktemp("released") / "run"
    options = ["--updates", "1", "--batch-size", "8", "--device", "cpu", "--quiet"]
    options += ["--features", "pixels", "--keep-fraction", "0.02", "--delta", "1e-3"]
    assert main(["train", "--method", "dpsgd", "--out", str(out), *options]) == 0
    return out


def test_a_release(released, capsys):
    out = str(released)
    assert main(["attack", "--release", out, "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found["attacks"]) == {"gap", "confidence", "confidence, shuffled"}
    assert main(["attack", "--release", out, "--attacks", "rmia-online"]) == 2
    assert "choose among gap, confidence" in capsys.readouterr().err
    assert main(["attack", "--release", out, "--attacks", "nope"]) == 2
    assert "unknown attack 'nope'" in capsys.readouterr().err


def test_members_of_a_release_are_the_records_that_it_was_trained_on(released, capsys):
    command = ["attack", "--release", str(released), "--attacks", "gap", "--device", "cpu"]
    command += ["--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found["attacks"]) == {"gap"}
    statement = json.loads((released / "release" / "privacy.json").read_text())
    assert 40 < statement["dataset_size"] < 130
    assert found["attacks"]["gap"]["members"] == statement["dataset_size"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--attacks", "gap,nope"], "unknown attack 'nope'"),
        (["--epochs", "0"], "epochs"),
        (["--seed", "-1"], "seed must be"),
    ],
)
def test_bad_input(options, message, capsys):
    assert main(["attack", *SMALL, *options]) == 2
    assert message in capsys.readouterr().err


def test_private_models_of_features_and_of_raw_inputs_agree():
    """A pool whose features were computed once gives the models that raw records give."""
    cpu = torch.device("cpu")
    task = task_named("mnist-5k")
    pool = attacked_pool(task, 60)
    features = Examples(
        compute(features_named("scattering"), pool.inputs, cached=False), pool.targets
    )
    method = method_named("dpsgd")(batch_size=10)
    run = RunConfig(task.name, method, Budget(3.0, 1e-3), "proven", "scattering", max_updates=2)
    rows = [torch.arange(30), torch.arange(30, 60)]
    raw = RunTrainer(run, cpu)(pool, rows, seed=1)
    own = RunTrainer(run, cpu, featured=True)(features, rows, seed=1)
    answers = raw.outputs(pool.inputs)
    assert torch.allclose(own.outputs(features.inputs), answers, atol=1e-4)
    assert not torch.allclose(answers[0], answers[1], atol=1e-2)


@pytest.fixture
def table(tmp_path):
    """A table with public test records, its schema, and the words that name both."""
    draws = np.random.default_rng(0)
    ages = draws.integers(18, 95, 300)
    back = np.where(ages + draws.normal(0, 10, 300) > 60, "yes", "no")
    rows = [f"{age},{answer}" for age, answer in zip(ages, back, strict=True)]
    (tmp_path / "p.csv").write_text("\n".join(["age,back", *rows]))
    schema = dpsur.Schema(
        {"age": dpsur.Number(18, 95)},
        {"back": dpsur.Category(["no", "yes"])},
        test=TestPart(share=0.4),
    )
    schema.save(tmp_path / "p.json")
    return ["--task", f"csv:{tmp_path / 'p.csv'}", "--schema", str(tmp_path / "p.json")]


def test_tables_are_attacked_and_audited(table, tmp_path, capsys):
    run = str(tmp_path / "run")
    assert main(["train", *table, "--delta", "1e-3", "--out", run, "--quiet"]) == 0
    capsys.readouterr()
    assert main(["attack", "--release", run, *table, "--attacks", "gap", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0.3 < found["attacks"]["gap"]["auc"]["value"] < 0.7
    assert main(["attack", "--release", run]) == 2
    assert "name them with --task" in capsys.readouterr().err
    words = ["attack", *table, "--attacks", "gap", "--epochs", "3", "--json"]
    assert main(words) == 0
    private = ["--method", "dpsgd", "--delta", "1e-3"]
    assert main([*words[:-3], "--json", *private]) == 0
    capsys.readouterr()
    assert main(["audit", *table, "--count", "20", "--delta", "1e-3"]) == 0
    printed = capsys.readouterr()
    assert "not contradicted" in printed.out
    assert "updates at noise multiplier" in printed.err


@pytest.fixture
def visits(tmp_path):
    """Two tables of other persons, and the words that name them."""
    draws = np.random.default_rng(0)
    for name, people in (("in", range(60)), ("out", range(60, 100))):
        whose = [person for person in people for _ in range(1 + person % 5)]
        ages = draws.integers(18, 95, len(whose))
        rows = [f"p{who},{age},{int(age > 60)}" for who, age in zip(whose, ages, strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["who,age,back", *rows]))
    schema = dpsur.Schema({"age": dpsur.Number(18, 95)}, {"back": dpsur.Category([0, 1])})
    schema.save(tmp_path / "p.json")
    task = ["--task", f"csv:{tmp_path / 'in.csv'}", "--schema", str(tmp_path / "p.json")]
    return [*task, "--group-by", "who", "--delta", "1e-3", "--device", "cpu"]


def found_by(command, capsys):
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_persons_are_attacked_and_audited(visits, tmp_path, capsys):
    for more in ([], ["--method", "dpsgd", "--updates", "3", "--records-per-person", "2"]):
        words = [word for word in visits if more or word not in ("--delta", "1e-3")]
        found = found_by(["attack", *words, "--epochs", "2", *more], capsys)
        assert set(found["attacks"]) == {"gap", "confidence", "confidence, shuffled"}
        assert {one["members"] for one in found["attacks"].values()} == {10}  # persons
        assert {one["others"] for one in found["attacks"].values()} == {10}
    test, out = ["--test", str(tmp_path / "out.csv")], str(tmp_path / "run")
    assert main(["train", *visits, *test, "--out", out, "--quiet"]) == 0
    release = [word for word in visits if word not in ("--delta", "1e-3")]
    found = found_by(["attack", "--release", out, *release, *test], capsys)
    assert {one["members"] for one in found["attacks"].values()} == {40}
    audit = found_by(["audit", *visits, "--count", "40", "--updates", "3"], capsys)
    assert audit["details"]["records_per_person"] == 16
    assert main(["attack", "--release", out, *release, *test]) == 0
    assert "attacks on persons" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-records", "30"], "parts the records of a person"),
        (["--attacks", "rmia-online"], "of the records, not of the persons"),
        (["--group-by", "age"], "names persons and is an input"),
    ],
)
def test_what_parts_the_records_of_a_person_is_refused(options, message, visits, capsys):
    assert main(["attack", *visits, *options]) == 2
    assert message in capsys.readouterr().err


def test_persons_of_a_release_are_compared_with_others(visits, tmp_path, capsys):
    out = str(tmp_path / "run")
    assert main(["train", *visits, "--out", out, "--quiet"]) == 0
    for test, message in (("in.csv", "records in both files"), (None, "no test records")):
        more = [] if test is None else ["--test", str(tmp_path / test)]
        assert main(["attack", "--release", out, *visits, *more]) == 2
        assert message in capsys.readouterr().err
