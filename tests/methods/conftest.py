"""Accounting on a coarse mesh, which is certified as well, so that tiny problems settle quickly."""

import pytest

from dpsur.privacy.accountants import proven


@pytest.fixture(scope="package", autouse=True)
def coarse_divergences():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proven, "FINE", proven.COARSE)
        proven.event_divergence.cache_clear()
        yield
    proven.event_divergence.cache_clear()
