"""From what a user fixed to a plan: the noise or the number of updates is chosen to fit."""

from collections.abc import Callable
from dataclasses import dataclass

from dpsur import checks
from dpsur.errors import BudgetError
from dpsur.privacy.accounting import RESTORE, Accounting, accounting_named, planned_charges
from dpsur.privacy.budget import Budget
from dpsur.privacy.calibrate import least_noise, most_repetitions, noise_at_least
from dpsur.privacy.events import Event, NonPrivate, Trial
from dpsur.privacy.noise_tail import tail_refusal
from dpsur.privacy.plans.cap import trial_cap
from dpsur.privacy.plans.fixed import Plan


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
    return Plan(budget, accounting.name, trial, trials, updates, request.setup, request.on_reject)


def _check_fits(
    request: Request, accounting: Accounting, budget: Budget, noise: float, count: int
) -> None:
    _check_tail(request, accounting, budget, noise, count)
    epsilon = accounting.planned(request.setup, request.trial_with(noise), count, budget.delta)
    if epsilon > budget.epsilon:
        raise BudgetError(
            f"noise multiplier {noise:g} over {count} charged trials or updates spends epsilon "
            f"{epsilon:.4g}, above the budget of {budget.epsilon:g}: raise epsilon, or leave out "
            "either the noise multiplier or the count so that it is chosen to fit"
        )


def _check_tail(
    request: Request, accounting: Accounting, budget: Budget, noise: float, count: int
) -> None:
    """Refuse noise whose missing tail alone spends delta."""
    charges = planned_charges(request.setup, request.trial_with(noise), count)
    refusal = tail_refusal(accounting.noise_tail(charges), noise, count, budget.delta)
    if refusal is not None:
        raise BudgetError(refusal)


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
            "raise epsilon or the noise multiplier, or lower the batch sizes"
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

    # The tail of the noise seldom matters, and then the noise does not depend on its bound.
    ideal = least_noise(ideal_epsilon_of, budget.epsilon)
    noise = noise_at_least(epsilon_of, budget.epsilon, ideal)
    if noise is None:
        raise BudgetError(
            f"epsilon {budget.epsilon:g} is too small for {count} updates, whatever the noise: "
            "raise epsilon, make fewer updates, lower val_batch_size or raise val_noise_multiplier"
        )
    return noise
