import math

import dp_accounting
import mpmath
import pytest
from dp_accounting import pld as reference_pld
from dp_accounting import rdp as reference_rdp
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsur.errors import InvalidInputError
from dpsur.privacy.accountants.rdp import PAPER_ORDERS, epsilon_from_rdp, sampled_gaussian_rdp
from dpsur.privacy.accounting import (
    ACCOUNTINGS,
    DEFAULT_ACCOUNTING,
    KEEP_MOMENTUM,
    RESTORE,
    accounting_named,
    figures,
)
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import (
    CoinTest,
    Gaussian,
    Ledger,
    LossTest,
    NonPrivate,
    SampledGaussian,
    Trial,
)
from dpsur.privacy.planning import Request, make_plan
from reproduction.presets.settings import paper_settings
from tests.plans import spent

DELTA = 1e-5
TRIAL = Trial(SampledGaussian(0.05, 1.5), LossTest(0.01, 1.2, -1.0))


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


@pytest.mark.parametrize(("epsilon", "expected"), [(1, 651), (2, 680), (3, 1076), (4, 1946)])
def test_published_number_of_updates_for_fashion_mnist(epsilon, expected):
    setting = next(s for s in paper_settings() if s.dataset == "fmnist" and s.epsilon == epsilon)
    request = Request(lambda _: setting.trial, setting.noise_multiplier, None, 1)
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
    assert spent("every-trial", ledger, DELTA) <= spent("published", ledger, DELTA)


@pytest.fixture(params=sorted(ACCOUNTINGS), scope="module")
def accounting(request):
    return accounting_named(request.param)


class TestContractOfEveryAccounting:
    """What holds for each accounting by being listed."""

    def test_nothing_costs_nothing(self, accounting):
        assert spent(accounting.name, Ledger(), DELTA) == 0.0

    def test_data_without_protection_costs_infinity(self, accounting):
        ledger = Ledger().record(Trial(NonPrivate()), trials=1, updates=1)
        assert spent(accounting.name, ledger, DELTA) == math.inf

    def test_an_unknown_event_is_an_error(self, accounting):
        with pytest.raises(InvalidInputError, match="unknown privacy event"):
            accounting.epsilon([("a laplace, perhaps", 1)], DELTA)

    def test_the_order_of_recording_does_not_matter(self, accounting):
        other = Trial(SampledGaussian(0.1, 3.0))
        one = Ledger().record(TRIAL, trials=10, updates=10).record(other, trials=5, updates=5)
        two = Ledger().record(other, trials=5, updates=5).record(TRIAL, trials=10, updates=10)
        assert spent(accounting.name, one, DELTA) == pytest.approx(
            spent(accounting.name, two, DELTA), rel=1e-6
        )

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
            assert spent(accounting.name, many, DELTA) > spent(accounting.name, few, DELTA)
        else:
            assert spent(accounting.name, many, DELTA) == spent(accounting.name, few, DELTA)

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


def test_the_default_is_the_proven_one():
    assert DEFAULT_ACCOUNTING == "proven"
    assert accounting_named(DEFAULT_ACCOUNTING).proved


@pytest.mark.parametrize("setting", paper_settings(), ids=lambda s: f"{s.dataset}-{s.epsilon}")
def test_the_published_figure_is_below_the_proven_one(setting):
    request = Request(
        lambda _: setting.trial, setting.noise_multiplier, None, 1, setup=setting.setup
    )
    updates = make_plan(request, Budget(setting.epsilon, DELTA), "published").length
    found = figures(setting.setup, setting.trial, DELTA, updates=updates, trials=None)
    assert found["published"] <= setting.epsilon
    assert found["published"] < found["proven_lower"] <= found["proven"]
    assert found["proven"] <= 1.01 * found["proven_lower"]
    assert found["every_trial"] is None


COIN = Trial(TRIAL.update, CoinTest(0.01, 2.0))


class TestWhatAnAccountingCovers:
    def test_the_coin_is_for_the_proven_one_alone(self):
        accounting_named("proven").check(COIN, RESTORE)
        with pytest.raises(InvalidInputError, match="never rejects an improvement.*proven"):
            accounting_named("every-trial").check(COIN, RESTORE)
        with pytest.raises(InvalidInputError, match="Gaussian noise only.*proven"):
            accounting_named("published").check(COIN, RESTORE)

    def test_kept_momentum_is_for_every_trial_alone(self):
        accounting_named("every-trial").check(TRIAL, KEEP_MOMENTUM)
        for name in ("proven", "published"):
            with pytest.raises(InvalidInputError, match="without being charged.*every-trial"):
                accounting_named(name).check(TRIAL, KEEP_MOMENTUM)

    def test_figures_are_none_where_they_do_not_apply(self):
        coin = figures((), COIN, DELTA, updates=10, trials=20)
        assert coin["published"] is coin["every_trial"] is None
        assert coin["proven"] >= coin["proven_lower"] > 0
        kept = figures((), TRIAL, DELTA, updates=10, trials=20, on_reject=KEEP_MOMENTUM)
        assert kept["proven"] is kept["proven_lower"] is kept["published"] is None
        assert kept["every_trial"] > 0


def test_where_nothing_is_selected_the_proven_figure_is_that_of_every_trial():
    plain = Trial(TRIAL.update)
    found = figures((Gaussian(8.0),), plain, DELTA, updates=100, trials=100)
    assert found["proven"] == found["proven_lower"] == found["every_trial"]


def test_only_the_ratio_of_a_test_matters_to_the_proven_figure():
    test = LossTest(0.01, 1.2, -1.0)
    coin = CoinTest(0.01, test.accept_max / test.accept_min)
    proven = accounting_named("proven")
    one = proven.planned((), Trial(TRIAL.update, test), 100, DELTA)
    two = proven.planned((), Trial(TRIAL.update, coin), 100, DELTA)
    assert one == pytest.approx(two, rel=1e-6)


def test_a_test_that_cannot_accept_the_worst_has_no_finite_cost():
    hopeless = Trial(TRIAL.update, LossTest(0.01, 1e-3, -5.0))
    with pytest.raises(InvalidInputError, match="never accepts"):
        accounting_named("proven").planned((), hopeless, 1, DELTA)
