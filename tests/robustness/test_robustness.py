"""The short version of the soak: `make soak` runs the long one (docs/tables/reliability.md).

It runs in a process of its own, which forks, and which no other test has run in before.
"""

import json
import os
import random
import subprocess
import sys

import pytest

from dpsur.cli import COMMANDS
from tests.robustness import mutations
from tests.robustness.__main__ import PAGE, ROOT, ROWS, SHORT, read_rows, rendered
from tests.robustness.cases import FAMILIES, SMALL
from tests.robustness.harness import FAILURES, Outcome, fault_of

SECTIONS = ("controls", "crash points", "failing operations", "kills", "interruptions", "streams")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("soak") / "rows.jsonl"
    made = subprocess.run(
        [sys.executable, "-m", "tests.robustness", "--short", "--jobs", "1", "--rows", str(path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert path.exists(), made.stdout + made.stderr
    return read_rows(path)


def failures(rows, section, mark=""):
    return [
        f"{row['what']}: {row['kind']}: {row['text']}"
        for row in rows
        if row["section"] == "failure" and row["of"] == section and mark in row["what"]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
def test_faults(rows, section):
    assert [row for row in rows if row["section"] == section]
    assert failures(rows, section) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_mutated_inputs(rows, family):
    (row,) = [r for r in rows if r["section"] == "mutated inputs" and r["name"] == family]
    assert row["cases"] == SHORT.cases[family]
    assert failures(rows, "mutated inputs", f"'{family}'") == []


@pytest.mark.slow
def test_faults_put_in_on_purpose_are_found(rows):
    (row,) = [row for row in rows if row["section"] == "controls"]
    assert row["found"] == row["cases"] >= 6


def test_every_command_is_given_odd_options():
    assert set(SMALL) == set(COMMANDS)


@pytest.mark.skipif(not ROWS.exists(), reason="there are no rows: run make soak")
def test_the_page_holds_the_figures_of_the_rows():
    page, rows = PAGE.read_text(), read_rows(ROWS)
    assert page == rendered(page, rows)
    assert sum(row["cases"] for row in rows if row["section"] == "mutated inputs") >= 5000
    assert sum(row.get("kills", 0) for row in rows) >= 100
    assert [row for row in rows if row["section"] == "failure"] == []


def outcome(status=0, stderr="", number=None, interrupted=False):
    return Outcome(status, number, "", stderr, 0.0, interrupted)


@pytest.mark.parametrize(
    ("ended", "kind"),
    [
        (outcome(), None),
        (outcome(2, "dpsur: error: a value\n"), None),
        (outcome(2, "dpsur: warning: seeded\ndpsur: error: a value\n"), None),
        (outcome(130, "dpsur: stopped\n", interrupted=True), None),
        (outcome(2, ""), "unclear"),
        (outcome(2, "dpsur: error: one\nand two\n"), "unclear"),
        (outcome(120, ""), "unclear"),
        (outcome(2, "Traceback (most recent call last)\nValueError: x\n"), "traceback"),
        (outcome(None, number=11), "crash"),
        (outcome(None, number=9, interrupted=True), "hang"),
    ],
)
def test_what_counts_as_a_failure(ended, kind):
    fault = fault_of(ended)
    assert (None if fault is None else fault.kind) == kind
    assert kind is None or kind in FAILURES


def test_a_case_is_the_same_each_time():
    value = {"a": [1, 2.0, {"b": "text"}], "c": None}
    for seed in range(50):
        one, other = (mutations.mutate_json(value, random.Random(seed)) for _ in range(2))
        assert repr(one) == repr(other)
        content = bytes(range(100))
        assert mutations.mutate_bytes(content, random.Random(seed)) == mutations.mutate_bytes(
            content, random.Random(seed)
        )


def test_differing_paths():
    one = {"a": {"b": 1, "c": [1, 2]}, "d": True}
    assert mutations.differing(one, json.loads(json.dumps(one))) == []
    assert mutations.differing(one, {"a": {"b": 1.0, "c": [1, 3]}, "d": 1}) == ["a.c.1", "d"]
    assert mutations.differing(one, {"a": {"b": 1}, "d": True, "e": 0}) == ["a.c", "e"]
