"""`dpsur statement`: forms for reviewers, and guarantees for groups and other neighbours."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpsur
from dpsur.cli import main
from dpsur.config import RunConfig
from dpsur.errors import InvalidInputError
from dpsur.privacy.conversion import for_group
from dpsur.privacy.statement import plan_from_statement
from dpsur.reports.formats import OPEN
from dpsur.runs.verification import read_statement, statement_faults

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


def by_fit(folder):
    data = torch.randn(60, 6, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    dpsur.fit(
        nn.Linear(6, 3),
        data,
        budget=dpsur.Budget(1.0, 1e-3),
        method=dpsur.Dpsgd(updates=20, batch_size=6),
        group_size=3,
        progress=False,
        out=folder,
    )


def by_loop(folder):
    model, engine = nn.Linear(6, 3), dpsur.PrivacyEngine()
    data = TensorDataset(torch.randn(60, 6), torch.arange(60) % 3)
    model, _, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=6),
        noise_multiplier=2.0,
        max_grad_norm=1.0,
        epochs=1,
        group_size=3,
    )
    step = engine.private_step(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    for batch in loader:
        step(batch)
    engine.save(folder)


def by_command(folder):
    options = ["--group-size", "3", "--epsilon", "1", "--delta", "1e-4", "--max-updates", "2"]
    assert main(["train", "--out", str(folder), "--device", "cpu", *options]) == 0


@pytest.mark.parametrize("train", [by_fit, by_loop, by_command])
def test_a_guarantee_for_groups_is_stated_and_recomputed(train, tmp_path, capsys):
    folder = tmp_path / "run"
    train(folder)
    stated = read_statement(folder)
    plan, group = plan_from_statement(stated), stated["group"]
    assert stated["public"]["group_size"] == 3
    assert group["epsilon"] == pytest.approx(for_group(plan, 3).epsilon, rel=1e-9)
    assert group["epsilon"] > 1.5 * stated["guarantee"]["epsilon"]
    assert "nothing was trained for this unit" in group["how"]
    page = (folder / "release" / "PRIVACY.md").read_text(encoding="utf-8")
    assert "Converted guarantee, to add or remove a group of 3 records" in page
    assert main(["verify", str(folder)]) == 0
    said = capsys.readouterr().out
    assert train is not by_command or "add or remove a group of 3 records: epsilon" in said
    for edited in (
        {"group": {**group, "epsilon": 0.9 * group["epsilon"]}},
        {"group": {**group, "how": "by magic"}},
        {"public": {**stated["public"], "group_size": 2}},
        {"public": {**stated["public"], "group_size": 0}},
        {"holdout": {}},
    ):
        assert statement_faults({**stated, **edited})[0] != []
    assert statement_faults({k: v for k, v in stated.items() if k != "group"})[0] != []


def test_groups_and_held_out_records_exclude_each_other():
    with pytest.raises(InvalidInputError, match="no guarantee for groups; leave out group_size"):
        RunConfig(group_size=2, holdout=0.2)


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
