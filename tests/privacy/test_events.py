import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from dpsur.errors import InvalidInputError
from dpsur.privacy.events import (
    CoinTest,
    Gaussian,
    Ledger,
    LossTest,
    NonPrivate,
    SampledGaussian,
    Trial,
    event_from_json,
    event_to_json,
)

rates = st.floats(1e-6, 1.0)
noises = st.floats(0.01, 100.0)
loss_tests = st.builds(LossTest, rates, noises, st.floats(-5, 5))
sampled = st.builds(SampledGaussian, rates, noises)
coins = st.builds(CoinTest, rates, st.floats(1.0, 50.0))
trials = st.builds(Trial, sampled, st.none() | loss_tests | coins)
events = st.one_of(
    st.just(NonPrivate()), st.builds(Gaussian, noises), sampled, loss_tests, coins, trials
)


@given(events)
def test_events_survive_a_file(event):
    assert event_from_json(event_to_json(event)) == event


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"kind": "Laplace", "noise_multiplier": 1.0},
        {"kind": "Gaussian"},
        {"kind": "Gaussian", "noise_multiplier": 1.0, "surprise": 2},
        {"kind": "Trial", "update": {"kind": "NonPrivate"}, "test": None, "more": 1},
    ],
)
def test_unknown_events_and_keys_are_errors(values):
    with pytest.raises(InvalidInputError):
        event_from_json(values)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.7, float("nan")])
def test_sample_rate_outside_the_unit_interval(rate):
    with pytest.raises(InvalidInputError, match="must be in"):
        SampledGaussian(rate, 1.0)


@pytest.mark.parametrize("noise", [0.0, -1.0, float("nan"), float("inf")])
def test_noise_must_be_positive_and_finite(noise):
    for make in (lambda: Gaussian(noise), lambda: SampledGaussian(0.1, noise)):
        with pytest.raises(InvalidInputError, match="noise_multiplier"):
            make()


@pytest.mark.parametrize(
    ("beta", "best", "worst"), [(0.0, 0.6915, 0.3085), (-1.0, 0.5, 0.1587), (1.0, 0.8413, 0.5)]
)
def test_acceptance_of_the_paper(beta, best, worst):
    test = LossTest(0.01, 1.0, beta)
    assert test.accept_max == pytest.approx(best, abs=5e-5)
    assert test.accept_min == pytest.approx(worst, abs=5e-5)


@given(st.floats(-1, 1), noises, st.floats(-5, 5))
def test_acceptance_is_a_normal_tail_and_falls_with_the_difference(at, noise, beta):
    test = LossTest(0.01, noise, beta)
    expected = norm.cdf((beta - at) / (2 * noise))
    assert test.acceptance(at) == pytest.approx(expected, rel=1e-9, abs=1e-300)
    assert test.accept_min <= test.acceptance(at) <= test.accept_max


def test_ledger_merges_equal_trials_and_keeps_order():
    first = Trial(SampledGaussian(0.1, 1.0))
    second = Trial(SampledGaussian(0.1, 2.0))
    ledger = Ledger(setup=(Gaussian(8.0),))
    for trial, accepted in [(first, 1), (first, 0), (second, 1), (first, 1)]:
        ledger = ledger.record(trial, updates=accepted)
    assert [(e.trials, e.updates) for e in ledger.entries] == [(2, 1), (1, 1), (1, 1)]
    assert (ledger.trials, ledger.updates) == (4, 3)
    assert Ledger.from_json(ledger.to_json()) == ledger


def test_ledger_refuses_more_updates_than_trials():
    with pytest.raises(InvalidInputError):
        Ledger().record(Trial(SampledGaussian(0.1, 1.0)), trials=1, updates=2)


def test_the_coin_accepts_every_improvement():
    coin = CoinTest(0.1, 4.0)
    assert (coin.accept_min, coin.accept_max) == (0.25, 1.0)


@pytest.mark.parametrize("ratio", [0.5, 0.0, -1.0, float("inf"), float("nan")])
def test_bad_ratios(ratio):
    with pytest.raises(InvalidInputError, match="accept_ratio"):
        CoinTest(0.1, ratio)
