"""The interval certificate: it agrees with the library, and does not trust what it is proposed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dpsur.privacy.accountants.proven import SelectiveUpdate, selective_divergence
from dpsur.privacy.statement import format_epsilon
from reproduction.experiments import certificate
from reproduction.presets.settings import paper_setting

ROWS = Path(__file__).parents[2] / "results" / "certificate.jsonl"
SETTING, ORDER = paper_setting("fmnist", 3), 5.76


def known(direction):
    update, test = SETTING.trial.update, SETTING.trial.gate
    four = SelectiveUpdate.of(update.sample_rate, update.noise_multiplier, test)
    return selective_divergence(four, ORDER, direction)


@pytest.mark.parametrize("direction", ["add", "remove"])
def test_a_coarse_certificate_lies_just_above_what_is_attained(direction, monkeypatch):
    monkeypatch.setattr(certificate, "NODES", 150)
    found = certificate._upper(certificate.one_update(SETTING, ORDER, direction).divergence)
    assert known(direction).lower < found < 1.01 * known(direction).upper


def test_lines_that_are_too_low_are_raised(monkeypatch):
    """A proposal of the library is not believed: a wrong one costs tightness, not validity."""
    real = certificate.envelope

    def too_low(frame, tolerance):
        found = real(frame, tolerance)
        lines = tuple(replace(line, height=line.height / 2) for line in found.lines)
        return replace(found, lines=lines)

    monkeypatch.setattr(certificate, "NODES", 150)
    monkeypatch.setattr(certificate, "envelope", too_low)
    found = certificate._upper(certificate.one_update(SETTING, ORDER, "add").divergence)
    assert found > known("add").lower


def test_the_stored_figures_agree_with_the_library():
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    assert {(r["config"]["dataset"], r["config"]["epsilon"]) for r in rows} == set(
        certificate.CHECKED
    )
    for row in rows:
        assert format_epsilon(row["interval"]) == format_epsilon(row["floating"])
