"""The strongest test that a stated share of a budget buys."""

from dpsur.errors import BudgetError, InvalidInputError
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import CoinTest, Event, LossTest, SampledGaussian, Test, Trial
from dpsur.privacy.plans import Plan
from dpsur.privacy.plans.fixed import Request, make_plan
from dpsur.privacy.search import largest_ratio, least_noise

MOST_RATIO = 100.0


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
    untested = Request(
        trial_with=lambda noise: Trial(SampledGaussian(sample_rate, noise)),
        noise_multiplier=None,
        count=count,
        default_count=count,
        setup=setup,
    )
    training = make_plan(
        untested, Budget((1 - share) * budget.epsilon, budget.delta), "every-trial"
    )
    update = training.trial.update

    def epsilon_of(test: Test) -> float:
        return accounting.planned(setup, Trial(update, test), count, budget.delta)

    test: Test | None = None
    if accounting.name == "proven":
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
    assert isinstance(update, SampledGaussian)
    tested = Request(
        trial_with=lambda noise: Trial(SampledGaussian(sample_rate, noise), test),
        noise_multiplier=update.noise_multiplier,
        count=count,
        default_count=count,
        setup=setup,
    )
    return make_plan(tested, budget, accounting_name)
