import math

import pytest
from scipy.stats import binom

from dpsur.errors import BudgetError, InvalidInputError
from dpsur.privacy.accounting import ACCOUNTINGS, accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import CoinTest, Ledger, LossTest, SampledGaussian, Trial
from dpsur.privacy.plan import Plan, trial_cap
from dpsur.privacy.planning import Request, design_gate, make_plan, repeated_plan
from dpsur.privacy.search import largest_ratio, least_noise, most_repetitions, noise_near
from dpsur.privacy.statement import planned_warnings

BUDGET = Budget(3.0, 1e-5)
TEST = LossTest(0.016, 1.0, 0.0)


def request(noise=None, count=None, test=TEST, default=100):
    return Request(lambda s: Trial(SampledGaussian(0.128, s), test), noise, count, default)


@pytest.fixture(params=sorted(ACCOUNTINGS), scope="module")
def name(request):
    return request.param


def test_given_noise_the_count_is_the_largest_that_fits(name):
    plan = make_plan(request(noise=2.5), BUDGET, name)
    accounting = accounting_named(name)
    fits = accounting.planned((), plan.typical, plan.length, BUDGET.delta)
    too_many = accounting.planned((), plan.typical, plan.length + 1, BUDGET.delta)
    assert fits <= BUDGET.epsilon < too_many
    assert plan.epsilon() == fits


def test_given_the_count_the_noise_is_the_smallest_that_fits(name):
    plan = make_plan(request(count=150), BUDGET, name)
    assert plan.length == 150
    noise = plan.typical.update.noise_multiplier
    accounting = accounting_named(name)
    less = Trial(SampledGaussian(0.128, noise * (1 - 1e-3)), TEST)
    assert plan.epsilon() <= BUDGET.epsilon < accounting.planned((), less, 150, BUDGET.delta)


def test_given_both_they_are_checked(name):
    assert make_plan(request(noise=10.0, count=20), BUDGET, name).length == 20
    with pytest.raises(BudgetError, match="noise multiplier 1 over 5000.*above the budget of 3"):
        make_plan(request(noise=1.0, count=5000), BUDGET, name)


def test_given_neither_the_default_count_is_used(name):
    assert make_plan(request(default=150), BUDGET, name).length == 150


def test_round_trip_of_noise_and_count(name):
    noise = make_plan(request(count=150), BUDGET, name).typical.update.noise_multiplier
    assert make_plan(request(noise=noise), BUDGET, name).length in (150, 151)


def test_a_budget_too_small_for_one_update(name):
    with pytest.raises(BudgetError, match="epsilon 0.01 is too small for a single update"):
        make_plan(request(noise=0.5), Budget(0.01, 1e-5), name)


def test_a_test_that_spends_the_budget_alone_is_an_error_not_a_loop(name):
    greedy = LossTest(0.5, 0.5, 0.0)
    with pytest.raises(BudgetError, match="whatever the noise.*val_noise_multiplier"):
        make_plan(request(count=1000, test=greedy), Budget(1.0, 1e-5), name)


def test_trials_are_fixed_in_advance_where_they_are_charged():
    plan = make_plan(request(count=10), BUDGET, "every-trial")
    ledger = Ledger().record(plan.typical, trials=9, updates=2)
    assert plan.updates is None
    assert plan.affords(ledger, plan.typical)
    assert not plan.completed(ledger)
    ledger = ledger.record(plan.typical, updates=0)
    assert not plan.affords(ledger, plan.typical)
    assert plan.completed(ledger)


def test_updates_are_fixed_in_advance_where_they_are_charged():
    plan = make_plan(request(count=10), BUDGET, "published")
    ledger = Ledger().record(plan.typical, trials=30, updates=9)
    assert plan.affords(ledger, plan.typical)
    assert not plan.completed(ledger)
    ledger = ledger.record(plan.typical, updates=1)
    assert not plan.affords(ledger, plan.typical)
    assert plan.completed(ledger)


def test_the_cap_ends_a_run_that_must_not_release():
    plan = make_plan(request(count=10), BUDGET, "published")
    ledger = Ledger().record(plan.typical, trials=plan.trials, updates=9)
    assert not plan.affords(ledger, plan.typical)
    assert not plan.completed(ledger)


@pytest.mark.parametrize("updates", [1, 10, 1000])
@pytest.mark.parametrize("beta", [-1.0, 0.0, 2.0])
def test_hitting_the_cap_costs_less_than_a_thousandth_of_delta(updates, beta):
    test = LossTest(0.01, 0.8, beta)
    cap = trial_cap(test, updates, BUDGET)
    failure = binom.cdf(updates - 1, cap, test.accept_min)
    assert (1 + math.exp(BUDGET.epsilon)) * failure <= BUDGET.delta / 1000
    assert cap >= updates


def test_a_gate_that_never_opens_has_no_cap():
    with pytest.raises(BudgetError, match="never accepts"):
        trial_cap(LossTest(0.01, 1e-3, -5.0), 10, BUDGET)


def test_without_a_test_every_trial_is_an_update():
    plan = make_plan(request(count=10, test=None), BUDGET, "published")
    assert plan.trials == plan.updates == 10


@pytest.mark.parametrize("ratio", [1.0, 2.0, 10.0])
def test_the_cap_of_a_coin(ratio):
    cap = trial_cap(CoinTest(0.1, ratio), 100, BUDGET)
    assert binom.cdf(99, cap, 1 / ratio) * (1 + math.exp(3.0)) <= 1e-8


def test_an_accounting_that_does_not_cover_the_trial_makes_no_plan():
    with pytest.raises(InvalidInputError, match="coin gate is not covered by the every-trial"):
        make_plan(request(count=10, test=CoinTest(0.1, 2.0)), BUDGET, "every-trial")


@pytest.mark.parametrize(
    ("accounting", "test", "on_reject"),
    [
        ("proven", TEST, "keep-momentum"),
        ("published", TEST, "keep-momentum"),
        ("every-trial", CoinTest(0.1, 2.0), "restore"),
    ],
)
def test_a_plan_made_by_hand_is_checked_too(accounting, test, on_reject):
    trial = Trial(SampledGaussian(0.1, 1.0), test)
    with pytest.raises(InvalidInputError, match="not covered"):
        repeated_plan(BUDGET, accounting, trial, 10, on_reject=on_reject)


def test_plans_survive_a_file(name):
    plan = make_plan(request(count=150), BUDGET, name)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan")])
def test_bad_epsilon(epsilon):
    with pytest.raises(InvalidInputError, match="epsilon must be above 0"):
        Budget(epsilon, 1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, float("nan")])
def test_bad_delta(delta):
    with pytest.raises(InvalidInputError, match="delta must be in"):
        Budget(1.0, delta)


def test_warns_when_delta_is_above_one_over_n():
    for delta, warned in ((1e-3, 1), (1e-5, 0)):
        plan = repeated_plan(Budget(20.0, delta), "proven", Trial(SampledGaussian(0.1, 2.0)), 3)
        assert len(planned_warnings(plan, 4000, seeded=False)) == warned


def test_searches_on_a_known_function():
    assert most_repetitions(lambda n: 0.1 * n, 3.05) == 30
    assert most_repetitions(lambda n: float(n), 0.5) == 0
    assert least_noise(lambda s: 7 / s, 2.0) == pytest.approx(3.5, rel=2e-4)
    assert least_noise(lambda s: 7 / s, 2.0) >= 3.5
    assert least_noise(lambda s: 1 + 1 / s, 1.0) is None
    with pytest.raises(BudgetError, match="more than"):
        most_repetitions(lambda n: 0.0, 1.0)
    assert largest_ratio(lambda r: r - 1, 0.5, 10.0) == pytest.approx(1.5, rel=2e-3)
    assert largest_ratio(lambda r: r - 1, 0.5, 10.0) <= 1.5
    assert largest_ratio(lambda r: r, 5.0, 3.0) == 3.0
    assert largest_ratio(lambda r: r, 0.9, 3.0) is None


def test_searches_end_on_odd_functions():
    """A step, a plateau and an infinity: the answer is on the right side all the same."""
    step = least_noise(lambda s: 0.0 if s >= 3.3 else math.inf, 1.0)
    assert 3.3 <= step <= 3.3 * (1 + 1e-3)
    assert least_noise(lambda s: 0.0, 1.0) <= 0.1


@pytest.mark.parametrize("guess", [0.95, 1.08])
@pytest.mark.parametrize("power", [0.7, 1.0, 1.6])
def test_a_search_from_a_guess_needs_few_figures(power: float, guess: float) -> None:
    asked = []

    def epsilon_of(noise: float) -> float:
        asked.append(noise)
        return float(7 / noise**power + 0.3 / noise**3)

    root = least_noise(epsilon_of, 2.0)
    assert root is not None
    asked.clear()
    found = noise_near(epsilon_of, 2.0, guess * root)
    assert found is not None
    assert len(asked) <= 4
    assert epsilon_of(found) <= 2.0 < epsilon_of(found / (1 + 1.1e-4))


def test_a_search_from_a_guess_takes_odd_functions() -> None:
    def step(noise: float) -> float:
        return 0.5 if noise >= 3.3 else math.inf

    for start in (0.1, 3.0, 4.0):
        assert 3.3 <= (noise_near(step, 1.0, start) or 0) <= 3.3 * (1 + 1e-4)
        assert 0 < (noise_near(lambda _: 0.0, 1.0, start) or 0) <= 0.1
        assert noise_near(lambda _: 2.0, 1.0, start) is None
        flat = noise_near(lambda noise: 1.0 if noise >= 2.0 else 5.0, 1.0, start)
        assert 2.0 <= (flat or 0) <= 2.0 * (1 + 1e-4)


@pytest.mark.parametrize("accounting", ["proven", "every-trial", "published"])
def test_a_share_of_the_budget_buys_a_test(accounting):
    plan = design_gate(
        BUDGET, accounting, sample_rate=0.034, val_sample_rate=0.004, count=300, share=0.3
    )
    assert 0.99 * BUDGET.epsilon <= plan.epsilon() <= BUDGET.epsilon
    alone = accounting_named("every-trial").planned((), Trial(plan.typical.update), 300, 1e-5)
    assert alone == pytest.approx(0.7 * BUDGET.epsilon, rel=1e-3)
    more = design_gate(
        BUDGET, accounting, sample_rate=0.034, val_sample_rate=0.004, count=300, share=0.5
    )
    ratio = [p.typical.test.accept_max / p.typical.test.accept_min for p in (plan, more)]
    assert ratio[0] < ratio[1]


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0, math.nan])
def test_bad_shares(share):
    with pytest.raises(InvalidInputError, match="share"):
        design_gate(BUDGET, "proven", sample_rate=0.1, val_sample_rate=0.1, count=5, share=share)
