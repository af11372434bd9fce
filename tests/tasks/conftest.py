"""A cache for each test."""

import pytest


@pytest.fixture(autouse=True)
def own_cache(request, tmp_path, monkeypatch):
    if request.node.get_closest_marker("data"):
        return
    monkeypatch.setenv("DPSUR_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DPSUR_DATA", raising=False)
