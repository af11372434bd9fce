"""Releases that were written once still verify, and edited ones are still refused."""

from pathlib import Path

import pytest

from dpsur.runs.verification import verify
from tests import damages
from tests.fixtures.make_releases import MAKERS

KEPT = Path(damages.__file__).parent / "fixtures" / "releases"
# Of 600 edited statements that many were refused when the releases were written.
REFUSED_THEN = 558


def test_there_is_a_release_of_every_kind():
    assert {path.name for path in KEPT.iterdir()} == set(MAKERS)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_kept_release_verifies(name):
    faults, figures = verify(KEPT / name)
    assert faults == []
    assert figures


@pytest.mark.slow
def test_edited_statements_are_refused_as_often_as_then():
    found = [
        damages.is_refused(release, whole) for release, _, _, whole in damages.sampled(KEPT, 600)
    ]
    assert len(found) == 600
    assert sum(found) >= REFUSED_THEN
