"""The plan of a run whose trials are all of one kind."""

from dataclasses import dataclass, replace
from typing import Any

from dpsur.errors import BudgetError, InvalidInputError
from dpsur.privacy.accounting import RESTORE, accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event, Step, Trial, event_from_json, event_to_json
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.plans.cap import trial_cap


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

    def spent(self, ledger: Ledger) -> float:
        """Epsilon so far, as a progress figure."""
        return accounting_named(self.accounting).spent(ledger, self.budget.delta)

    @property
    def unit(self) -> str:
        """What `length` and `position` count."""
        return "trials" if self.updates is None else "updates"

    def in_words(self) -> str:
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
