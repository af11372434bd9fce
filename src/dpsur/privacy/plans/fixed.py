"""The plan of a run whose trials are all of one kind, and how it is made from a request.

A request holds what a user fixed; the noise or the number of updates is chosen to fit the budget.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dpsur import checks
from dpsur.errors import BudgetError, InvalidInputError
from dpsur.privacy.accountants.noise_tail import tail_refusal
from dpsur.privacy.accounting import RESTORE, Accounting, accounting_named, figures, planned_charges
from dpsur.privacy.budget import Budget
from dpsur.privacy.calibration_cache import remembered
from dpsur.privacy.events import Event, NonPrivate, Step, Trial, event_from_json, event_to_json
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.plans.protocol import planned_trials, stated_counts
from dpsur.privacy.plans.rejections import DELAY, early_end, least_cap, nothing_to_hide, trial_cap
from dpsur.privacy.search import (
    MOST_NOISE,
    least_noise,
    most_repetitions,
    noise_at_least,
    noise_at_most,
)


@dataclass(frozen=True)
class Plan:
    """The kind of trial that will be repeated, and how often.

    Where trials are charged, exactly `trials` are made. Where accepted updates are charged, exactly
    `updates` are kept and `trials` is a cap whose probability of being hit is negligible against
    delta; a run that hits it releases nothing. `to_the_cap`: after the last update trials continue
    to the cap and are dropped, so that their number is the same for all records.
    """

    budget: Budget
    accounting: str
    trial: Trial
    trials: int
    updates: int | None = None
    setup: tuple[Event, ...] = ()
    on_reject: str = RESTORE
    to_the_cap: bool = False
    same_steps: ClassVar[bool] = True
    position_follows_counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        # However a plan is made, it cannot state a guarantee that its accounting does not cover.
        accounting_named(self.accounting).check(self.trial, self.on_reject)

    @property
    def typical(self) -> Trial:
        """The trial that is repeated."""
        return self.trial

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

    def alike(self, ledger: Ledger) -> int:
        """All that are left: every trial is the same."""
        return self.trials - ledger.trials

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
        """Whether the accounting pays for publishing which trials were rejected."""
        return accounting_named(self.accounting).charges == "trials"

    def covers(self, delta: float) -> bool:
        """Whether there is an epsilon at this delta: a cap on trials is for the budget's."""
        capped = self.updates is not None and self.trial.gate is not None
        return not capped or delta >= self.budget.delta

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon of the completed run at the budget's delta, or at another one."""
        delta = self.budget.delta if delta is None else delta
        if not self.covers(delta):
            raise InvalidInputError(
                f"the cap on trials was chosen for delta {self.budget.delta:g} and does not "
                f"cover {delta:g}; plan the run with the smaller delta"
            )
        accounting = accounting_named(self.accounting)
        return accounting.planned(self.setup, self.trial, self.length, delta)

    def spent(self, ledger: Ledger, delta: float | None = None) -> float:
        """Epsilon so far, as a progress figure."""
        delta = self.budget.delta if delta is None else delta
        return accounting_named(self.accounting).spent(ledger, delta)

    @property
    def unit(self) -> str:
        """What `length` and `position` count."""
        return "trials" if self.updates is None else "updates"

    def describe(self) -> str:
        """One line for whoever starts the run."""
        noise = getattr(self.trial.update, "noise_multiplier", 0.0)
        length = f"{self.length} {self.unit}"
        if self.to_the_cap:
            length += f" in {self.trials} trials, whatever is rejected,"
        return f"{length} at noise multiplier {noise:.3f}, {self.accounting}"

    def limited(self, most: int) -> "Plan":
        """The same plan, ended after fewer updates (or trials, where those are charged)."""
        if most >= self.length:
            return self
        if self.updates is None:
            return replace(self, trials=most)
        gate = self.trial.gate
        cap = most if gate is None else trial_cap(gate, most, self.budget)
        return replace(self, updates=most, trials=cap)

    @property
    def fixed_counts(self) -> Mapping[str, int]:
        """Counts that the plan fixes, by the name of the setting that they belong to."""
        return {"updates": self.length, "trials": self.trials}

    def hide_rejections(self, way: str) -> "Plan":
        """The plan of a run that hides its rejections; refuses where there are none to hide."""
        gate = self.trial.gate
        if gate is None:
            raise nothing_to_hide(way, "no candidate is rejected")
        if self.updates is None:
            raise nothing_to_hide(way, "verdicts are charged and public")
        if way == DELAY:
            return self
        return replace(self, trials=least_cap(gate, self.updates, self.budget), to_the_cap=True)

    def figures(self) -> dict[str, float | None]:
        """Epsilon of a completed run under each accounting; None where one does not apply."""
        updates, trials = self.updates, self.trials if self.updates is None else None
        if self.trial.test is None:  # every trial is an update, so both counts are fixed
            updates = trials = self.length
        ended = 0.0
        if self.trial.gate is not None and updates is not None:
            ended = early_end(self.trial.gate, updates, self.trials)
        return figures(
            self.setup,
            self.trial,
            self.budget.delta,
            updates=updates,
            trials=trials,
            on_reject=self.on_reject,
            early_end=ended,
            requested=self.accounting,
        )

    def to_statement(self, ledger: Ledger) -> dict[str, Any]:  # noqa: ARG002
        """The mechanism in a privacy statement: all of it was fixed in advance."""
        return {"trial": event_to_json(self.trial), "filter": None, **stated_counts(self)}

    @staticmethod
    def from_statement(statement: Mapping[str, Any]) -> "Plan":
        """The plan that a privacy statement describes."""
        mechanism, guarantee = statement["mechanism"], statement["guarantee"]
        epsilon = statement["budget"]["epsilon"]
        return Plan.from_json(
            {
                "epsilon": math.inf if epsilon is None else epsilon,
                "delta": guarantee["delta"],
                "accounting": guarantee["accounting"],
                "trial": mechanism["trial"],
                "trials": planned_trials(mechanism),
                "updates": mechanism["updates"],
                "setup": mechanism["setup"],
                "on_reject": mechanism["on_reject"],
                "to_the_cap": mechanism["to_the_cap"],
            }
        )

    def step_faults(self, mechanism: Mapping[str, Any], tolerance: float) -> list[str]:  # noqa: ARG002
        """None: no steps are listed where all are the same."""
        return []

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

    def search() -> float | None:
        # The tail of the noise seldom matters, and then the noise does not depend on its bound.
        ideal = _refined_noise(request, accounting, budget, count, ideal_epsilon_of)
        return noise_at_least(epsilon_of, budget.epsilon, ideal)

    trials = (request.trial_with(1.0), request.trial_with(2.0))
    question = ("fixed", accounting.name, budget, count, request.setup, trials)
    noise = remembered(question, search, lambda noise: epsilon_of(noise) <= budget.epsilon)
    if noise is None:
        test = trials[0].test is not None
        raise BudgetError(
            f"epsilon {budget.epsilon:g} is too small for {count} updates, whatever the noise: "
            "raise epsilon or make fewer updates"
            + (", or lower val_batch_size or raise val_noise_multiplier" if test else "")
        )
    return noise


def _refined_noise(
    request: Request,
    accounting: Accounting,
    budget: Budget,
    count: int,
    epsilon_of: Callable[[float], float],
) -> float | None:
    """The least noise; from what is enough by the figure that the accounting refines, if any."""
    if accounting.refines is not None:
        try:
            known = _calibrated_noise(request, accounting_named(accounting.refines), budget, count)
        except BudgetError:  # what is too much by the looser figure may still fit
            if epsilon_of(MOST_NOISE) > budget.epsilon:
                return None
        else:
            return noise_at_most(epsilon_of, budget.epsilon, known)
    return least_noise(epsilon_of, budget.epsilon)
