"""What all tests of commands share."""

import pytest


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """On a busy machine a command would say what it computes, which these tests do not expect."""
    monkeypatch.setattr("dpsur.status.PATIENCE", 600.0)
