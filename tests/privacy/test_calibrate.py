"""The public functions: what accepted updates cost, and how much noise a budget needs."""

import math

import pytest

from dpsur.errors import BudgetError, InvalidInputError
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.events import CoinTest, Gaussian, LossTest, SampledGaussian, Trial
from dpsur.privacy.planning import calibrate, selective_epsilon

USUAL = {"sample_rate": 0.05, "updates": 100, "delta": 1e-5}
TEST = LossTest(0.02, 1.5, 0.0)


def test_selective_epsilon_is_that_of_the_proven_accounting():
    for test in (None, TEST, CoinTest(0.02, 2.0)):
        expected = accounting_named("proven").planned(
            (), Trial(SampledGaussian(0.05, 1.2), test), 100, 1e-5
        )
        assert selective_epsilon(noise_multiplier=1.2, test=test, **USUAL) == expected


def test_of_a_test_only_the_acceptance_interval_matters():
    by_test = selective_epsilon(noise_multiplier=1.2, test=TEST, **USUAL)
    interval = (TEST.accept_min, TEST.accept_max)
    by_interval = selective_epsilon(
        noise_multiplier=1.2, acceptance=interval, val_sample_rate=0.02, **USUAL
    )
    assert by_interval == pytest.approx(by_test, rel=1e-9)
    certain = selective_epsilon(
        noise_multiplier=1.2, acceptance=(0.5, 0.5), val_sample_rate=0.02, **USUAL
    )
    assert certain < by_test  # a test that decides nothing costs nothing


def test_selection_and_setup_cost():
    plain = selective_epsilon(noise_multiplier=1.2, **USUAL)
    assert plain < selective_epsilon(noise_multiplier=1.2, test=TEST, **USUAL)
    assert plain < selective_epsilon(noise_multiplier=1.2, setup=(Gaussian(5.0),), **USUAL)


@pytest.mark.parametrize("test", [None, TEST])
def test_calibrated_noise_is_the_least_that_fits(test):
    noise = calibrate(epsilon=2.0, test=test, **USUAL)
    assert selective_epsilon(noise_multiplier=noise, test=test, **USUAL) <= 2.0
    assert selective_epsilon(noise_multiplier=0.999 * noise, test=test, **USUAL) > 2.0


def test_calibration_under_every_trial_charges_the_test():
    noise = calibrate(epsilon=3.0, test=TEST, accounting="every-trial", **USUAL)
    assert noise > calibrate(epsilon=3.0, accounting="every-trial", **USUAL)


def test_no_noise_pays_for_a_setup_that_spends_the_budget():
    with pytest.raises(BudgetError, match="whatever the noise"):
        calibrate(epsilon=0.05, setup=(Gaussian(1.0),), **USUAL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"acceptance": (0.5, 1.0)}, "give val_sample_rate"),
        ({"val_sample_rate": 0.1}, "belongs to acceptance"),
        ({"acceptance": (0.5, 1.0), "test": TEST}, "not both"),
        ({"acceptance": (0.0, 1.0), "val_sample_rate": 0.1}, "0 < smallest"),
        ({"acceptance": (0.9, 0.1), "val_sample_rate": 0.1}, "0 < smallest"),
        ({"updates": 0}, "updates"),
        ({"delta": 0.0}, "delta"),
        ({"sample_rate": 2.0}, "sample_rate"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
    ],
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(InvalidInputError, match=message):
        selective_epsilon(**{"noise_multiplier": 1.2, **USUAL, **changes})
