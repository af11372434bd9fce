"""The page that releases cite travels with the package."""

import tomllib
from pathlib import Path

import pytest

from dpsur.privacy.accounting import ACCOUNTINGS
from dpsur.privacy.statement import TEXTS, latest
from tests.cli.test_commands import dpsur

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "privacy.md"


def test_it_prints_the_page(capsys):
    status, out, _ = dpsur("proof", capsys=capsys)
    assert status == 0
    assert out == PAGE.read_text() + "\n"


def test_it_says_where_the_page_lies(capsys):
    place = Path(dpsur("proof", "--path", capsys=capsys)[1].strip())
    assert place.read_text() == PAGE.read_text()
    assert place.parent.name == "privacy"


def test_the_page_is_packed():
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "privacy/privacy.md" in packed["package-data"]["dpsur"]


@pytest.mark.parametrize("name", ACCOUNTINGS)
def test_a_theorem_is_stated_and_leads_to_its_proof(name):
    text = TEXTS[latest()][f"theorem {name}"]
    assert "`dpsur proof`" in text
    assert "docs/" not in text  # which whoever holds a release does not have
    assert text.count(". ") >= 2  # more than a name
