"""Errors have stable codes, which the troubleshooting page explains."""

import ast
import json
import pickle
import re
from pathlib import Path

import pytest

from dpsur import errors
from dpsur.cli import main
from dpsur.errors import BudgetError, DpsurError, FileError, InvalidInputError

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
# Codes of errors that are explained by their own line alone.
GENERAL = {"error", "invalid-input", "budget", "interrupted"}
CLASSES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, DpsurError)
]


def given_codes():
    """The codes that calls in the package give."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.keyword) and node.arg == "code"
            if named and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                yield node.value.value


def test_every_code_has_its_entry_and_every_entry_its_code():
    known = {kind.code for kind in CLASSES} | set(given_codes())
    explained = re.findall(r"^### `(.+)`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(explained) == len(set(explained)) >= 20
    assert set(explained) == known - GENERAL


def test_every_class_has_a_code_of_its_own():
    codes = [kind.code for kind in CLASSES]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch("[a-z]+(-[a-z]+)*", code) for code in {*codes, *given_codes()})


@pytest.mark.parametrize(
    "error",
    [BudgetError("b", code="over-budget"), InvalidInputError("a", private="p"), FileError("c")],
    ids=lambda error: error.code,
)
def test_codes_reach_another_process(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.code, str(copy)) == (type(error), error.code, str(error))


def test_a_command_prints_the_code(tmp_path, capsys):
    assert main(["verify", str(tmp_path), "--json"]) == 2
    printed, err = capsys.readouterr()
    found = json.loads(printed)["error"]
    assert found["code"] == "no-release"
    assert err == f"dpsur: error: [no-release] {found['message']}\n"
