"""Privacy figures and calibration for your own mechanism: the public functions.

`selective_epsilon` says what T accepted updates cost, `calibrate` how much noise a budget needs,
`design_gate` which test a share of the budget buys. They compute what `fit` computes.
"""

import math

from dpsur import checks
from dpsur.errors import BudgetError, InvalidInputError
from dpsur.privacy.accounting import DEFAULT_ACCOUNTING, accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import CoinTest, Event, LossTest, SampledGaussian, Test, Trial
from dpsur.privacy.plan import Plan
from dpsur.privacy.planning import Request, make_plan
from dpsur.privacy.search import largest_ratio, least_noise

MOST_RATIO = 100.0


def selective_epsilon(
    *,
    sample_rate: float,
    noise_multiplier: float,
    updates: int,
    delta: float,
    test: Test | None = None,
    acceptance: tuple[float, float] | None = None,
    val_sample_rate: float | None = None,
    setup: tuple[Event, ...] = (),
) -> float:
    """The proven epsilon of a number of accepted updates, of which rejections are not charged.

    A candidate is a sum of gradients clipped to a norm C over a Poisson sample of rate
    `sample_rate`, plus Gaussian noise of standard deviation `noise_multiplier` times C. It is
    released if a test on a fresh Poisson sample accepts it. Describe the test by `test` (a
    `LossTest` or a `CoinTest`), or by `acceptance`, the smallest and the largest probability with
    which it accepts for any records, and `val_sample_rate`, the rate of its sample.
    Without either, every candidate is released. `setup` lists private events before training.

    Formal guarantee: the accepted updates together satisfy (epsilon, delta)-DP under adding or
    removing one record, provided that `updates` is fixed before the first trial, that everything a
    rejected trial touched is restored, that the number of rejected trials stays private, and that
    a run which gives up does so no earlier than after `least_cap` trials
    (`dpsur.privacy.plan`) and then releases nothing. The epsilon is an upper bound,
    infinite where none is known.
    """
    trial = _trial(sample_rate, noise_multiplier, test, acceptance, val_sample_rate)
    checks.at_least_one("updates", updates)
    checks.probability("delta", delta)
    return accounting_named("proven").planned(setup, trial, updates, delta)


def calibrate(
    *,
    epsilon: float,
    delta: float,
    sample_rate: float,
    updates: int,
    test: Test | None = None,
    acceptance: tuple[float, float] | None = None,
    val_sample_rate: float | None = None,
    accounting: str = DEFAULT_ACCOUNTING,
    setup: tuple[Event, ...] = (),
) -> float:
    """The least noise multiplier at which a number of updates fits a budget, rounded up.

    Candidates and tests are described as for `selective_epsilon`. `updates` counts accepted updates
    under the accounting `proven`, and trials, accepted or not, under `every-trial`.

    Formal guarantee: the updates at the returned noise satisfy (epsilon, delta)-DP under adding or
    removing one record, under the conditions of the accounting; `published` has none behind a test.
    Raises BudgetError where no noise is enough, because the tests or the setup alone spend the
    budget.
    """
    trial = _trial(sample_rate, 1.0, test, acceptance, val_sample_rate)
    request = _request(sample_rate, trial.gate, None, updates, setup)
    return make_plan(request, Budget(epsilon, delta), accounting).update.noise_multiplier


def _request(
    rate: float, test: Test | None, noise: float | None, count: int, setup: tuple[Event, ...]
) -> Request:
    return Request(lambda noise: Trial(SampledGaussian(rate, noise), test), noise, count, 0, setup)


def _trial(
    sample_rate: float,
    noise_multiplier: float,
    test: Test | None,
    acceptance: tuple[float, float] | None,
    val_sample_rate: float | None,
) -> Trial:
    """A candidate and its test. Of an acceptance interval only the ratio of its ends matters."""
    if acceptance is not None:
        if test is not None:
            raise InvalidInputError("give a test or its acceptance interval, not both")
        if val_sample_rate is None:
            raise InvalidInputError(
                "give val_sample_rate, the rate of the sample that the test looks at, beside "
                "acceptance"
            )
        least, most = acceptance
        if not 0 < least <= most <= 1:
            raise InvalidInputError(
                "acceptance must be the smallest and the largest probability of accepting, with "
                f"0 < smallest <= largest <= 1, got {acceptance}"
            )
        # rounded up: a ratio that is too small would make epsilon too small
        test = CoinTest(val_sample_rate, math.nextafter(most / least, math.inf))
    elif val_sample_rate is not None:
        raise InvalidInputError(
            "val_sample_rate belongs to acceptance; a test has its own sample_rate"
        )
    return Trial(SampledGaussian(sample_rate, noise_multiplier), test)


def design_gate(
    budget: Budget,
    accounting_name: str,
    *,
    sample_rate: float,
    val_sample_rate: float,
    count: int,
    share: float,
    accept_threshold: float = 0.0,
    setup: tuple[Event, ...] = (),
) -> Plan:
    """A plan whose training alone spends (1 - share) of epsilon, and whose test takes the rest.

    Only the ratio of the largest to the smallest acceptance probability matters to the `proven`
    accounting, so there the answer is a coin with the largest ratio. The other accountings need the
    Gaussian test, so there it is the smallest noise at the given threshold.
    """
    if not 0 < share < 1:
        raise InvalidInputError(f"the share of the test must be in (0, 1), got {share}")
    accounting = accounting_named(accounting_name)
    untested = _request(sample_rate, None, None, count, setup)
    part = Budget((1 - share) * budget.epsilon, budget.delta)
    update = make_plan(untested, part, "every-trial").update

    def epsilon_of(test: Test) -> float:
        return accounting.planned(setup, Trial(update, test), count, budget.delta)

    test: Test | None = None
    if not accounting.verdicts_charged:
        ratio = largest_ratio(
            lambda r: epsilon_of(CoinTest(val_sample_rate, r)), budget.epsilon, MOST_RATIO
        )
        test = None if ratio is None else CoinTest(val_sample_rate, ratio)
    else:
        noise = least_noise(
            lambda s: epsilon_of(LossTest(val_sample_rate, s, accept_threshold)), budget.epsilon
        )
        test = None if noise is None else LossTest(val_sample_rate, noise, accept_threshold)
    if test is None:
        raise BudgetError(
            f"a share of {share:g} of epsilon {budget.epsilon:g} buys no test over {count} "
            "updates; raise the share or epsilon, or make fewer updates"
        )
    tested = _request(sample_rate, test, update.noise_multiplier, count, setup)
    return make_plan(tested, budget, accounting_name)
