import csv
import math
from pathlib import Path

import dp_accounting
import mpmath
import pytest
from dp_accounting import pld as reference_pld
from dp_accounting import rdp as reference_rdp
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsur.errors import InvalidInputError
from dpsur.privacy.accounting import ACCOUNTINGS, accounting_named
from dpsur.privacy.events import Gaussian, LossTest, NonPrivate, SampledGaussian, Trial
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.plan import Budget, Request, make_plan
from dpsur.privacy.rdp import PAPER_ORDERS, epsilon_from_rdp, sampled_gaussian_rdp

DELTA = 1e-5
TRIAL = Trial(SampledGaussian(0.05, 1.5), LossTest(0.01, 1.2, -1.0))
SETTINGS = Path(__file__).parent / "paper_settings.csv"


def test_without_sampling_the_divergence_is_the_closed_form():
    for sigma in (0.5, 1.0, 7.0):
        for alpha in (2, 17, 64):
            assert sampled_gaussian_rdp(1.0, sigma, alpha) == alpha / (2 * sigma**2)


@pytest.mark.parametrize(("q", "sigma"), [(0.01, 1.0), (0.034, 2.15), (0.5, 0.7), (1e-5, 20.0)])
@pytest.mark.parametrize("alpha", [2, 5, 32, 64])
def test_divergence_against_high_precision(q, sigma, alpha):
    mpmath.mp.dps = 60
    q_, s_ = mpmath.mpf(q), mpmath.mpf(sigma)
    terms = [
        mpmath.binomial(alpha, k)
        * (1 - q_) ** (alpha - k)
        * q_**k
        * mpmath.exp((k * k - k) / (2 * s_**2))
        for k in range(alpha + 1)
    ]
    exact = mpmath.log(mpmath.fsum(terms)) / (alpha - 1)
    assert sampled_gaussian_rdp(q, sigma, alpha) == pytest.approx(float(exact), rel=1e-6, abs=1e-14)


def test_divergence_agrees_with_dp_accounting():
    accountant = reference_rdp.RdpAccountant(list(PAPER_ORDERS))
    accountant.compose(
        dp_accounting.PoissonSampledDpEvent(0.034, dp_accounting.GaussianDpEvent(2.15))
    )
    for alpha, theirs in zip(PAPER_ORDERS, accountant.rdp, strict=True):
        assert sampled_gaussian_rdp(0.034, 2.15, alpha) == pytest.approx(theirs, rel=1e-9)


def test_conversion_lemma():
    alpha, rdp = 10, 0.5
    expected = 0.5 + math.log(9 / 10) - (math.log(DELTA) + math.log(10)) / 9
    assert epsilon_from_rdp(rdp, alpha, DELTA) == pytest.approx(expected)


def paper_rows():
    with SETTINGS.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("epsilon", "expected"), [(1, 651), (2, 680), (3, 1076), (4, 1946)])
def test_published_number_of_updates_for_fashion_mnist(epsilon, expected):
    row = next(r for r in paper_rows() if r["dataset"] == "fmnist")
    size = 60000
    test = LossTest(
        int(row["val_batch"]) / size, float(row[f"sigma_v_eps{epsilon}"]), float(row["beta"])
    )
    request = Request(
        trial_with=lambda noise: Trial(SampledGaussian(int(row["batch"]) / size, noise), test),
        noise_multiplier=float(row[f"sigma_t_eps{epsilon}"]),
        count=None,
        default_count=1,
    )
    assert make_plan(request, Budget(epsilon, DELTA), "published").updates == expected


def test_every_trial_agrees_with_an_independent_composition():
    events = dp_accounting.ComposedDpEvent(
        [
            dp_accounting.GaussianDpEvent(8.0),
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.5)), 300
            ),
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.2)), 300
            ),
        ]
    )
    accountant = reference_pld.PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(events)
    ours = accounting_named("every-trial").planned((Gaussian(8.0),), TRIAL, 300, DELTA)
    theirs = accountant.get_epsilon(DELTA)
    # ours is coarser and must err upward, by little
    assert theirs <= ours + 1e-9
    assert ours == pytest.approx(theirs, rel=2e-3)


def test_every_trial_is_below_its_rdp_bound():
    ledger = Ledger().record(TRIAL, trials=300, updates=300)
    assert accounting_named("every-trial").spent(ledger, DELTA) <= accounting_named(
        "published"
    ).spent(ledger, DELTA)


@pytest.fixture(params=sorted(ACCOUNTINGS), scope="module")
def accounting(request):
    return accounting_named(request.param)


class TestContractOfEveryAccounting:
    """What holds for each accounting by being listed."""

    def test_nothing_costs_nothing(self, accounting):
        assert accounting.spent(Ledger(), DELTA) == 0.0

    def test_data_without_protection_costs_infinity(self, accounting):
        ledger = Ledger().record(Trial(NonPrivate()), trials=1, updates=1)
        assert accounting.spent(ledger, DELTA) == math.inf

    def test_an_unknown_event_is_an_error(self, accounting):
        with pytest.raises(InvalidInputError, match="unknown privacy event"):
            accounting.epsilon([("a laplace, perhaps", 1)], DELTA)

    def test_the_order_of_recording_does_not_matter(self, accounting):
        other = Trial(SampledGaussian(0.1, 3.0))
        one = Ledger().record(TRIAL, trials=10, updates=10).record(other, trials=5, updates=5)
        two = Ledger().record(other, trials=5, updates=5).record(TRIAL, trials=10, updates=10)
        assert accounting.spent(one, DELTA) == pytest.approx(accounting.spent(two, DELTA), rel=1e-6)

    def test_copies_cost_what_repetition_costs(self, accounting):
        repeated = accounting.epsilon([(TRIAL, 7)], DELTA)
        listed = accounting.epsilon([(TRIAL, 1)] * 7, DELTA)
        assert listed == pytest.approx(repeated, rel=1e-3)

    def test_setup_is_charged(self, accounting):
        with_setup = accounting.planned((Gaussian(3.0),), TRIAL, 50, DELTA)
        assert with_setup > accounting.planned((), TRIAL, 50, DELTA) * 1.01

    def test_the_test_is_charged(self, accounting):
        untested = Trial(TRIAL.update)
        assert accounting.planned((), TRIAL, 500, DELTA) > accounting.planned(
            (), untested, 500, DELTA
        )

    def test_rejections_are_charged_where_trials_are(self, accounting):
        many = Ledger().record(TRIAL, trials=400, updates=100)
        few = Ledger().record(TRIAL, trials=100, updates=100)
        if accounting.charges == "trials":
            assert accounting.spent(many, DELTA) > accounting.spent(few, DELTA)
        else:
            assert accounting.spent(many, DELTA) == accounting.spent(few, DELTA)

    @settings(deadline=None, max_examples=15)
    @given(
        q=st.floats(0.005, 0.3),
        sigma=st.floats(0.8, 8.0),
        count=st.integers(1, 300),
        data=st.data(),
    )
    def test_monotone_in_every_argument(self, accounting, q, sigma, count, data):
        def epsilon(q, sigma, count, delta=DELTA):
            return accounting.planned((), Trial(SampledGaussian(q, sigma)), count, delta)

        base = epsilon(q, sigma, count)
        factor = data.draw(st.floats(1.05, 1.5))
        slack = 2e-3 + 1e-3 * base
        assert epsilon(q, sigma * factor, count) <= base + slack
        assert epsilon(min(1.0, q * factor), sigma, count) >= base - slack
        assert epsilon(q, sigma, count + 10) >= base - slack
        assert epsilon(q, sigma, count, DELTA * factor) <= base + slack


def test_unknown_accounting_names_the_choices():
    with pytest.raises(InvalidInputError, match="unknown accounting 'rdp'.*every-trial"):
        accounting_named("rdp")
