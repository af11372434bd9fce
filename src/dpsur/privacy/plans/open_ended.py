"""A ledger that is charged step by step, for training loops that you own.

The loop asks for every step before it makes it. What is promised is decided before the first step:
by a number of equal steps, or by the allowance of a Rényi filter, under which steps may differ and
may depend on what earlier ones released.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from dpsur import checks
from dpsur.errors import BudgetError, InvalidInputError
from dpsur.privacy.accounting import RESTORE, accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event, Gaussian, NonPrivate, SampledGaussian, Step, Trial
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.plans.blocks import BlockPlan
from dpsur.privacy.plans.filtered import FilteredPlan
from dpsur.privacy.plans.fixed import Plan, Request, make_plan

FORMAT: Final = "dpsur-ledger/1"
# Every step is charged with everything that it releases, verdicts of tests included.
ACCOUNTING: Final = "every-trial"
# Accepted updates are charged, and only those.
PROVEN: Final = "proven"
# Kinds of steps up to which `spent` composes privacy loss distributions, one for each kind.
MOST_KINDS = 32


class PrivacyLedger:
    """Charges the steps of a loop before they are made, and refuses those that do not fit.

    There are three forms, and the form is chosen before the first step:

    - `PrivacyLedger.for_steps(step, steps, delta=...)`: a number of equal steps. `guarantee()` is
      their exact composition by privacy loss distributions.
    - `PrivacyLedger.for_budget(epsilon, delta, typical)`: the allowance of a Rényi filter. Steps
      may differ, and each may depend on everything released before it. `guarantee()` is at most
      epsilon.
    - `PrivacyLedger.without_limit(delta)`: a record only. Nothing is promised in advance, so
      `guarantee()` is infinite.

    Formal guarantee: let every step be charged before it is made; let each be what its event says,
    given everything released before; and let the records be used in no other way. Then all that the
    steps release, and all that follows from it, satisfies (`guarantee()`, delta)-DP under adding or
    removing one record, whenever the loop stops. `spent()` is a progress figure. It is a guarantee
    of its own only where the number and the kind of the steps made so far were fixed without
    looking at anything that depends on the records. Stopping early because of what one sees does
    not lower the guarantee to `spent()`: it stays that of all steps, or of the whole allowance.
    """

    def __init__(
        self,
        plan: Plan | FilteredPlan | BlockPlan | None,
        delta: float,
        charged: Ledger | None = None,
    ) -> None:
        checks.probability("delta", delta)
        self._plan, self._delta = plan, delta
        self._charged = Ledger(setup=() if plan is None else plan.setup)
        if charged is not None:
            self._charged = charged

    @staticmethod
    def for_steps(
        step: Step,
        steps: int,
        *,
        delta: float,
        epsilon: float | None = None,
        setup: tuple[Event, ...] = (),
    ) -> "PrivacyLedger":
        """A number of equal steps, fixed before the first; refused where they exceed epsilon."""
        checks.at_least_one("the number of steps", steps)
        trial = _as_trial(step)
        unlimited = math.inf if epsilon is None else epsilon
        plan = Plan(Budget(unlimited, delta), ACCOUNTING, trial, steps, setup=setup)
        if plan.epsilon() > unlimited:
            raise BudgetError(
                f"{steps} steps of {trial} spend epsilon {plan.epsilon():.4g} at delta {delta:g}, "
                f"above {unlimited:g}: raise epsilon or the noise multiplier, or make fewer steps"
            )
        return PrivacyLedger(plan, delta)

    @staticmethod
    def for_budget(
        epsilon: float, delta: float, typical: Step, *, setup: tuple[Event, ...] = ()
    ) -> "PrivacyLedger":
        """The allowance of a Rényi filter, at the order that affords most steps like `typical`."""
        plan = FilteredPlan.for_budget(
            Budget(epsilon, delta), ACCOUNTING, _as_trial(typical), updates=None, setup=setup
        )
        return PrivacyLedger(plan, delta)

    @staticmethod
    def without_limit(delta: float) -> "PrivacyLedger":
        """A record of steps, without a promise made in advance."""
        return PrivacyLedger(None, delta)

    def __repr__(self) -> str:
        return f"PrivacyLedger({self.steps} steps charged, {self.describe()})"

    @property
    def delta(self) -> float:
        """The delta of the guarantee."""
        return self._delta

    @property
    def steps(self) -> int:
        """Steps charged so far."""
        return self._charged.steps

    @property
    def plan(self) -> Plan | FilteredPlan | BlockPlan | None:
        """What was fixed before the first step."""
        return self._plan

    @property
    def charged(self) -> Ledger:
        """All steps charged so far."""
        return self._charged

    def describe(self) -> str:
        """What the ledger allows, in one line."""
        if self._plan is None:
            return "no limit, nothing is promised in advance"
        return f"{self._plan.describe()}, epsilon {self.guarantee():.4g} at delta {self._delta:g}"

    def affords(self, step: Step) -> bool:
        """Whether one more step like this fits."""
        try:
            self._check(_as_step(step))
        except BudgetError:
            return False
        return True

    def charge(self, step: Step) -> None:
        """Charge one step that is about to be made. Raises BudgetError where it does not fit.

        After an error nothing was charged, and the step must not be made.
        """
        charged = _as_step(step)
        self._check(charged)
        self._charged = self._charged.record(charged, updates=1)

    def _check(self, step: Step) -> None:
        if isinstance(step, Trial):
            accounting_named(ACCOUNTING).check(step, RESTORE)
        if self._plan is not None and not self._plan.affords(self._charged, step):
            raise BudgetError(
                f"{step} does not fit after {self.steps} steps ({self.describe()}): stop here and "
                "release what you have, or plan a new run with more steps or a larger epsilon"
            )

    def guarantee(self, delta: float | None = None) -> float:
        """Epsilon that holds whenever the loop stops; infinite without a limit."""
        if self._plan is None:
            return math.inf
        return self._plan.epsilon(self._delta if delta is None else delta)

    def spent(self, delta: float | None = None) -> float:
        """Epsilon of the steps charged so far, by privacy loss distributions: a progress figure.

        Behind a filter that let many kinds of steps pass it is the filter's own figure, which is
        larger and takes no time.
        """
        delta = self._delta if delta is None else delta
        checks.probability("delta", delta)
        counts: Counter[Event] = Counter(self._charged.setup)
        for entry in self._charged.entries:  # equal steps together, in whatever order they came
            counts[entry.step] += entry.trials
        if self._plan is not None and len(counts) > MOST_KINDS:
            return self._plan.spent(self._charged, delta)
        return accounting_named(ACCOUNTING).epsilon(list(counts.items()), delta)

    def get_epsilon(self, delta: float) -> float:
        """The same as `spent`, under the name that other libraries use.

        Not a guarantee for a loop that stops because of what it sees: that is `guarantee()`.
        """
        return self.spent(delta)

    def to_json(self) -> dict[str, Any]:
        """Write the ledger as plain values.

        Store it together with the weights. A loop that resumes from it must forget whatever came of
        steps that are not in it.
        """
        kind = {type(None): "none", Plan: "steps", FilteredPlan: "filter"}[type(self._plan)]
        plan = None if self._plan is None else self._plan.to_json()
        if plan is not None and math.isinf(plan["epsilon"]):
            plan["epsilon"] = None  # which JSON can write
        return {
            "format": FORMAT,
            "limit": kind,
            "delta": self._delta,
            "plan": plan,
            "charged": self._charged.to_json(),
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "PrivacyLedger":
        """Read what `to_json` wrote; refuses a ledger whose steps do not fit its own limit."""
        if values.get("format") != FORMAT:
            raise InvalidInputError(f"not a privacy ledger of the format {FORMAT}")
        if values["limit"] == "updates":
            selective = SelectiveLedger(Plan.from_json(values["plan"]), values["delta"])
            if selective._plan.accounting != PROVEN:
                raise InvalidInputError("the ledger's plan has another accounting")
            selective._charged = Ledger.from_json(values["charged"])
            return selective
        if values["limit"] == "blocks":
            return BlockLedger.from_plan(
                BlockPlan.from_json(values["plan"]), Ledger.from_json(values["charged"])
            )
        plan: Plan | FilteredPlan | None = None
        if values["limit"] != "none":
            checks.one_of("limit", values["limit"], ("none", "steps", "filter"))
            kind = Plan if values["limit"] == "steps" else FilteredPlan
            epsilon = values["plan"]["epsilon"]
            plan = kind.from_json(
                {**values["plan"], "epsilon": math.inf if epsilon is None else epsilon}
            )
            if plan.accounting != ACCOUNTING or plan.budget.delta != values["delta"]:
                raise InvalidInputError("the ledger's plan has another accounting or delta")
            if plan.epsilon() > plan.budget.epsilon:
                raise InvalidInputError(
                    f"the ledger's limit comes to epsilon {plan.epsilon():.4g}, above the "
                    f"{plan.budget.epsilon:g} that it states"
                )
        charged = Ledger.from_json(values["charged"])
        ledger = PrivacyLedger(plan, values["delta"], charged)
        ledger._check_charged()
        return ledger

    def _check_charged(self) -> None:
        """Refuse a history that this ledger would not have charged."""
        history, self._charged = self._charged, Ledger(setup=self._charged.setup)
        if self._plan is not None and history.setup != self._plan.setup:
            raise InvalidInputError("the ledger was charged another setup than its plan has")
        for entry in history.entries:
            if not entry.trials:
                raise InvalidInputError(f"the ledger lists {entry.step}, made not once")
            # The last step of a block fits if and only if the whole block does.
            self._charged = self._charged.record(
                entry.step, updates=entry.trials - 1, trials=entry.trials - 1
            )
            self._check(_as_step(entry.step))
            self._charged = self._charged.record(entry.step, updates=1)


class SelectiveLedger(PrivacyLedger):
    """A number of accepted updates, fixed before the first trial; rejected trials cost nothing.

    Formal guarantee: let the loop end after exactly `updates` accepted updates; let everything that
    a rejected trial touched be restored; let the number of rejected trials stay private; and let a
    loop that reaches the cap on trials release nothing. Then what is released satisfies
    (`guarantee()`, delta)-DP under adding or removing one record (`proven`).
    """

    _plan: Plan

    @staticmethod
    def for_updates(
        trial: Trial, updates: int, *, delta: float, epsilon: float | None = None
    ) -> "SelectiveLedger":
        """So many accepted updates; refused where they exceed epsilon."""
        if epsilon is None:
            checks.at_least_one("the number of updates", updates)
            epsilon = accounting_named(PROVEN).planned((), trial, updates, delta)
        request = Request(
            trial_with=lambda _: trial,
            noise_multiplier=trial_noise(trial),
            count=updates,
            default_count=updates,
        )
        return SelectiveLedger(make_plan(request, Budget(epsilon, delta), PROVEN), delta)

    @property
    def completed(self) -> bool:
        """Whether all updates were made, so that their result may be released."""
        return self._plan.completed(self._charged)

    @property
    def given_up(self) -> bool:
        """Whether the cap on trials was reached before that."""
        return not self.completed and self._charged.trials >= self._plan.trials

    def charge(self, step: Step) -> None:
        """Count a trial that is about to be made."""
        self._check(step)
        self._charged = self._charged.record(step, updates=0)

    def accept(self) -> None:
        """Charge the trial that was counted last: its candidate is kept."""
        *before, last = self._charged.entries
        accepted = replace(last, updates=last.updates + 1)
        self._charged = replace(self._charged, entries=(*before, accepted))

    def _check(self, step: Step) -> None:
        if not self._plan.affords(self._charged, step):
            raise BudgetError(
                f"all {self._plan.updates} updates were made ({self.describe()}): stop here and "
                "release what you have"
            )

    def spent(self, delta: float | None = None) -> float:
        """Epsilon of the updates so far: a progress figure, of which a loop must not make use."""
        return self._plan.spent(self._charged, self._delta if delta is None else delta)

    def to_json(self) -> dict[str, Any]:
        """Write the ledger as plain values. Private: it holds the number of rejected trials."""
        return {
            "format": FORMAT,
            "limit": "updates",
            "delta": self._delta,
            "plan": self._plan.to_json(),
            "charged": self._charged.to_json(),
        }


class BlockLedger(PrivacyLedger):
    """Updates in blocks and tests of them, in the order of a `BlockPlan`; all are charged.

    Formal guarantee: that of the plan. A loop that stops early has the same figure.
    """

    _plan: BlockPlan

    @staticmethod
    def from_plan(plan: BlockPlan, charged: Ledger | None = None) -> "BlockLedger":
        """A ledger for the steps of a plan, some of which may have been made."""
        if plan.accounting != ACCOUNTING:
            raise InvalidInputError("the ledger's plan has another accounting")
        if plan.epsilon() > plan.budget.epsilon:
            raise InvalidInputError(
                f"the ledger's plan comes to epsilon {plan.epsilon():.4g}, above the "
                f"{plan.budget.epsilon:g} that it states"
            )
        ledger = BlockLedger(plan, plan.budget.delta)
        for entry in () if charged is None else charged.entries:
            for _ in range(entry.trials):
                ledger.charge(entry.step)
        return ledger

    @property
    def completed(self) -> bool:
        """Whether all updates and all tests were made."""
        return self._plan.completed(self._charged)

    @property
    def updates(self) -> int:
        """All updates of the plan."""
        return self._plan.updates

    @property
    def test_is_due(self) -> bool:
        """Whether a test comes next."""
        return not self.completed and self._plan.alike(self._charged) == 0

    @property
    def made(self) -> int:
        """Updates since the last test."""
        return self._charged.updates - sum(self._plan.blocks[: self.tests])

    @property
    def tests(self) -> int:
        """Tests charged so far."""
        return self.steps - self._charged.trials

    def update_steps(self) -> list[int]:
        """The numbers of the steps that are updates still to be made."""
        ends: list[int] = []
        for number, size in enumerate(self._plan.blocks):
            first = sum(self._plan.blocks[:number]) + number + 1
            ends += range(first, first + size)
        return [step for step in ends if step > self.steps]

    def charge(self, step: Step) -> None:
        """Charge one update or test that is about to be made."""
        self._check(step)
        self._charged = self._charged.record(step, updates=1)

    def _check(self, step: Step) -> None:
        if not self._plan.affords(self._charged, step):
            raise BudgetError(
                f"all of the plan was done ({self.describe()}): stop here and release what you have"
            )

    def spent(self, delta: float | None = None) -> float:
        """Epsilon of the updates and tests so far: a progress figure."""
        return self._plan.spent(self._charged, self._delta if delta is None else delta)

    def to_json(self) -> dict[str, Any]:
        """Write the ledger as plain values."""
        return {
            "format": FORMAT,
            "limit": "blocks",
            "delta": self._delta,
            "plan": self._plan.to_json(),
            "charged": self._charged.to_json(),
        }


def trial_noise(trial: Trial) -> float:
    """The noise multiplier of the update of a trial."""
    if not isinstance(trial.update, SampledGaussian):
        raise InvalidInputError("a step without noise has no finite epsilon and is not charged")
    return trial.update.noise_multiplier


def _as_step(step: Step) -> Step:
    """A sampled Gaussian is a trial without a test."""
    if not isinstance(step, Trial | SampledGaussian | Gaussian):
        raise InvalidInputError(
            f"a step is a SampledGaussian, a Gaussian or a Trial of them, got {step!r}"
        )
    if isinstance(step, Trial) and isinstance(step.update, NonPrivate):
        raise InvalidInputError("a step without noise has no finite epsilon and is not charged")
    return Trial(step) if isinstance(step, SampledGaussian) else step


def _as_trial(step: Step) -> Trial:
    found = _as_step(step)
    if isinstance(found, Trial):
        return found
    assert isinstance(found, Gaussian)
    return Trial(SampledGaussian(1.0, found.noise_multiplier))
