"""What plans have in common whose steps are all charged, in an order that is fixed in advance."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from dpsur.errors import BudgetError
from dpsur.privacy.accounting import RESTORE, Accounting, accounting_named, only_figure
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event, Step
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.plans.rejections import steps_differ


class ChargedSequence(ABC):
    """Every step is charged, kept or not, so what steps decide is public.

    `part` is the key under which a statement lists the plan and its steps.
    """

    budget: Budget
    accounting: str
    updates: Any  # a field or a property of the plan
    part: ClassVar[str]
    on_reject: ClassVar[str] = RESTORE
    unit: ClassVar[str] = "updates"
    same_steps: ClassVar[bool] = False
    position_follows_counts: ClassVar[bool] = True
    to_the_cap: ClassVar[bool] = False  # there are no rejections to hide
    verdicts_are_public: ClassVar[bool] = True

    @abstractmethod
    def affords(self, ledger: Ledger, step: Step) -> bool:
        """Whether one more step fits; a step that was not planned is an error."""

    @abstractmethod
    def completed(self, ledger: Ledger) -> bool:
        """Whether the run did what was planned, so that its result may be released."""

    @abstractmethod
    def to_statement(self, ledger: Ledger) -> dict[str, Any]:
        """The mechanism in a privacy statement."""

    @abstractmethod
    def charges(self) -> list[tuple[Event, int]]:
        """All events of a completed run, and how often each happens."""

    @property
    def trials(self) -> int:
        """Every trial is an update."""
        count: int = self.updates
        return count

    @property
    def length(self) -> int:
        """What a schedule counts to."""
        return self.trials

    @property
    def kept(self) -> int | None:
        """Updates of a completed run."""
        return self.trials

    def position(self, ledger: Ledger) -> int:
        """How far a run has come on that scale."""
        return ledger.updates

    def alike(self, ledger: Ledger) -> int:  # noqa: ARG002
        """One: what the next step costs may depend on what this one released."""
        return 1

    def drops(self, ledger: Ledger) -> bool:  # noqa: ARG002
        """Never: a trial whose outcome is dropped is not made."""
        return False

    def covers(self, delta: float) -> bool:  # noqa: ARG002
        """Whether there is an epsilon at this delta: at each, since nothing was set aside."""
        return True

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon of the completed run at the budget's delta, or at another one."""
        return self.epsilon_of(self.charges(), delta)

    def epsilon_of(self, charges: list[tuple[Event, int]], delta: float | None = None) -> float:
        """Epsilon of some charges under the plan's accounting."""
        return self._accounting.epsilon(charges, self.budget.delta if delta is None else delta)

    @property
    def _accounting(self) -> Accounting:
        return accounting_named(self.accounting)

    def hide_rejections(self, way: str) -> Self:
        """Refused: steps differ in cost, and what they decide is public."""
        raise steps_differ(way)

    def figures(self) -> dict[str, float | None]:
        """Epsilon under its own accounting; there is no guarantee under another."""
        return only_figure(self.accounting, self.epsilon())

    def allows(self, ledger: Ledger) -> bool:
        """Whether the steps of a ledger are those of a whole run under this plan."""
        done = Ledger()
        try:
            for entry in ledger.entries:
                if not entry.trials:  # no run notes what it did not do
                    return False
                for _ in range(entry.trials):
                    if not self.affords(done, entry.step):
                        return False
                    done = done.record(entry.step, updates=1)
        except BudgetError:
            return False
        return self.completed(done)

    def step_faults(self, mechanism: Mapping[str, Any], tolerance: float) -> list[str]:  # noqa: ARG002
        """The steps that a statement lists must be planned ones, in order and in number."""
        rows = [
            {"step": row["step"], "trials": row["charged"], "updates": row["charged"]}
            for row in mechanism[self.part]["steps"]
        ]
        ledger = Ledger.from_json({"setup": [], "entries": rows})
        faults = []
        if not self.allows(ledger):
            faults.append(f"the steps are not those of a run by the stated {self.part}")
        if mechanism != self.to_statement(ledger):
            faults.append(f"the mechanism says more or something else than its {self.part}")
        return faults
