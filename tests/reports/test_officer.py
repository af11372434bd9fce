"""The part of the report for a data protection officer."""

import re

import pytest

from dpsur.cli import main
from dpsur.reports.html import NOTES, declared_rows, epsilon_text, officer_section

STATEMENT = {
    "unit": "one record of the training set",
    "public": {},
    "guarantee": {"epsilon": 2.99991, "delta": 1e-5},
}


@pytest.mark.parametrize(
    ("epsilon", "text"),
    [(2.99991, "3.00"), (3.0, "3.00"), (0.12341, "0.124"), (10.01, "10.1"), (123.4, "124")],
)
def test_epsilon_has_three_digits_and_is_never_rounded_down(epsilon, text):
    assert epsilon_text(epsilon) == text
    assert float(text) >= epsilon


def test_what_nobody_said_is_said_to_be_missing():
    section = officer_section({}, STATEMENT)
    assert section.count("not stated") == 5
    assert "add up" in section
    said = ("triage", "<City>", "2026-01-02", "a registry", "none")
    full = officer_section(dict(zip(NOTES, said, strict=True)), STATEMENT)
    assert "not stated" not in full
    assert "&lt;City&gt;" in full
    assert "this model: 3.00" in full


def test_the_scale_places_epsilon():
    def place(epsilon):
        statement = {**STATEMENT, "guarantee": {"epsilon": epsilon, "delta": 1e-5}}
        return float(re.search(r'cx="([\d.]+)"', officer_section({}, statement)).group(1))

    places = [place(epsilon) for epsilon in (0.001, 0.1, 1.0, 3.0, 1000.0)]
    assert places == sorted(places)
    assert places[0] == 20
    assert places[-1] == 400 - 20
    nothing = {**STATEMENT, "guarantee": {"epsilon": None, "delta": 1e-5}}
    assert "<svg" not in officer_section({}, nothing)


def test_declarations_are_in_words():
    public = {
        "schema": {
            "columns": {"age": {"kind": "number", "low": 0, "high": 90}, "note": {"kind": "text"}},
            "target": {"ill": {"kind": "category", "values": ["no", "yes"]}},
        },
        "inputs": {"kind": "images", "shape": [3, 32, 32]},
        "labels": ["a", "b"],
    }
    rows = dict(declared_rows(public))
    assert rows["Columns (declared public)"] == "age: number from 0 to 90; note: text"
    assert rows["Target (declared public)"] == "ill: one of no, yes"
    assert rows["Inputs (declared public)"] == "images of 3 x 32 x 32 numbers"
    assert rows["Labels (declared public)"] == "a, b"


def test_the_command_takes_the_notes(trained, tmp_path, capsys):
    out = tmp_path / "page.html"
    words = ["report", str(trained), "--out", str(out), "--purpose", "triage", "--earlier", "none"]
    assert main(words) == 0
    page = out.read_text()
    assert "<td>triage</td>" in page
    assert "@media print" in page
    assert re.search(r"Date of this report</th><td>\d{4}-\d\d-\d\d</td>", page)
