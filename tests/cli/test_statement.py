"""`dpsur statement`: forms for reviewers, and guarantees for groups and other neighbours."""

import json

import pytest
import torch
from torch import nn

import dpsur
from dpsur.cli import main
from dpsur.privacy.conversion import for_group
from dpsur.reports.formats import OPEN

DEPLOYMENT = ("product", "dp_flavor", "privacy_loss", "model", "accounting", "implementation")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("statement") / "run"
    data = torch.randn(60, 6, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    return dpsur.fit(
        nn.Linear(6, 3),
        data,
        budget=dpsur.Budget(2.0, 1e-3),
        method=dpsur.Dpsgd(updates=20, batch_size=6),
        progress=False,
        out=folder,
    )


def said(capsys, run, *options):
    assert main(["statement", str(run.saved), *options]) == 0
    return capsys.readouterr().out


def test_the_text_is_that_of_the_release(run, capsys):
    page = (run.saved / "PRIVACY.md").read_text(encoding="utf-8")
    assert said(capsys, run).strip() == page.strip()
    assert "zero out a record (REPLACE_SPECIAL)" in page
    assert json.loads(said(capsys, run, "--format", "json"))["guarantee"]["delta"] == 1e-3


def test_reviewers_get_all_fields_and_what_is_open_is_named(run, capsys):
    found = json.loads(said(capsys, run, "--format", "nist", "--json"))
    assert found["privacy guarantee"]["unit of privacy"] == run.statement["unit"]
    assert found["data collection exposure"] == OPEN
    found = json.loads(said(capsys, run, "--format", "registry", "--json"))["deployment"]
    assert set(DEPLOYMENT) < set(found)
    assert found["privacy_loss"]["privacy_parameters"]["delta"] == 1e-3
    assert "privacy_unit: record-level" in said(capsys, run, "--format", "registry")


def test_a_group_has_the_converted_guarantee(run, capsys):
    found = json.loads(said(capsys, run, "--group-size", "3", "--json"))
    exact = for_group(run.plan, 3)
    assert float(found["epsilon"]) == pytest.approx(exact.epsilon, abs=1e-4)
    assert found["delta"] == 1e-3
    assert "nothing was trained for this unit" in found["meaning"]
    replaced = json.loads(said(capsys, run, "--adjacency", "replace-one", "--json"))
    stated = run.statement["guarantee"]["epsilon"]
    assert stated < float(replaced["epsilon"]) < float(found["epsilon"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--group-size", "0"], "group_size"),
        (["--group-size", "2", "--adjacency", "replace-one"], "not both"),
    ],
)
def test_what_has_no_answer_is_refused(run, capsys, options, words):
    assert main(["statement", str(run.saved), *options]) == 2
    assert words in capsys.readouterr().err
    assert main(["statement", str(run.saved.parent / "private")]) == 2
