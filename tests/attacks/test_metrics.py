"""Figures of attacks and their intervals."""

import itertools
from dataclasses import asdict

import numpy as np
import pytest
from scipy.stats import binom, norm

from dpsur.attacks.metrics import (
    LOW_RATES,
    Scores,
    area,
    measure,
    proportion,
    roc_curve,
)
from dpsur.errors import InvalidInputError
from reproduction.experiments.membership import (
    curve_of,
    gains_of,
    hits_from,
    hits_of,
    low_rate_interval,
)
from tests.statistics import FALSE_ALARM


def test_area_by_brute_force():
    rng = np.random.default_rng(0)
    members, others = rng.integers(0, 6, 30).astype(float), rng.integers(0, 5, 20).astype(float)
    pairs = [1.0 if a > b else 0.5 * (a == b) for a, b in itertools.product(members, others)]
    assert area(members, others).value == pytest.approx(np.mean(pairs))


def covered(shift: float, spread: float) -> int:
    """How many of 300 intervals of the area hold the true one for a shift of 1."""
    truth = norm.cdf(1 / np.sqrt(2))
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(300):
        found = area(shift + spread * rng.normal(size=150), rng.normal(size=250))
        hits += found.low <= truth <= found.high
    return hits


def test_the_interval_of_the_area_covers():
    assert covered(1.0, 1.0) >= binom.ppf(1e-6, 300, 0.94)
    assert covered(1.3, 1.0) < binom.ppf(1e-6, 300, 0.94)  # the control: another truth


def test_proportions():
    found = proportion(0, 10)
    assert (found.value, found.low) == (0.0, 0.0)
    assert found.high == pytest.approx(1 - 0.025 ** (1 / 10))
    assert proportion(10, 10).high == 1.0
    assert str(proportion(5, 10)) == "0.500 [0.187, 0.813]"


def test_measures_of_a_perfect_and_of_a_blind_attack():
    perfect = measure(Scores(np.ones(2000), np.zeros(1000), 0.5))
    for figure in (perfect.accuracy, perfect.balanced_accuracy, perfect.auc):
        assert figure.value == 1.0
    assert perfect.tpr_at_01_percent.value == 1.0
    rng = np.random.default_rng(2)
    noise = Scores.halved(rng.normal(size=2000), rng.normal(size=2000))
    blind = measure(noise, confidence=1 - FALSE_ALARM)
    for figure in (blind.accuracy, blind.balanced_accuracy, blind.auc):
        assert figure.low < 0.5 < figure.high
    assert blind.tpr_at_1_percent.low < 0.01 < blind.tpr_at_1_percent.high
    assert asdict(blind)["auc"]["value"] == blind.auc.value


def test_low_rates_count_the_best_others():
    others = np.arange(1000.0)
    members = np.concatenate([np.full(30, 999.5), np.full(70, 995.5), np.zeros(900)])
    found = measure(Scores(members, others, 0.5))
    assert found.tpr_at_01_percent.value == pytest.approx(0.03)
    assert found.tpr_at_1_percent.value == pytest.approx(0.10)


def test_the_interval_at_a_low_rate_covers():
    """The threshold is as uncertain as the share above it: with the share's alone it would not."""
    rate, count, audits = 0.01, 1000, 300
    truth = norm.sf(norm.isf(rate) - 1)
    rng = np.random.default_rng(3)
    held = held_by_the_share = 0
    for _ in range(audits):
        scores = Scores(rng.normal(1, 1, count), rng.normal(0, 1, count), 0.0)
        found = measure(scores).tpr_at_1_percent
        held += found.low <= truth <= found.high
        share = proportion(round(found.value * count), count)
        held_by_the_share += share.low <= truth <= share.high
    least = binom.ppf(1e-6, audits, 0.95)
    assert held >= least > held_by_the_share


def test_the_interval_at_a_low_rate_of_few_others_says_so():
    found = measure(Scores(np.ones(50), np.zeros(50), 0.5)).tpr_at_01_percent
    assert (found.value, found.low, found.high) == (1.0, 0.0, 1.0)


@pytest.mark.parametrize("steps", [None, 3, 40])
@pytest.mark.parametrize("others", [700, 6000])
@pytest.mark.parametrize("shift", [0.0, 1.5])
def test_intervals_from_a_thinned_curve_hold_those_of_the_scores(steps, others, shift):
    """Also where few scores differ, which hides thresholds from the curve."""
    rng = np.random.default_rng(5)
    members, rest = rng.normal(shift, 1, 900), rng.normal(0, 1, others)
    if steps is not None:
        members, rest = (np.round(part * steps / 4) for part in (members, rest))
    scores = Scores(members, rest, 0.0)
    measured = measure(scores)
    for rate, exact in zip(
        LOW_RATES, (measured.tpr_at_1_percent, measured.tpr_at_01_percent), strict=True
    ):
        low, high = low_rate_interval(hits_of(scores), 900, others, rate)
        assert low <= exact.low
        assert exact.high <= high
        if steps is None and others == 6000:
            assert high - low < 1.5 * (exact.high - exact.low)


def test_a_curve_without_hits_below_a_tie_says_little():
    """As of the gap attack: what is right is above what is wrong, and nothing lies between."""
    scores = Scores(np.ones(900), (np.arange(1000) < 700).astype(float), 0.5)
    hits = hits_of(scores)
    assert hits_from(gains_of(hits)) == hits
    assert sum(gains_of(hits)) == hits[-1]
    assert hits[-20] == 0
    assert curve_of(hits, 900, 1000)[1][-1] == 1.0
    assert low_rate_interval(hits_of(scores), 900, 1000, 0.01) == (0.0, 1.0)


def test_unequal_numbers_do_not_flatter():
    """All called members: right on two thirds, and half right on balance."""
    found = measure(Scores(np.ones(200), np.ones(100), 0.5))
    assert found.accuracy.value == pytest.approx(2 / 3)
    assert found.balanced_accuracy.value == 0.5


def test_roc():
    scores = Scores(np.array([3.0, 1.0]), np.array([2.0, 0.0]), 1.5)
    false, true = roc_curve(scores)
    assert false.tolist() == [0, 0, 0.5, 0.5, 1]
    assert true.tolist() == [0, 0.5, 0.5, 1, 1]
    with pytest.raises(InvalidInputError, match="empty"):
        Scores(np.array([]), np.array([1.0]), 0.0)
    with pytest.raises(InvalidInputError, match="NaN"):
        Scores(np.array([np.nan]), np.array([1.0]), 0.0)


def test_several_records_of_a_person_say_more_than_one():
    draw = np.random.default_rng(0)
    owners = np.arange(4000) // 8
    found = Scores.halved(draw.normal(0.3, 1.0, 4000), draw.normal(0.0, 1.0, 4000))
    persons = found.of_persons(owners, owners)
    assert len(persons.members) == 500
    assert persons.members[3] == pytest.approx(found.members[24:32].mean())
    assert measure(persons).auc.value > measure(found).auc.value + 0.1
    with pytest.raises(InvalidInputError, match="one person per record"):
        found.of_persons(owners[:-1], owners)
