"""A release that claims what its mechanism does not give is found out, whatever the claim."""

import contextlib
import copy
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import dpsur
from dpsur.cli import main as dpsur_main
from dpsur.errors import InvalidInputError, PrivacyWarning
from dpsur.methods import METHODS
from dpsur.privacy.statement import (
    TEXTS,
    Words,
    latest,
    plan_from_statement,
    render_markdown,
    render_model_card,
)
from dpsur.runs import verification
from dpsur.runs.files import to_json
from dpsur.runs.verification import CHECKED, MALFORMED, NOT_CHECKED, verify
from tests.damages import edits, places

ROOT = Path(__file__).parent.parent.parent
RECORDS, DELTA = 200, 1e-3
THRESHOLD = {"accept_threshold": -0.5}
KINDS = {
    # not the usual threshold, which a damaged value may be
    "selective": ("dpsur", "proven", {"updates": 3, "noise_multiplier": 20.0, **THRESHOLD}),
    "distributions": ("dpsur", "proven-pld", {"updates": 3, "noise_multiplier": 20.0}),
    "published": ("dpsur", "published", {"updates": 3, "noise_multiplier": 20.0}),
    "trials": ("dpsur", "every-trial", {"trials": 4, "noise_multiplier": 20.0}),
    "plain": ("dpsgd", "proven", {"updates": 3, "noise_multiplier": 20.0}),
    "choice": ("dpagd", "every-trial", {"updates": 4}),
    "norms": ("dpis", "proven", {"updates": 4}),
    "gated norms": ("dpis", "proven", {"updates": 4, "gate": "coin", "accept_ratio": 1.5}),
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
            (folder / "README.md").write_text(render_model_card(statement))
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
    ("selective", "settings.adam_beta2", 0.9),
    ("plain", "settings.adam_beta2", 0.999),
    ("plain", "settings.val_noise_multiplier", 1.0),
    ("selective", "texts", 99),
    ("selective", "computed.tf32", True),
    ("selective", "computed.bf16", 1),
    ("selective", "hide_rejections", "constant"),
    ("plain", "hide_rejections", "delay"),
    ("selective", "settings.gate", "none"),
    ("published", "settings.val_noise_multiplier", 9.0),
    ("published", "settings.accept_threshold", 0.0),
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
    ("selective", "epsilon.proven_pld", 0.01),
    ("distributions", "epsilon.proven_pld", 0.01),
    ("distributions", "guarantee.accounting", "proven"),
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


# Settings that may be anything valid, None among it.
OPEN = {"average_decay", "adam_beta1", "adam_beta2", "adam_eps", "momentum"}


@pytest.mark.parametrize(
    "kind",
    ["selective", *(pytest.param(k, marks=pytest.mark.slow) for k in ("choice", "norms"))],
)
def test_no_damage_is_an_exception_or_passes(kind, released, faults_after):
    statement = json.loads((released(kind) / "privacy.json").read_text())
    passed = []
    for path, other, whole in damages(statement):
        if kind == "norms" and path[:2] != ("mechanism", "menu"):
            continue  # the rest is as in the others

        def change(stated, whole=whole):
            stated.clear()
            stated.update(whole)

        if not faults_after(kind, change) and not (path[0] == "settings" and path[1] in OPEN):
            passed.append((path, other))
    assert passed == []


# What the page says that verify cannot check, as places of a statement.
FREE_SETTINGS = {
    *("learning_rate", "momentum", "adam_beta1", "adam_beta2", "adam_eps", "max_grad_norm"),
    *("average_decay", "loss_clip", "largest_step", "raise_by", "step_sizes"),
}
PARTS = {
    "distributions": ("epsilon", "guarantee"),
    "choice": ("mechanism.filter", "settings.choice", "settings.updates"),
    "norms": ("mechanism.menu.steps", "settings.norm", "settings.refresh"),
    "gated norms": ("mechanism.filter", "settings.norm", "settings.refresh"),
}
# How many of the charged trials were accepted, and how many a filter let pass. The share of choices
# is a tenth of the budget: a hundredth of it more or less plans the same run within the tolerance.
WITHIN_THE_PLAN = {
    "trials": {"accepted_updates"},
    "choice": {"accepted_updates", "mechanism.filter.steps.0.charged", "settings.choice_share"},
}
FREE = {"budget.epsilon", *(f"settings.{name}" for name in FREE_SETTINGS)}


# One verification of a filter or of importance sampling takes long.
COSTLY = ("choice", "norms")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow) if k in COSTLY else k for k in KINDS]
)
def test_every_edit_is_noticed_that_can_be(kind, released, faults_after):
    """Dropped keys, added keys and other values of a genuine statement, one at a time."""
    statement = json.loads((released(kind) / "privacy.json").read_text(encoding="utf-8"))
    passed = []
    for where, what, whole in edits(statement):
        if kind in PARTS and not str(where).startswith(PARTS[kind]):
            continue  # the rest is as in the others, and each takes a second

        def change(stated, whole=whole):
            stated.clear()
            stated.update(whole)

        if not faults_after(kind, change):
            passed.append((where, what))
    missed = {(where, what) for where, what in passed if where not in FREE}
    assert all(what not in ("dropped", "added") for _, what in passed)
    assert {where for where, _ in missed} <= WITHIN_THE_PLAN.get(kind, set())


def test_every_list_that_verify_shows_is_on_the_page():
    page = " ".join((ROOT / "docs" / "threat_model.md").read_text(encoding="utf-8").split())
    for item in (*CHECKED, *NOT_CHECKED):
        assert item in page


def with_statistics(tmp_path):
    """A release whose weights hold private statistics of its features."""
    x = torch.randn(RECORDS, 3, 4, 4)
    y = (x.sum((1, 2, 3)) > 0).long()
    with pytest.warns(PrivacyWarning):
        run = dpsur.fit(
            nn.Sequential(nn.Flatten(), nn.Linear(48, 2)), (x, y), budget=dpsur.Budget(3.0, 1e-2),
            method=METHODS["dpsgd"](batch_size=20, updates=3, noise_multiplier=20.0),
            normalisation="private", seed=1, device="cpu",
        )  # fmt: skip
    return run.save(tmp_path / "run")


def edited(folder, change):
    """The faults of a release after a change whose figures and page were made to match."""
    statement = json.loads((folder / "privacy.json").read_text(encoding="utf-8"))
    change(statement)
    figures = plan_from_statement(statement).figures()
    statement["epsilon"] = figures
    statement["guarantee"]["epsilon"] = figures["proven"]
    (folder / "privacy.json").write_bytes(to_json(statement))
    (folder / "PRIVACY.md").write_text(render_markdown(statement), encoding="utf-8")
    (folder / "README.md").write_text(render_model_card(statement), encoding="utf-8")
    return verify(folder)[0]


def no_setup(statement):
    statement["mechanism"]["setup"] = []


def other_setup(statement):
    del statement["mechanism"]["setup"][0]


def made_up_method(statement):
    statement["method"] = "dp-magic"


def more_settings(statement):
    statement["settings"]["certified"] = True


def fewer_settings(statement):
    del statement["settings"]["momentum"]


def more_versions(statement):
    statement["versions"]["auditor"] = "1.0"


def fewer_versions(statement):
    del statement["versions"]["torch"]


CONTRADICTIONS = {
    no_setup: ("_setup_faults", "the weights hold statistics of features"),
    other_setup: ("_setup_faults", "mechanism.setup is not what private feature statistics"),
    made_up_method: ("plan_faults", "method 'dp-magic' is none"),
    more_settings: ("plan_faults", "settings.certified is not part"),
    fewer_settings: ("plan_faults", "settings.momentum is missing"),
    more_versions: ("_version_faults", "versions.auditor is not part"),
    fewer_versions: ("_version_faults", "versions.torch is missing"),
}


@pytest.mark.parametrize("change", CONTRADICTIONS, ids=lambda change: change.__name__)
def test_a_contradiction_is_found_by_the_check_that_is_for_it(change, tmp_path, monkeypatch):
    """The old behaviour, without the check, is the mutant that lets it pass."""
    check, message = CONTRADICTIONS[change]
    folder = with_statistics(tmp_path)
    assert verify(folder)[0] == []
    assert any(fault.startswith(message) for fault in edited(folder, change))
    monkeypatch.setattr(verification, check, lambda *_: [])
    assert not any(fault.startswith(message) for fault in verify(folder)[0])


def test_statistics_that_the_weights_do_not_hold_are_a_fault(released, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(released("plain"), folder)
    charged = [{"kind": "Gaussian", "noise_multiplier": noise} for noise in (40.0, 40.0, 8.0, 8.0)]
    faults = edited(folder, lambda statement: statement["mechanism"].update(setup=charged))
    assert any("that the weights do not hold" in fault for fault in faults)


def test_a_key_that_is_given_twice_is_an_error(released, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(released("plain"), folder)
    text = (folder / "privacy.json").read_text(encoding="utf-8")
    (folder / "privacy.json").write_text('{"method": "dpsur",' + text[1:], encoding="utf-8")
    with pytest.raises(InvalidInputError, match="'method' is given twice"):
        verify(folder)


def test_a_locale_without_utf_8_reads_a_release(released):
    """`LC_ALL=C` without Python's own UTF-8 mode, as in a bare container."""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "dpsur", "verify", str(released("plain"))]
    found = subprocess.run(
        command, env={**os.environ, **plain}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert "the statement follows from its parameters" in found.stdout


def test_every_text_file_is_opened_with_its_encoding():
    opened = re.compile(r"(read_text|write_text)\(|(?<!os)\.open\(\"[wa]\"|fdopen\(\w+, \"w\"")
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for found in opened.finditer(text):
            call = text[found.start() : found.start() + 200]
            assert "encoding=" in call, f"{path}: {call}"


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

    assert faults_after("choice", credit)


# --- texts ------------------------------------------------------------------------------------


@pytest.fixture
def reworded(monkeypatch):
    """An installation with one more version of texts, in which everything is said otherwise."""
    words = {name: f"{text} In other words." for name, text in TEXTS[latest()].items()}
    monkeypatch.setitem(TEXTS, latest() + 1, Words(words))


def test_a_release_keeps_the_words_that_it_was_written_with(released, request):
    folder = released("plain")
    request.getfixturevalue("reworded")
    stated = json.loads((folder / "privacy.json").read_text(encoding="utf-8"))
    assert stated["texts"] == latest() - 1
    assert verify(folder)[0] == []


def test_new_releases_have_the_latest_words(reworded, tmp_path):
    folder = with_statistics(tmp_path)
    stated = json.loads((folder / "privacy.json").read_text(encoding="utf-8"))
    assert stated["texts"] == latest()
    assert stated["tuning"].endswith("In other words.")
    assert "In other words." in (folder / "PRIVACY.md").read_text(encoding="utf-8")
    assert verify(folder)[0] == []
    assert edited(folder, lambda statement: statement.update(texts=latest() - 1))


def test_a_version_of_texts_that_is_not_installed_is_named(faults_after):
    (fault,) = faults_after("plain", lambda statement: statement.update(texts=7))
    assert "texts 7" in fault
    assert "update dpsur" in fault


@pytest.mark.parametrize("kind", KINDS)
def test_a_statement_lists_the_settings_that_were_used(kind, released):
    settings = json.loads((released(kind) / "privacy.json").read_text())["settings"]
    unused = {"adam_beta1", "adam_beta2", "adam_eps", "blocks", "clip_norm", "patience"}
    assert not unused & settings.keys()
    assert None not in settings.values()
