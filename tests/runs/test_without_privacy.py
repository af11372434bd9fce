"""What a release says that has no privacy to speak of."""

import json
import math

import pytest

import dpsur
from dpsur.cli import main
from dpsur.runs.files import finite, to_json
from dpsur.runs.verification import verify
from tests.conftest import blobs, small_model

BUDGET = dpsur.Budget(epsilon=3.0, delta=1e-4)


def refuse(word):
    raise AssertionError(f"{word} is not JSON")


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "run"
    dpsur.fit(small_model(), blobs(), budget=BUDGET, method=dpsur.Nonprivate(updates=5),
              test_set=blobs(30, seed=2), out=folder)  # fmt: skip
    return folder / "release"


def test_the_statement_is_json_that_says_there_is_no_guarantee(release):
    statement = json.loads((release / "privacy.json").read_text(), parse_constant=refuse)
    guarantee = statement["guarantee"]
    assert guarantee["epsilon"] is None
    assert guarantee["proved"] is False
    assert "there is no guarantee" in guarantee["definition"]
    assert guarantee["theorem"] is guarantee["assumes"] is None
    assert set(statement["epsilon"].values()) == {None}
    metrics = (release.parent / "private" / "metrics.jsonl").read_text().splitlines()
    assert any(json.loads(line, parse_constant=refuse)["kind"] == "evaluation" for line in metrics)


def test_the_page_promises_nothing(release):
    page = (release / "PRIVACY.md").read_text()
    assert "**without any privacy**" in page
    for word in ("proved", "proof", "Accounting", "Theorem", "Budget", "satisfies", "not covered"):
        assert word not in page
    assert "| Privacy | none: the training was not private" in page


def test_it_is_verified_as_what_it_is(release, capsys):
    assert verify(release) == ([], dict.fromkeys(("published", "proven", "proven_lower",
                                                  "every_trial")))  # fmt: skip
    path = release / "privacy.json"
    honest = path.read_text()
    statement = json.loads(honest)
    statement["guarantee"] |= {"epsilon": 1.0, "proved": True}
    path.write_text(json.dumps(statement))
    faults, _ = verify(release)
    path.write_text(honest)
    assert faults
    assert main(["verify", str(release), "--json"]) == 0
    json.loads(capsys.readouterr().out, parse_constant=refuse)


def test_the_command_prints_json(tmp_path, capsys):
    arguments = ["--method", "nonprivate", "--updates", "2", "--device", "cpu", "--json"]
    assert main(["train", "--out", str(tmp_path / "run"), *arguments]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found["guarantee"]["epsilon"] is found["epsilon"]["proven"] is None
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    assert "privacy: none; epsilon is infinite" in capsys.readouterr().out


def test_what_json_has_no_word_for():
    values = {"a": [math.inf, 1.5, (math.nan, "x")], "b": {"c": -math.inf, "d": None, "e": 3}}
    assert finite(values) == {"a": [None, 1.5, [None, "x"]], "b": {"c": None, "d": None, "e": 3}}
    assert json.loads(to_json(values), parse_constant=refuse) == finite(values)
