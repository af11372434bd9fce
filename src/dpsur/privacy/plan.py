"""The budget and the plan: everything that decides a run's privacy, fixed before it starts."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from scipy.special import bdtr

from dpsur import checks
from dpsur.errors import BudgetError, InvalidInputError
from dpsur.privacy.accounting import CAP_SHARE, RESTORE, Accounting, accounting_named
from dpsur.privacy.calibrate import least_noise, most_repetitions
from dpsur.privacy.events import (
    Event,
    NonPrivate,
    Step,
    Test,
    Trial,
    event_from_json,
    event_to_json,
)
from dpsur.privacy.ledger import Ledger


@dataclass(frozen=True)
class Budget:
    """The (epsilon, delta) that a run may spend, for adding or removing one record."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        checks.number("epsilon", self.epsilon)
        if not self.epsilon > 0:
            raise InvalidInputError(f"epsilon must be above 0, got {self.epsilon}")
        checks.probability("delta", self.delta)

    def warnings(self, dataset_size: int) -> list[str]:
        """What a reviewer would object to."""
        if self.delta <= 1 / dataset_size:
            return []
        return [
            f"delta {self.delta:g} is above 1/N = {1 / dataset_size:.3g} for N = {dataset_size}: "
            "a mechanism that publishes one whole record could satisfy it; choose a smaller delta"
        ]


@dataclass(frozen=True)
class Plan:
    """The kind of trial that will be repeated, and how often.

    Where trials are charged, exactly `trials` are made. Where accepted updates are charged, exactly
    `updates` are kept and `trials` is a cap whose probability of being hit is negligible against
    delta; a run that hits it releases nothing. `to_the_cap`: after the last update trials go on to
    the cap and are dropped, so that their number is the same for all records.
    """

    budget: Budget
    accounting: str
    trial: Trial
    trials: int
    updates: int | None = None
    setup: tuple[Event, ...] = ()
    on_reject: str = RESTORE
    to_the_cap: bool = False

    def __post_init__(self) -> None:
        # However a plan is made, it cannot state a guarantee that its accounting does not cover.
        accounting_named(self.accounting).check(self.trial, self.on_reject)

    def affords(self, ledger: Ledger, step: Step) -> bool:
        """Whether one more step fits. Asked before the step, never after."""
        if step != self.trial:
            raise BudgetError(f"{step} was not planned: the plan repeats {self.trial}")
        if self.updates is not None and ledger.updates >= self.updates:
            return False
        return ledger.trials < self.trials

    def completed(self, ledger: Ledger) -> bool:
        """Whether the run did what was planned, so that its result may be released."""
        if self.updates is None:
            return ledger.trials == self.trials
        return ledger.updates == self.updates

    def drops(self, ledger: Ledger) -> bool:
        """Whether one more trial is to be made, whose outcome is dropped."""
        return self.to_the_cap and self.completed(ledger) and ledger.trials < self.trials

    @property
    def length(self) -> int:
        """What a schedule counts to: planned trials or planned updates."""
        return self.trials if self.updates is None else self.updates

    @property
    def kept(self) -> int | None:
        """Updates of a completed run, where they are fixed in advance."""
        return self.trials if self.trial.gate is None else self.updates

    def position(self, ledger: Ledger) -> int:
        """How far a run has come on that scale."""
        return ledger.trials if self.updates is None else ledger.updates

    @property
    def verdicts_are_public(self) -> bool:
        """Whether the accounting paid for telling which trials were rejected."""
        return accounting_named(self.accounting).charges == "trials"

    def epsilon(self) -> float:
        """Epsilon of the completed run under its own accounting."""
        accounting = accounting_named(self.accounting)
        return accounting.planned(self.setup, self.trial, self.length, self.budget.delta)

    def spent(self, ledger: Ledger) -> float:
        """Epsilon so far, as a progress figure."""
        return accounting_named(self.accounting).spent(ledger, self.budget.delta)

    def limited(self, most: int) -> "Plan":
        """The same plan, ended after fewer updates (or trials, where those are charged)."""
        if most >= self.length:
            return self
        if self.updates is None:
            return replace(self, trials=most)
        gate = self.trial.gate
        cap = most if gate is None else trial_cap(gate, most, self.budget)
        return replace(self, updates=most, trials=cap)

    def to_json(self) -> dict[str, Any]:
        """Write the plan as plain values."""
        return {
            "epsilon": self.budget.epsilon,
            "delta": self.budget.delta,
            "accounting": self.accounting,
            "trial": event_to_json(self.trial),
            "trials": self.trials,
            "updates": self.updates,
            "setup": [event_to_json(event) for event in self.setup],
            "on_reject": self.on_reject,
            "to_the_cap": self.to_the_cap,
        }

    @staticmethod
    def from_json(values: dict[str, Any]) -> "Plan":
        """Read what `to_json` wrote."""
        trial = event_from_json(values["trial"])
        if not isinstance(trial, Trial):
            raise InvalidInputError(f"a plan repeats a Trial, got {values['trial']!r}")
        return Plan(
            budget=Budget(values["epsilon"], values["delta"]),
            accounting=values["accounting"],
            trial=trial,
            trials=values["trials"],
            updates=values["updates"],
            setup=tuple(event_from_json(event) for event in values["setup"]),
            on_reject=values["on_reject"],
            to_the_cap=values["to_the_cap"],
        )


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


def trial_cap(test: Test, updates: int, budget: Budget) -> int:
    """Trials after which a run gives up, so late that giving up costs less than CAP_SHARE * delta.

    Stopping early fails with probability at most eta = P[Bin(m, a_min) < T] whatever the data, and
    turns (epsilon, delta) into (epsilon, delta + (1 + e^epsilon) eta).
    """
    if test.accept_min == 0:
        raise BudgetError(
            f"{test} never accepts the worst candidate, so no number of trials is enough; raise "
            "accept_threshold or val_noise_multiplier"
        )
    enough = math.ceil(1.5 * updates / test.accept_min)
    while not late_enough(test, updates, budget, enough):
        enough = math.ceil(1.25 * enough)
    return enough


def late_enough(test: Test, updates: int, budget: Budget, trials: int) -> bool:
    """Whether giving up after so many trials costs no more than is set aside for it."""
    allowed = CAP_SHARE * budget.delta / (1 + math.exp(min(budget.epsilon, 700.0)))
    return float(bdtr(updates - 1, trials, test.accept_min)) <= allowed


def _check_fits(
    request: Request, accounting: Accounting, budget: Budget, noise: float, count: int
) -> None:
    epsilon = accounting.planned(request.setup, request.trial_with(noise), count, budget.delta)
    if epsilon > budget.epsilon:
        raise BudgetError(
            f"noise multiplier {noise:g} over {count} charged trials or updates spends epsilon "
            f"{epsilon:.4g}, above the budget of {budget.epsilon:g}: raise epsilon, or leave out "
            "either the noise multiplier or the count so that it is chosen to fit"
        )


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

    noise = least_noise(epsilon_of, budget.epsilon)
    if noise is None:
        raise BudgetError(
            f"epsilon {budget.epsilon:g} is too small for {count} updates, whatever the noise: "
            "raise epsilon, make fewer updates, lower val_batch_size or raise val_noise_multiplier"
        )
    return noise
