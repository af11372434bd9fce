"""Plans from what a user fixed: the noise, or the number of updates, is chosen to fit the budget.

A search decides nothing of the guarantee, which is computed from the plan that comes out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from dpsur import checks
from dpsur.errors import BudgetError
from dpsur.privacy.accountants.noise_tail import noise_tail, tail_refusal
from dpsur.privacy.accountants.proven import event_divergence
from dpsur.privacy.accountants.rdp import (
    RenyiFilter,
    composed_epsilon,
    sampled_gaussian_rdp,
)
from dpsur.privacy.accounting import (
    RESTORE,
    Accounting,
    Charges,
    accounting_named,
    planned_charges,
)
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event, Gaussian, Menu, NonPrivate, SampledGaussian, Trial
from dpsur.privacy.plan import (
    ACCEPTED,
    MOST_TRIALS,
    TAIL_SHARE,
    TRIALS,
    BlockTest,
    Filter,
    Phase,
    Plan,
    kept_delta,
    step_divergence,
    trial_cap,
)
from dpsur.privacy.search import (
    cached,
    cached_noise,
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


# --- trials of one kind -------------------------------------------------------------------------


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
    default_count: int
    setup: tuple[Event, ...] = ()
    on_reject: str = RESTORE


def make_plan(request: Request, budget: Budget, accounting_name: str) -> Plan:
    """Settle noise and count against the budget; an impossible request is an error here."""
    accounting = accounting_named(accounting_name)
    noise = request.noise_multiplier
    accounting.check(request.trial_with(1.0 if noise is None else noise), request.on_reject)
    if noise is None:
        count = request.default_count if request.count is None else request.count
        checks.at_least_one("the number of updates", count)
        noise = _calibrated_noise(request, accounting, budget, count)
    elif request.count is None:
        count = _affordable_count(request, accounting, budget, noise)
    else:
        count = request.count
        checks.at_least_one("the number of updates", count)
        _check_fits(request, accounting, budget, noise, count)
    trial = request.trial_with(noise)
    if accounting.charges == "trials" or trial.gate is None:
        updates = None if accounting.charges == "trials" else count
        trials = count
    else:
        updates, trials = count, trial_cap(trial.gate, count, budget)
    return repeated_plan(
        budget, accounting.name, trial, trials, updates, request.setup, request.on_reject
    )


def _check_fits(
    request: Request, accounting: Accounting, budget: Budget, noise: float, count: int
) -> None:
    _check_tail(request, accounting, budget, noise, count)
    epsilon = accounting.planned(request.setup, request.trial_with(noise), count, budget.delta)
    if epsilon > budget.epsilon:
        raise BudgetError(
            f"noise multiplier {noise:g} over {count} charged trials or updates spends epsilon "
            f"{epsilon:.4g}, above the budget of {budget.epsilon:g}: raise epsilon, or leave out "
            "either the noise multiplier or the count so that it is chosen to fit",
            code="over-budget",
        )


def _check_tail(
    request: Request, accounting: Accounting, budget: Budget, noise: float, count: int
) -> None:
    """Refuse noise whose missing tail alone spends delta."""
    charges = planned_charges(request.setup, request.trial_with(noise), count)
    refusal = tail_refusal(accounting.noise_tail(charges), noise, count, budget.delta)
    if refusal is not None:
        raise BudgetError(refusal, code="noise-tail")


def _affordable_count(
    request: Request, accounting: Accounting, budget: Budget, noise: float
) -> int:
    trial = request.trial_with(noise)
    if isinstance(trial.update, NonPrivate):
        raise BudgetError("a method without noise has no finite epsilon; give the updates")

    def epsilon_of(count: int) -> float:
        return accounting.planned(request.setup, trial, count, budget.delta)

    count = most_repetitions(epsilon_of, budget.epsilon)
    if count == 0:
        _check_tail(request, accounting, budget, noise, 1)
        raise BudgetError(
            f"epsilon {budget.epsilon:g} is too small for a single update, which spends "
            f"{epsilon_of(1):.4g} at noise multiplier {noise:g}; "
            "raise epsilon or the noise multiplier, or lower the batch sizes",
            code="budget-too-small",
        )
    return count


def _calibrated_noise(
    request: Request, accounting: Accounting, budget: Budget, count: int
) -> float:
    def epsilon_of(noise: float) -> float:
        return accounting.planned(request.setup, request.trial_with(noise), count, budget.delta)

    def ideal_epsilon_of(noise: float) -> float:
        charges = planned_charges(request.setup, request.trial_with(noise), count)
        return accounting.ideal_epsilon(charges, budget.delta)

    def search() -> float | None:
        # The tail of the noise seldom matters, and then the noise does not depend on its bound.
        ideal = _refined_noise(request, accounting, budget, count, ideal_epsilon_of)
        return noise_at_least(epsilon_of, budget.epsilon, ideal)

    trials = (request.trial_with(1.0), request.trial_with(2.0))
    question = ("fixed", accounting.name, budget, count, request.setup, trials)
    noise = cached(question, search, lambda noise: epsilon_of(noise) <= budget.epsilon)
    if noise is None:
        test = trials[0].test is not None
        raise BudgetError(
            f"epsilon {budget.epsilon:g} is too small for {count} updates, whatever the noise: "
            "raise epsilon or make fewer updates"
            + (", or lower val_batch_size or raise val_noise_multiplier" if test else ""),
            code="budget-too-small",
        )
    return noise


def _refined_noise(
    request: Request,
    accounting: Accounting,
    budget: Budget,
    count: int,
    epsilon_of: Callable[[float], float],
) -> float | None:
    """The least noise; where a figure takes long, from a guess by the one that it refines."""
    if accounting.refines is None:
        return least_noise(epsilon_of, budget.epsilon)
    looser = accounting_named(accounting.refines)

    def charges(noise: float, *, tested: bool) -> Charges:
        trial = request.trial_with(noise)
        return planned_charges(request.setup, trial if tested else Trial(trial.update), count)

    def untested(noise: float) -> float:
        return composed_epsilon(charges(noise, tested=False), budget.delta)

    def rough(noise: float) -> float:
        return looser.ideal_epsilon(charges(noise, tested=True), budget.delta)

    start = least_noise(untested, budget.epsilon)
    guess = None if start is None else noise_near(rough, budget.epsilon, start, ROUGHLY)
    if guess is None:  # what is too much by the looser figure may still fit
        return least_noise(epsilon_of, budget.epsilon)
    return noise_near(epsilon_of, budget.epsilon, REFINED * guess)


# --- steps that are free to depend on what was released -----------------------------------------


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
    tail = noise_tail(
        [*((event, 1) for event in setup), (typical, count)], verdicts_charged=not selected
    )
    noise = getattr(typical.update, "noise_multiplier", 0.0)
    refusal = tail_refusal(tail / TAIL_SHARE, noise, count, budget.delta)
    if refusal is not None:
        raise BudgetError(refusal, code="noise-tail")
    if selected and typical.gate is not None and updates is not None:
        trials = trial_cap(typical.gate, updates, budget)
    phase = Phase(typical, updates, TRIALS if updates is None else ACCEPTED, trials)
    allowed = Filter(best.order, best.allowance)
    return Plan(budget, accounting, (phase,), setup, on_reject, filter=allowed)


def least_plan_noise(plan_with: Callable[[float], Plan]) -> float | None:
    """The least noise, or scale of it, that fits the budget; None where the rest spends it all."""
    plan_with = cache(plan_with)

    @cache
    def epsilon_of(noise: float) -> float:
        return plan_with(noise).epsilon()

    @cache
    def ideal_epsilon_of(noise: float) -> float:
        plan = plan_with(noise)
        charges = plan.charges()
        return accounting_named(plan.accounting).ideal_epsilon(charges, plan.budget.delta)

    if _others_spend_all(plan_with(1.0)):
        return None
    target = plan_with(1.0).budget.epsilon
    # The tail of the noise seldom matters, and then the noise does not depend on its bound.
    return noise_at_least(epsilon_of, target, least_noise(ideal_epsilon_of, target))


def _others_spend_all(plan: Plan) -> bool:
    """Whether setup, tests and releases spend the budget without any update."""
    others = [(e, n) for e, n in plan.charges() if not isinstance(e, Trial | Menu)]
    accounting = accounting_named(plan.accounting)
    return accounting.epsilon(others, plan.budget.delta) >= plan.budget.epsilon


# --- blocks of updates with a test after each ---------------------------------------------------


def block_plan(
    budget: Budget,
    accounting: str,
    update: SampledGaussian,
    test: BlockTest,
    blocks: tuple[int, ...],
    setup: tuple[Event, ...] = (),
    menu: Menu | None = None,
    steering: SampledGaussian | None = None,
    *,
    searches: bool = True,
    may_stop: bool = False,
) -> Plan:
    """Updates in blocks of these numbers, and a noisy test after each; 0 means a test at once.

    With a `menu` the updates are chosen from it, and `update` is its first choice.
    """
    step = Trial(update) if menu is None else menu
    phases = tuple(Phase(step, size, test=test, steering=steering) for size in blocks)
    return Plan(budget, accounting, phases, setup, searches=searches, may_stop=may_stop)


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
        update, scaled = _updates(sample_rate, noise, menu)
        test = _test(test_rate, of_tests)
        return block_plan(
            budget, accounting, update, test, blocks, setup, scaled, steering, searches=searches
        )

    if noise_multiplier is None and test_noise is not None:
        given = test_noise
        return _with_least_noise(lambda noise: plan_with(noise, given))
    noise = noise_multiplier
    if noise is None:
        noise = (1 + tests_cost) * _noise_without_tests(plan_with)
    if test_noise is None:

        def with_tests(value: float) -> float:
            return plan_with(noise, value).epsilon()

        question = ("tests of blocks", plan_with(noise, 1.0))
        least = cached_noise(question, with_tests, budget.epsilon)
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


def _with_least_noise(plan_with: Callable[[float], Plan]) -> Plan:
    """The plan whose updates have the least noise that the budget allows beside its tests."""
    plan = plan_with(1.0)
    epsilon = plan.budget.epsilon
    if _others_spend_all(plan):
        raise BudgetError(
            f"{plan.tests} tests of blocks spend epsilon {epsilon:g} by themselves; raise "
            "val_noise_multiplier or epsilon",
            code="budget-too-small",
        )
    noise = cached(
        ("blocks", plan),
        lambda: least_plan_noise(plan_with),
        lambda noise: plan_with(noise).epsilon() <= epsilon,
    )
    if noise is None:
        raise BudgetError(
            f"epsilon {epsilon:g} is too small for {plan.updates} updates, whatever the noise; "
            "raise epsilon or make fewer updates",
            code="budget-too-small",
        )
    return plan_with(noise)


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


def _test(sample_rate: float | None, noise_multiplier: float) -> BlockTest:
    """The test of a block: on all records, or on a Poisson sample of them."""
    if sample_rate is None:
        return Gaussian(noise_multiplier)
    return SampledGaussian(sample_rate, noise_multiplier)


def _updates(
    sample_rate: float, noise: float, menu: Menu | None
) -> tuple[SampledGaussian, Menu | None]:
    """The update of this noise, and the menu that it is the first choice of."""
    if menu is None:
        return SampledGaussian(sample_rate, noise), None
    scaled = menu.scaled(noise / menu.choices[0].noise_multiplier)
    return scaled.choices[0], scaled


def _noise_without_tests(plan_with: Callable[[float, float], Plan]) -> float:
    """The least noise at which the updates fit the budget on their own."""

    def epsilon_of(noise: float) -> float:
        plan = plan_with(noise, LEAST_TEST_NOISE)
        return plan.epsilon_without_tests()

    plan = plan_with(1.0, LEAST_TEST_NOISE)
    found = cached_noise(("blocks without tests", plan), epsilon_of, plan.budget.epsilon)
    if found is None:
        raise BudgetError(
            f"epsilon {plan.budget.epsilon:g} is too small for {plan.updates} updates, whatever "
            "the noise; raise epsilon or make fewer updates",
            code="budget-too-small",
        )
    return found
