"""A release that claims what its mechanism does not give is found out, whatever the claim."""

import contextlib
import copy
import json
import math
import shutil

import pytest
import torch
from torch import nn

import dpsur
from dpsur.cli import main as dpsur_main
from dpsur.errors import PrivacyWarning
from dpsur.methods import METHODS
from dpsur.privacy.page import render_markdown
from dpsur.runs.files import to_json
from dpsur.runs.verification import MALFORMED, verify

RECORDS, DELTA = 200, 1e-3
KINDS = {
    "selective": ("dpsur", "proven", {"updates": 3, "noise_multiplier": 20.0}),
    "published": ("dpsur", "published", {"updates": 3, "noise_multiplier": 20.0}),
    "trials": ("dpsur", "every-trial", {"trials": 4, "noise_multiplier": 20.0}),
    "plain": ("dpsgd", "proven", {"updates": 3, "noise_multiplier": 20.0}),
    "choice": ("dpagd", "every-trial", {"updates": 4}),
    "norms": ("dpis", "proven", {"updates": 4}),
}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """One release of every kind, made when it is first asked for."""
    known = {}

    def release(kind):
        if kind not in known:
            name, accounting, options = KINDS[kind]
            torch.manual_seed(0)
            x = torch.randn(RECORDS, 4)
            y = (x.sum(1) > 0).long()
            with pytest.warns() if kind == "published" else pytest.warns(PrivacyWarning):
                run = dpsur.fit(
                    nn.Linear(4, 2), (x, y), budget=dpsur.Budget(3.0, 1e-2),
                    method=METHODS[name](batch_size=20, **options),
                    accounting=accounting, seed=1, device="cpu",
                )  # fmt: skip
            known[kind] = run.save(tmp_path_factory.mktemp(kind) / "run")
        return known[kind]

    return release


@pytest.fixture
def faults_after(released, tmp_path):
    """Change a statement, render its page to match, and verify."""
    count = iter(range(10_000))

    def faults(kind, change):
        folder = tmp_path / str(next(count))
        shutil.copytree(released(kind), folder)
        statement = json.loads((folder / "privacy.json").read_text())
        change(statement)
        (folder / "privacy.json").write_bytes(to_json(statement))
        with contextlib.suppress(*MALFORMED):  # a statement that has no page
            (folder / "PRIVACY.md").write_text(render_markdown(statement))
        return verify(folder)[0]

    return faults


@pytest.mark.parametrize("kind", KINDS)
def test_an_honest_release_has_no_faults(kind, faults_after):
    assert faults_after(kind, lambda statement: None) == []


def at(path, value):
    """A change of one value."""
    *parents, last = path.split(".")

    def change(statement):
        for name in parents:
            statement = statement[name]
        assert statement.get(last) != value
        statement[last] = value

    return change


CLAIMS = [
    ("selective", "unit", "one user"),
    ("selective", "adjacency", "none"),
    ("selective", "sampler", "shuffled"),
    ("selective", "tuning", "covered"),
    ("selective", "arithmetic", "exact"),
    ("selective", "released", ["nothing"]),
    ("selective", "released", ["the average of the weights"]),
    ("selective", "side_channels", []),
    ("plain", "side_channels", []),
    ("selective", "not_covered", []),
    ("selective", "public", None),
    ("selective", "public.records", 200),
    ("selective", "public.classes", 1),
    ("selective", "public.classes", "2"),
    ("selective", "public.keep_fraction", 1.5),
    ("selective", "guarantee.definition", "pure differential privacy"),
    ("selective", "guarantee.theorem", "anything"),
    ("selective", "guarantee.assumes", "nothing"),
    ("selective", "accepted_updates", 9999),
    ("selective", "accepted_updates", None),
    ("trials", "accepted_updates", 5),
    ("plain", "accepted_updates", 2),
    ("choice", "accepted_updates", 10**6),
    ("norms", "accepted_updates", 1),
    ("selective", "settings.noise_multiplier", 9.0),
    ("plain", "settings.noise_multiplier", 30.0),
    ("selective", "settings.updates", 9999),
    ("plain", "settings.updates", 2),
    ("trials", "settings.trials", 9999),
    ("selective", "settings.accept_ratio", 9.0),
    ("selective", "settings.gate", "none"),
    ("published", "settings.val_noise_multiplier", 9.0),
    ("published", "settings.accept_threshold", -1.0),
    ("choice", "settings.choice_epsilon", 1e-3),
    ("selective", "settings.on_reject", "keep-momentum"),
    ("selective", "settings.batch_size", 10),
    ("choice", "settings.val_batch_size", 10),
    ("norms", "settings.noise_multiplier", 9.0),
    ("norms", "settings.norm_noise_multiplier", 1e3),
    ("norms", "settings.norm_batch_size", 1),
    ("norms", "settings.refresh_every", 99),
    ("norms", "mechanism.trial.update.noise_multiplier", 1e3),
    ("norms", "mechanism.trial_cap", 99),
    ("norms", "mechanism.menu.note", "certified by nobody"),
    ("selective", "warnings", []),
    ("published", "warnings", []),
    ("selective", "warnings", ["all is well", "indeed"]),
    ("selective", "weights.file", "other.safetensors"),
    ("selective", "dataset_size", 0),
    ("selective", "dataset_size", 1000),
    ("selective", "guarantee.epsilon", float("nan")),
    ("selective", "random.seeded", "no"),
    ("selective", "note", "certified by nobody"),
]


@pytest.mark.parametrize(("kind", "path", "value"), CLAIMS)
def test_a_false_claim_is_a_fault(kind, path, value, faults_after):
    def change(statement):
        statement.setdefault("note", None)
        at(path, value)(statement)
        if path != "note":
            del statement["note"]

    assert faults_after(kind, change)


def test_a_step_with_another_test_is_a_fault(faults_after):
    def change(statement):
        for row in statement["mechanism"]["filter"]["steps"]:
            if row["step"]["kind"] == "Trial":
                row["step"]["test"]["choice_epsilon"] *= 0.5

    assert any("another one" in fault for fault in faults_after("choice", change))


def places(value, path=()):
    """Every place in a statement, with what is there; of long lists the first item only."""
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value[:1]) if isinstance(value, list) else items
    for key, part in items:
        yield (*path, key), part
        yield from places(part, (*path, key))


# What a reader may leave out or garble without touching a claim: it is recorded, not promised.
IDLE = ("versions", "settings", "method")


GARBAGE = ("x", -1, [], {}, None, 1e400)


def damages(statement):
    """Copies of a statement, each with one value missing or of another type."""
    for path, value in places(statement):
        if path == ("format",):  # then it is no statement at all, which is another error
            continue
        for other in (..., *GARBAGE):  # the first stands for leaving the value out
            if type(other) is type(value) or (value is None and other == math.inf):
                continue  # infinity is written as null
            whole = copy.deepcopy(statement)
            parent = whole
            for key in path[:-1]:
                parent = parent[key]
            if other is ...:
                del parent[path[-1]]
            else:
                parent[path[-1]] = other
            yield path, other, whole


@pytest.mark.parametrize("kind", ["selective", "choice", "norms"])
def test_no_damage_is_an_exception_or_passes(kind, released, faults_after):
    statement = json.loads((released(kind) / "privacy.json").read_text())
    passed = []
    for path, other, whole in damages(statement):
        if kind == "norms" and path[:2] != ("mechanism", "menu"):
            continue  # the rest is as in the others

        def change(stated, whole=whole):
            stated.clear()
            stated.update(whole)

        if not faults_after(kind, change) and path[0] not in IDLE:
            passed.append((path, other))
    assert passed == []


def test_a_run_cut_short_states_what_it_did(tmp_path, capsys):
    arguments = ["--max-updates", "2", "--batch-size", "64", "--noise-multiplier", "20"]
    assert dpsur_main(["train", "--quiet", "--out", str(tmp_path / "run"), *arguments]) == 0
    statement = json.loads((tmp_path / "run" / "release" / "privacy.json").read_text())
    assert statement["settings"]["updates"] == statement["accepted_updates"] == 2
    assert verify(tmp_path / "run")[0] == []


@pytest.mark.parametrize("count", [-1, -(10**10), 0.5])
def test_no_step_of_a_filter_is_a_credit(count, faults_after):
    def credit(statement):
        statement["mechanism"]["filter"]["steps"][0]["charged"] = count

    assert any("cannot be charged" in fault for fault in faults_after("choice", credit))
