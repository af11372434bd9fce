"""Tiny problems: the published accounting is contradicted, the proved ones are not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from dpsur.audits.bounds import CONTRADICTED, NOT_CONTRADICTED
from dpsur.mechanism.streams import NOISE, SETUP, Stream, Streams
from reproduction.audits.exact import Setting, densities
from reproduction.audits.mechanism import UNITS, audit_exactly, audit_unit
from reproduction.audits.sampler import accepted_updates, draw_trials, in_the_loop
from reproduction.audits.worst_case_problems import (
    CoinSetting,
    dead_unit,
    exact_epsilon,
    gate_alone,
    no_selection,
)
from tests.statistics import FALSE_ALARM, assert_frequency

SMALL = Setting(6, 3, 1.0, 3, 0.5, 2, -0.5, delta=0.01)
SMALL_COIN = CoinSetting(6, 3, 1.0, 3, 1.0, 2, 0.0, delta=0.01, accept_ratio=5.0)


def stream() -> Stream:
    return Streams(7, torch.device("cpu")).at(SETUP)[NOISE]


def same_law(first, second) -> bool:
    return stats.ks_2samp(first.flatten().numpy(), second.flatten().numpy()).pvalue > FALSE_ALARM


@pytest.fixture(scope="module")
def looped():
    return in_the_loop(dead_unit(SMALL), 150, seed=3, present=True)


def test_many_at_once_have_the_law_of_the_loop(looped):
    assert looped.shape == (150, 2)
    assert same_law(looped, accepted_updates(dead_unit(SMALL), 20_000, stream(), present=True))
    coin = gate_alone(SMALL_COIN)
    at_once = accepted_updates(coin, 20_000, stream(), present=True)
    assert same_law(in_the_loop(coin, 100, seed=3, present=True), at_once)


def test_other_laws_are_told_apart(looped):
    """The control of the test above: the same comparison sees selection, and a shift."""
    unselected = draw_trials(dead_unit(SMALL), 20_000, stream(), present=True).z
    assert not same_law(looped, unselected)
    at_once = accepted_updates(dead_unit(SMALL), 20_000, stream(), present=True)
    assert not same_law(looped, at_once + 1)


def test_the_score_is_the_ratio_of_the_exact_densities():
    unit = dead_unit(SMALL)
    without, with_x, _ = densities(unit.instance, cells=2000)
    edges = np.linspace(-10.0, 11.0, 2001)
    middle = 0.5 * (edges[1:] + edges[:-1])
    inside = np.abs(middle) < 5
    gap = np.log(with_x / without)[inside] - unit.log_ratio(middle)[inside]
    # all but the cells in which the test changes its mind, where the score is interpolated
    assert np.quantile(np.abs(gap - np.median(gap)), 0.97) < 1e-3
    assert np.ptp(unit.log_ratio(middle)[inside]) > 1


def test_arrays_and_tensors_share_the_losses():
    z = np.linspace(-5, 5, 101)
    for make in (dead_unit, gate_alone, no_selection):
        unit = make(SMALL)
        for loss in (unit.others, unit.extra):
            assert loss(torch.from_numpy(z)).numpy() == pytest.approx(loss(z), rel=1e-12)
        weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
        assert torch.autograd.grad(unit.others(weight), weight)[0] == 0
        assert torch.autograd.grad(unit.extra(weight), weight)[0] <= -1


def test_acceptance_of_the_trials():
    unit = replace(dead_unit(SMALL), others=lambda w: 0.0 * w - 1.0, extra=lambda w: 0.0 * w - 1.0)
    trials = draw_trials(unit, 100_000, stream(), present=True)
    empty = 0.5**6
    expected = (1 - empty) * SMALL.test.accept_max + empty * SMALL.test.acceptance(0.0)
    assert_frequency(int(trials.accept.sum()), 100_000, expected)


@pytest.fixture(scope="module")
def findings():
    names = ("dead unit, 1 update", "dead unit, 4 updates", "no selection, 4 updates")
    found = [
        finding
        for name in names
        for charges in ("updates", "trials")
        for finding in audit_unit(name, UNITS[name](), charges, 15_000, confidence=0.95)
    ]
    return {(finding.subject, finding.accounting): finding for finding in found}


def test_the_published_accounting_is_contradicted(findings):
    finding = findings["dead unit, 4 updates", "published"]
    assert finding.lower > finding.claimed
    assert finding.verdict == CONTRADICTED
    assert findings["dead unit, 1 update", "published"].verdict == CONTRADICTED


def test_proved_accountings_are_not(findings):
    for (_, accounting), finding in findings.items():
        assert finding.lower > 0.5  # the audit has seen something
        if accounting != "published":
            assert finding.verdict == NOT_CONTRADICTED, finding
        if finding.exact is not None:
            assert finding.lower < finding.exact
    assert findings["no selection, 4 updates", "published"].verdict == NOT_CONTRADICTED


def test_exact_laws_need_no_confidence():
    verdicts = {
        f.accounting: f.verdict for f in audit_exactly("unit", dead_unit(SMALL).repeated(8))
    }
    assert set(verdicts) == {"proven", "proven-pld", "published"}
    assert verdicts["proven"] == verdicts["proven-pld"] == NOT_CONTRADICTED
    four = {f.accounting: f for f in audit_exactly("four", UNITS["dead unit, 4 updates"]())}
    assert four["published"].verdict == CONTRADICTED
    assert four["proven"].verdict == four["proven-pld"].verdict == NOT_CONTRADICTED
    assert four["proven-pld"].claimed < four["proven"].claimed
    assert exact_epsilon(no_selection(SMALL), "add") < exact_epsilon(dead_unit(SMALL), "add") + 3
