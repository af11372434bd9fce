"""Plans from what a user fixed: the noise, or the number of updates, is chosen to fit the budget.

A search decides nothing of the guarantee, which is computed from the plan that comes out.

`selective_epsilon` says what T accepted updates cost, `calibrate` how much noise a budget needs,
`design_gate` which test a share of the budget buys. They compute what `fit` computes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from dpsur import checks
from dpsur.errors import BudgetError, InvalidInputError
from dpsur.privacy.accountants.noise_tail import check_tail, noise_tail
from dpsur.privacy.accountants.proven import event_divergence
from dpsur.privacy.accountants.rdp import (
    RenyiFilter,
    composed_epsilon,
    sampled_gaussian_rdp,
)
from dpsur.privacy.accounting import (
    DEFAULT_ACCOUNTING,
    RESTORE,
    Accounting,
    Charges,
    accounting_named,
    planned_charges,
)
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import (
    CoinTest,
    Event,
    Gaussian,
    LossTest,
    Menu,
    NonPrivate,
    SampledGaussian,
    Test,
    Trial,
)
from dpsur.privacy.plan import (
    ACCEPTED,
    MOST_TRIALS,
    TAIL_SHARE,
    TRIALS,
    BlockTest,
    Phase,
    Plan,
    kept_delta,
    step_divergence,
    trial_cap,
)
from dpsur.privacy.search import (
    cached,
    largest_ratio,
    least_noise,
    most_repetitions,
    noise_at_least,
    noise_near,
)

# What tests of blocks may add to the noise of the updates, and the least noise that they get.
TESTS_COST = 0.015
LEAST_TEST_NOISE = 1.0
# A sampled test may cost this many times what one on all records does, compared at a Rényi order; a
# sample of more than MOST_SAMPLED of the records is not worth drawing.
SAMPLE_COST, COST_ORDER, MOST_SAMPLED = 1.25, 8, 0.5

# A guess of the noise is this near, and a refined figure asks for about so much of it.
ROUGHLY, REFINED = 0.01, 0.95


# --- trials of one kind ---------------------------------------------------------------------------


def repeated_plan(
    budget: Budget,
    accounting: str,
    trial: Trial,
    trials: int,
    updates: int | None = None,
    setup: tuple[Event, ...] = (),
    on_reject: str = RESTORE,
    *,
    run_all_trials: bool = False,
) -> Plan:
    """Equal trials: exactly `trials` of them, or so many that `updates` are accepted.

    Where updates are counted, `trials` is a cap whose probability of being hit is negligible
    against delta.
    """
    phase = Phase(trial, trials, TRIALS)
    if updates is not None:
        phase = Phase(trial, updates, ACCEPTED, trials if trial.gate is not None else None)
    return Plan(budget, accounting, (phase,), setup, on_reject, run_all_trials)


@dataclass(frozen=True)
class Request:
    """What the user fixed, and what is left to be chosen.

    `trial_with(noise)` builds the repeated event for a noise multiplier. Given the noise, the count
    is what fits; given the count, the noise is calibrated; given both, they are checked; given
    neither, `default_count` is used.
    """

    trial_with: Callable[[float], Trial]
    noise_multiplier: float | None
    count: int | None
    default_count: int = 0
    setup: tuple[Event, ...] = ()
    on_reject: str = RESTORE


def make_plan(request: Request, budget: Budget, accounting_name: str) -> Plan:
    """Settle noise and count against the budget; an impossible request is an error here."""
    accounting = accounting_named(accounting_name)
    noise, count = request.noise_multiplier, request.count

    def charges(noise: float, count: int) -> Charges:
        return planned_charges(request.setup, request.trial_with(noise), count)

    def epsilon_of(count: int) -> float:
        assert noise is not None
        return accounting.epsilon(charges(noise, count), budget.delta)

    def check_noise(count: int) -> None:
        assert noise is not None
        check_tail(accounting.noise_tail(charges(noise, count)), noise, count, budget.delta)

    typical = request.trial_with(1.0 if noise is None else noise)
    accounting.check(typical, request.on_reject)
    if noise is not None and count is None:
        if isinstance(typical.update, NonPrivate):
            raise BudgetError("a method without noise has no finite epsilon; give the updates")
        count = most_repetitions(epsilon_of, budget.epsilon)
        if count == 0:
            check_noise(1)
            raise BudgetError(
                f"epsilon {budget.epsilon:g} is too small for a single update, which spends "
                f"{epsilon_of(1):.4g} at noise multiplier {noise:g}; "
                "raise epsilon or the noise multiplier, or lower the batch sizes",
                code="budget-too-small",
            )
    made = request.default_count if count is None else count
    checks.at_least_one("the number of updates", made)
    if noise is None:
        noise = fitted_noise(lambda noise: charges(noise, made), accounting, budget)
        if noise is None:
            tests = ", or lower val_batch_size or raise val_noise_multiplier"
            raise _too_small(budget, made, tests * (typical.test is not None))
    elif request.count is not None:
        check_noise(made)
        epsilon = epsilon_of(made)
        if epsilon > budget.epsilon:
            raise BudgetError(
                f"noise multiplier {noise:g} over {made} charged trials or updates spends epsilon "
                f"{epsilon:.4g}, above the budget of {budget.epsilon:g}: raise epsilon, or leave "
                "out either the noise multiplier or the count so that it is chosen to fit",
                code="over-budget",
            )
    trial, updates, trials = request.trial_with(noise), None, made
    if accounting.charges == "updates":
        updates = made
        trials = made if trial.gate is None else trial_cap(trial.gate, made, budget)
    return repeated_plan(
        budget, accounting.name, trial, trials, updates, request.setup, request.on_reject
    )


def fitted_noise(
    charges_with: Callable[[float], Charges],
    accounting: Accounting,
    budget: Budget,
    *,
    by_tail: bool = False,
) -> float | None:
    """The least noise, or scale of it, whose charges fit the budget; None where none is enough.

    It is looked up before it is searched for. The tail of the noise seldom matters, and then the
    noise does not depend on its bound, unless the search is `by_tail` as well.
    """

    def by(figure: Callable[[Charges, float], float]) -> Callable[[float], float]:
        return cache(lambda noise: figure(charges_with(noise), budget.delta))

    epsilon_of = by(accounting.epsilon)
    ideal = epsilon_of if by_tail else by(accounting.ideal_epsilon)

    def untested(charges: Charges, delta: float) -> float:
        updates = [(e.update if isinstance(e, Trial) else e, count) for e, count in charges]
        return composed_epsilon(updates, delta)

    def start() -> float | None:
        """The least noise; where a figure takes long, from a guess by the one that it refines."""
        if accounting.refines is not None:
            guess = least_noise(by(untested), budget.epsilon)
            if guess is not None:
                looser = accounting_named(accounting.refines)
                guess = noise_near(by(looser.ideal_epsilon), budget.epsilon, guess, ROUGHLY)
            if guess is not None:
                return noise_near(ideal, budget.epsilon, REFINED * guess)
        return least_noise(ideal, budget.epsilon)

    return cached(
        (accounting.name, budget, by_tail, charges_with(1.0), charges_with(2.0)),
        lambda: noise_at_least(epsilon_of, budget.epsilon, start()),
        lambda noise: epsilon_of(noise) <= budget.epsilon,
    )


def _too_small(budget: Budget, updates: int | None, remedy: str = "") -> BudgetError:
    return BudgetError(
        f"epsilon {budget.epsilon:g} is too small for {updates} updates, whatever the noise: "
        f"raise epsilon or make fewer updates{remedy}",
        code="budget-too-small",
    )


# --- steps that are free to depend on what was released -------------------------------------------


def filtered_plan(
    budget: Budget,
    accounting: str,
    typical: Trial,
    *,
    updates: int | None,
    trials: int = MOST_TRIALS,
    setup: tuple[Event, ...] = (),
    on_reject: str = RESTORE,
) -> Plan:
    """Steps behind the filter whose order affords most steps of a typical kind."""
    selected = accounting_named(accounting).charges == "updates" and typical.gate is not None
    best = RenyiFilter.best_for(
        Budget(budget.epsilon, kept_delta(budget.delta, capped=selected)),
        lambda order: step_divergence(typical, order, selected=selected),
        lambda order: sum(event_divergence(event, order) for event in setup),
    )
    cost = step_divergence(typical, best.order, selected=selected)
    count = updates or (min(trials, int(best.allowance / cost)) if cost > 0 else trials)
    charges = [*((event, 1) for event in setup), (typical, count)]
    tail = noise_tail(charges, verdicts_charged=not selected) / TAIL_SHARE
    check_tail(tail, getattr(typical.update, "noise_multiplier", 0.0), count, budget.delta)
    if selected and typical.gate is not None and updates is not None:
        trials = trial_cap(typical.gate, updates, budget)
    phase = Phase(typical, updates, TRIALS if updates is None else ACCEPTED, trials)
    return Plan(budget, accounting, (phase,), setup, on_reject, filter=best)


# --- blocks of updates with a test after each -----------------------------------------------------


def block_plan(
    budget: Budget,
    accounting: str,
    step: Trial | Menu,
    test: BlockTest,
    blocks: tuple[int, ...],
    setup: tuple[Event, ...] = (),
    steering: SampledGaussian | None = None,
    *,
    searches: bool = True,
) -> Plan:
    """Updates in blocks of these numbers, and a noisy test after each; 0 means a test at once."""
    phases = tuple(Phase(step, size, test=test, steering=steering) for size in blocks)
    return Plan(budget, accounting, phases, setup, searches=searches)


def plan_blocks(
    budget: Budget,
    accounting: str,
    blocks: tuple[int, ...],
    *,
    sample_rate: float,
    test_rate: float | None = None,
    noise_multiplier: float | None = None,
    test_noise: float | None = None,
    setup: tuple[Event, ...] = (),
    menu: Menu | None = None,
    steering: SampledGaussian | None = None,
    searches: bool = True,
    tests_cost: float = TESTS_COST,
) -> Plan:
    """The plan with the noise that was given, or with what the budget needs where it was not.

    Without a `test_rate` tests look at all records. If both kinds of noise are left open, tests
    raise the noise of the updates by `tests_cost`; if only that of tests is, they take what the
    updates leave of the budget. With a `menu` and the `steering` that
    it is chosen by, the noise is that of its first choice, and the others keep their ratio to it.
    """

    def plan_with(noise: float, of_tests: float) -> Plan:
        step: Trial | Menu = Trial(SampledGaussian(sample_rate, noise))
        if menu is not None:
            step = menu.scaled(noise / menu.choices[0].noise_multiplier)
        test: BlockTest = Gaussian(of_tests)
        if test_rate is not None:
            test = SampledGaussian(test_rate, of_tests)
        return block_plan(
            budget, accounting, step, test, blocks, setup, steering, searches=searches
        )

    fitted = partial(fitted_noise, accounting=accounting_named(accounting), budget=budget)
    noise = noise_multiplier
    if noise is None and test_noise is not None:
        given = test_noise
        noise = fitted(lambda noise: plan_with(noise, given).charges())
        if noise is None:
            raise BudgetError(
                f"{len(blocks)} tests of blocks spend epsilon {budget.epsilon:g} by themselves; "
                "raise val_noise_multiplier or epsilon",
                code="budget-too-small",
            )
        return plan_with(noise, given)
    if noise is None:  # the least at which the updates fit the budget on their own, and more
        noise = fitted(
            lambda noise: plan_with(noise, LEAST_TEST_NOISE).charges()[:-1], by_tail=True
        )
        if noise is None:
            raise _too_small(budget, sum(blocks))
        noise *= 1 + tests_cost
    if test_noise is None:
        found = noise
        least = fitted(lambda of_tests: plan_with(found, of_tests).charges(), by_tail=True)
        if least is None:
            raise BudgetError(
                f"updates at noise multiplier {noise:g} leave nothing of epsilon "
                f"{budget.epsilon:g} for tests of blocks; raise noise_multiplier or leave it out, "
                "or make fewer updates",
                code="budget-too-small",
            )
        test_noise = max(least, LEAST_TEST_NOISE)
    plan = plan_with(noise, test_noise)
    spent = plan.epsilon()
    if not spent <= budget.epsilon:
        raise BudgetError(
            f"{plan.updates} updates at noise multiplier {noise:g} and {len(blocks)} tests of "
            f"blocks at {test_noise:g} spend epsilon {spent:.4g}, more than "
            f"{budget.epsilon:g}; leave one of the noise multipliers open, or make fewer updates",
            code="over-budget",
        )
    return plan


def cheapest_test(dataset_size: int, error: float) -> tuple[float, float]:
    """Sampling rate and noise multiplier of the smallest sample for a standard error of a mean.

    The mean is of values in [-1, 1]. For the same error a sample always costs more than all
    records do, since it has an error of its own, and less time. The rate is the lowest at which it
    costs at most `SAMPLE_COST` times as much, by Rényi divergence.
    """
    whole = error * dataset_size
    most = SAMPLE_COST * COST_ORDER / (2 * whole**2)

    def noise_at(rate: float) -> float:
        left = error**2 - (1 - rate) / (rate * dataset_size)
        return rate * dataset_size * math.sqrt(left) if left > 0 else 0.0

    def affordable(rate: float) -> bool:
        noise = noise_at(rate)
        return noise > 0 and sampled_gaussian_rdp(rate, noise, COST_ORDER) <= most

    low, high = 1 / (1 + dataset_size * error**2), 1.0  # below low no noise at all is allowed
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if affordable(middle) else (middle, high)
    return (1.0, whole) if high > MOST_SAMPLED else (high, noise_at(high))


# --- for a mechanism of one's own -----------------------------------------------------------------

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
