"""Persons of whom several records join a batch one by one, and what a plan promises for groups."""

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import binom, norm

from dpsur.privacy.accountants import pld
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.conversion import for_group, for_replacement, samplings_of_persons
from dpsur.privacy.events import (
    Gaussian,
    LossTest,
    NoisyChoice,
    SampledGaussian,
    ThresholdedGaussian,
    Trial,
    event_from_json,
    event_to_json,
)
from dpsur.privacy.planning import repeated_plan
from dpsur.privacy.second_opinion import independent_epsilon
from tests.mutants import Mutant, law_tests

DELTA = 1e-5
# N, records of a person, rate, noise, steps
GRID = [
    (records, most, batch / records, noise, steps)
    for records in (500, 20_000)
    for batch in (5, 100)
    for most in (1, 2, 7, 16)
    for noise in (0.8, 2.0, 8.0)
    for steps in (1, 50, 1000)
]


def agrees_with_dp_accounting(grid):
    for records, most, rate, noise, steps in grid:
        event = SampledGaussian(rate, noise, most)
        delta = min(DELTA, 0.1 / records)
        ours = pld.composed_epsilon([(event, steps)], delta)
        parts = ((event, steps),)
        width = pld.cell_width(parts)
        if ours > 100 or width > pld.WIDEST_CELL:
            continue
        theirs = independent_epsilon(parts, width, delta)
        assert ours == pytest.approx(theirs, abs=1e-3, rel=1e-4), (
            records,
            most,
            rate,
            noise,
            steps,
        )
        assert ours >= theirs - 1e-5


def a_few_cells_agree():
    agrees_with_dp_accounting([(500, 4, 0.02, 2.0, 50), (20_000, 7, 0.005, 4.0, 30)])


@pytest.mark.slow
def test_epsilon_is_that_of_dp_accounting_on_the_grid():
    agrees_with_dp_accounting(GRID)


def by_integration(event, epsilon, direction):
    """The hockey-stick divergence of the mixture, by numerical integration."""
    counts = np.arange(event.records + 1)
    chances = binom.pmf(counts, event.records, event.sample_rate)
    s = event.noise_multiplier

    def apart(x):
        mixture = float(chances @ norm.pdf(x, counts, s))
        plain = norm.pdf(x, 0, s)
        first, second = (mixture, plain) if direction == "add" else (plain, mixture)
        return max(0.0, first - math.exp(epsilon) * second)

    ends = -12 * s, event.records + 12 * s
    return quad(apart, *ends, limit=2000, epsabs=1e-12, points=list(counts[:40]))[0]


def the_profile_is_the_integral():
    for event in (SampledGaussian(0.1, 1.0, 3), SampledGaussian(0.4, 2.0, 5)):
        for direction in ("add", "remove"):
            for epsilon in (-0.2, 0.0, 0.1, 0.5, 1.0):
                found = pld.hockey_stick(event, np.array([epsilon]), direction)[0]
                assert found == pytest.approx(by_integration(event, epsilon, direction), abs=1e-6)


def as_if_one_record(monkeypatch):
    real = pld.joining
    monkeypatch.setattr(
        pld, "joining", lambda event: real(SampledGaussian(event.sample_rate, 1.0, 1))
    )


def at_most_one_joins(monkeypatch):
    def joining(event):
        return np.array([0.0, 1.0]), np.array(
            [(1 - event.sample_rate) ** event.records, 1 - (1 - event.sample_rate) ** event.records]
        )

    monkeypatch.setattr(pld, "joining", joining)
    pld._total.cache_clear()
    pld.sampled_gaussian.cache_clear()


MUTANTS = [
    Mutant(the_profile_is_the_integral, as_if_one_record),
    Mutant(the_profile_is_the_integral, at_most_one_joins),
    Mutant(a_few_cells_agree, at_most_one_joins),
]
test_law_holds, test_mutant_is_killed = law_tests(MUTANTS)


@pytest.fixture(autouse=True)
def forget():
    yield
    pld._total.cache_clear()
    pld.sampled_gaussian.cache_clear()


def test_one_record_is_the_event_that_it_was():
    event = SampledGaussian(0.01, 1.0)
    assert event_to_json(event) == {
        "kind": "SampledGaussian",
        "sample_rate": 0.01,
        "noise_multiplier": 1.0,
    }
    several = SampledGaussian(0.01, 1.0, 4)
    assert event_from_json(event_to_json(several)) == several
    assert several.as_one.noise_multiplier == 0.25
    assert several.as_one.sample_rate == pytest.approx(1 - 0.99**4)


def test_more_records_cost_more_and_all_at_once_most():
    last = 0.0
    for most in (1, 2, 4, 8):
        event = SampledGaussian(0.02, 3.0, most)
        found = pld.composed_epsilon([(event, 200)], DELTA)
        assert last < found <= pld.composed_epsilon([(event.as_one, 200)], DELTA) + 1e-9
        last = found


def test_a_gate_over_records_of_persons_is_refused():
    trial = Trial(SampledGaussian(0.02, 3.0, 2), LossTest(0.1, 3.0, 0.0))
    for name in ("proven", "proven-pld"):
        with pytest.raises(ValueError, match="not covered where records of a person"):
            accounting_named(name).epsilon([(trial, 5)], DELTA)


# --- conversions ----------------------------------------------------------------------------------


def plan(event, steps=100, test=None, delta=DELTA, setup=()):
    trial, budget = Trial(event, test), Budget(1e3, delta)
    return repeated_plan(budget, "every-trial", trial, steps, setup=setup)


def test_a_group_of_one_is_the_guarantee():
    held = plan(SampledGaussian(0.02, 1.5))
    assert for_group(held, 1).epsilon == held.epsilon()


def test_a_group_of_a_gaussian_is_a_gaussian_of_less_noise():
    held = plan(SampledGaussian(1.0, 30.0), 10)
    exact = accounting_named("every-trial").epsilon([(Gaussian(30.0 / 3), 10)], DELTA)
    assert for_group(held, 3).epsilon == pytest.approx(exact, rel=1e-3)
    assert for_group(held, 3).exact


def test_a_group_is_below_k_times_epsilon_at_the_delta_that_this_has():
    """k times epsilon has a larger delta; at that delta the exact figure is far smaller."""
    held = plan(SampledGaussian(0.01, 1.0), 1000)
    found = for_group(held, 4)
    naive = 4 * held.epsilon()
    raised = DELTA * math.expm1(naive) / math.expm1(held.epsilon())
    assert found.delta == DELTA
    assert pld.composed_delta([(SampledGaussian(0.01, 1.0, 4), 1000)], naive) < raised / 3


def test_a_tested_trial_counts_its_test():
    tested = plan(SampledGaussian(0.02, 3.0), 50, LossTest(0.1, 3.0, 0.0))
    alone = plan(SampledGaussian(0.02, 3.0), 50)
    assert for_group(tested, 3).epsilon > for_group(alone, 3).epsilon
    chosen = plan(SampledGaussian(0.02, 3.0), 50, NoisyChoice(0.1, 0.2))
    assert for_group(chosen, 3).exact


def test_to_replace_a_record_is_at_least_the_gaussian_of_twice_the_distance():
    held = plan(SampledGaussian(1.0, 30.0), 10)
    exact = accounting_named("every-trial").epsilon([(Gaussian(15.0), 10)], DELTA)
    found = for_replacement(held)
    assert exact <= found.epsilon <= 1.15 * exact
    assert found.delta == DELTA
    assert held.epsilon() < found.epsilon


def test_a_group_that_shares_a_value_is_not_below_a_threshold():
    """The threshold of a learned schema hides a value of one record, not one of several."""
    noise, records = 3.0, 12
    held = plan(SampledGaussian(0.02, 3.0), setup=(ThresholdedGaussian(noise, DELTA / 10),))
    found = for_group(held, records)
    assert not found.exact
    # the chance that a value of all of them is listed, as no data set without them lists it
    listed = norm.sf(norm.isf(DELTA / 10) - (records - 1) / noise)
    assert found.delta >= listed > 1000 * DELTA


def test_a_selective_plan_is_converted_as_a_whole():
    import dpsur

    trial = Trial(SampledGaussian(0.02, 3.0), LossTest(0.05, 4.0, 0.0))
    held = dpsur.Account.for_updates(trial, 20, delta=1e-7).plan
    found = for_group(held, 3)
    assert not found.exact
    assert found.epsilon == 3 * held.epsilon()
    assert found.delta > 3e-7
    other = for_replacement(held)
    assert not other.exact
    assert other.delta == pytest.approx(1e-7 * (1 + math.exp(held.epsilon())))


def test_the_samplings_of_persons_are_compared_by_public_facts():
    found = samplings_of_persons(Budget(3.0, DELTA), 600, 5000, [1, 4], updates=50, rate=0.1)
    assert {(one.sampling, one.records_per_person) for one in found} == {
        ("person", 1),
        ("person", 4),
        ("record", 4),
    }
    for one in found:
        joining = one.records_per_person if one.sampling == "record" else 1
        event = SampledGaussian(0.1, one.noise_multiplier, joining)
        assert accounting_named("every-trial").epsilon([(event, 50)], DELTA) <= 3.0
        assert one.noise == one.noise_multiplier / one.batch_size
    persons = [one for one in found if one.sampling == "person"]
    assert [one.records_per_person for one in persons] == [4, 1]  # more records, the same noise
