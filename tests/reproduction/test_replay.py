"""Planted frauds are found, each of them and nothing else."""

import pytest

from reproduction.experiments.replay import FRAUDS, HONEST, SHARES, STEPS, measure, stated


def check(row):
    assert row["exact"]
    assert row["found"] == row["planted"]
    assert row["false_alarms"] == 0
    assert row["caught"] >= stated(row["planted"] / STEPS) - 0.02  # of 10,000 draws


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("fraud", FRAUDS)
def test_planted_steps_are_found_at_the_stated_rate(fraud, share):
    row = measure(fraud, share, 11)
    assert row["planted"] > 0
    check(row)


def test_an_honest_run_passes():
    row = measure(HONEST, 0.0, 11)
    check(row)
    assert row["caught"] == row["elsewhere"] == 0
