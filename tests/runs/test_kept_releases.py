"""Releases that were written once still verify, and edited ones are still refused."""

import json
from pathlib import Path

import pytest

from dpsur.privacy.statement import current, render_markdown, render_model_card
from dpsur.runs.verification import verify
from tests import damages
from tests.fixtures.make_releases import MAKERS

KEPT = Path(damages.__file__).parent / "fixtures" / "releases"
# Of 600 edited statements that many were refused when the releases were written.
REFUSED_THEN = 558
# The same releases in the format of today, where settings that were not used are left out.
REFUSED_NOW = 568


def test_there_is_a_release_of_every_kind():
    assert {path.name for path in KEPT.iterdir()} == set(MAKERS)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_kept_release_verifies(name):
    faults, figures = verify(KEPT / name)
    assert faults == []
    assert figures


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_pages_of_kept_releases_are_rendered_to_the_letter(name):
    """The words of a version never change: here are pages that were written with the first."""
    folder = KEPT / name / "release"
    statement = current(json.loads((folder / "privacy.json").read_text(encoding="utf-8")))
    assert (folder / "PRIVACY.md").read_text(encoding="utf-8") == render_markdown(statement)
    assert (folder / "README.md").read_text(encoding="utf-8") == render_model_card(statement)


@pytest.mark.slow
@pytest.mark.parametrize("converted", [False, True])
def test_edited_statements_are_refused_as_often_as_then(converted):
    found = [
        damages.is_refused(release, whole)
        for release, _, _, whole in damages.sampled(KEPT, 600, converted=converted)
    ]
    assert len(found) == 600
    assert sum(found) >= (REFUSED_NOW if converted else REFUSED_THEN)
