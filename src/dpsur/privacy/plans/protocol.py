"""What every privacy plan offers: the loop, the run and the statement need nothing else of it."""

from collections.abc import Mapping
from typing import Any, Protocol

from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event, Step, Trial, event_to_json
from dpsur.privacy.ledger import Ledger


class PrivacyPlan(Protocol):
    """Everything that decides a run's privacy, fixed before it starts.

    Formal guarantee: if every step of a run was asked for with `affords` before it was taken and
    recorded in the ledger, and the result is released only where the run is `completed`, then the
    release satisfies (`epsilon()`, `budget.delta`)-DP under adding or removing one record, as far
    as the accounting is proved.
    """

    @property
    def budget(self) -> Budget:
        """The (epsilon, delta) that the run may spend."""
        ...

    @property
    def accounting(self) -> str:
        """The name of the accounting."""
        ...

    @property
    def setup(self) -> tuple[Event, ...]:
        """Events before the first step, each charged once."""
        ...

    @property
    def on_reject(self) -> str:
        """What a rejected trial leaves behind."""
        ...

    @property
    def typical(self) -> Trial:
        """The trial that is repeated, or a typical one where trials differ."""
        ...

    @property
    def trials(self) -> int:
        """How many trials are made, or the cap on them where updates are counted."""
        ...

    @property
    def updates(self) -> int | None:
        """How many updates are kept; None where trials are counted."""
        ...

    @property
    def to_the_cap(self) -> bool:
        """Whether trials continue to the cap after the last update, and are dropped."""
        ...

    @property
    def same_steps(self) -> bool:
        """Whether all steps are the same, so that many can be made before the ledger is read.

        Otherwise what the next step costs may depend on what the last one released.
        """
        ...

    @property
    def position_follows_counts(self) -> bool:
        """Whether `position` is the number of updates, or of trials where `updates` is None."""
        ...

    @property
    def length(self) -> int:
        """What a schedule counts to."""
        ...

    @property
    def unit(self) -> str:
        """What `length` and `position` count."""
        ...

    @property
    def kept(self) -> int | None:
        """Updates of a completed run, where they are fixed in advance."""
        ...

    @property
    def verdicts_are_public(self) -> bool:
        """Whether the accounting pays for publishing which trials were rejected."""
        ...

    @property
    def fixed_counts(self) -> Mapping[str, int]:
        """Counts that the plan fixes, by the name of the setting that they belong to."""
        ...

    def affords(self, ledger: Ledger, step: Step) -> bool:
        """Whether one more step fits. Asked before the step, never after."""
        ...

    def alike(self, ledger: Ledger) -> int:
        """How many trials can be made, all like the next one, before the ledger is read again.

        0 where a step that is no trial comes next.
        """
        ...

    def drops(self, ledger: Ledger) -> bool:
        """Whether one more trial is to be made, whose outcome is dropped."""
        ...

    def completed(self, ledger: Ledger) -> bool:
        """Whether the run did what was planned, so that its result may be released."""
        ...

    def position(self, ledger: Ledger) -> int:
        """How far a run has come, from 0 to `length`."""
        ...

    def covers(self, delta: float) -> bool:
        """Whether there is an epsilon at this delta."""
        ...

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon of the completed run at the budget's delta, or at another one."""
        ...

    def spent(self, ledger: Ledger, delta: float | None = None) -> float:
        """Epsilon so far, as a progress figure: the guarantee is `epsilon()`."""
        ...

    def figures(self) -> dict[str, float | None]:
        """Epsilon of a completed run under each accounting; None where one does not apply."""
        ...

    def limited(self, most: int) -> "PrivacyPlan":
        """The same plan, ended after fewer updates (or trials, where those are counted)."""
        ...

    def hide_rejections(self, way: str) -> "PrivacyPlan":
        """The plan of a run that hides its rejections; refuses where there are none to hide."""
        ...

    def describe(self) -> str:
        """One line for whoever starts the run."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Write the plan as plain values."""
        ...

    def to_statement(self, ledger: Ledger) -> dict[str, Any]:
        """The mechanism in a privacy statement: what was planned and done, nothing private.

        `dpsur.privacy.plans.plan_from_statement` reads the plan back.
        """
        ...

    def step_faults(self, mechanism: Mapping[str, Any], tolerance: float) -> list[str]:
        """Why the steps that a statement lists are not those of a run under this plan."""
        ...


def stated_counts(plan: PrivacyPlan) -> dict[str, Any]:
    """What the statements of all plans have in common."""
    return {
        "setup": [event_to_json(event) for event in plan.setup],
        "on_reject": plan.on_reject,
        "updates": plan.updates,
        "trials": plan.trials if plan.updates is None else None,
        "trial_cap": None if plan.updates is None else plan.trials,
        "to_the_cap": plan.to_the_cap,
    }


def stated_steps(plan: PrivacyPlan, ledger: Ledger) -> list[dict[str, Any]]:
    """The steps of a run and how often each was charged.

    Their rates and noise follow from released values, so they may be published. How many trials
    were rejected may be published only where they were charged.
    """
    return [
        {
            "step": event_to_json(entry.step),
            "charged": entry.trials if plan.verdicts_are_public else entry.updates,
        }
        for entry in ledger.entries
    ]


def planned_trials(mechanism: Mapping[str, Any]) -> int:
    """The trials of a stated plan, or its cap on them."""
    count: int = mechanism["trials" if mechanism["updates"] is None else "trial_cap"]
    return count
