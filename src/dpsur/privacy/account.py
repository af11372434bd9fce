"""An account is charged step by step: it says what comes next, and refuses what does not fit.

What is promised is decided before the first step, by a plan. The account holds the plan and the
steps that were charged, and can be written to a file between two steps.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from dpsur import checks
from dpsur.errors import BudgetError, InvalidInputError
from dpsur.privacy.accounting import RESTORE, SELECTIVE_ACCOUNTING, accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import (
    Event,
    Gaussian,
    Ledger,
    NonPrivate,
    SampledGaussian,
    Step,
    Trial,
)
from dpsur.privacy.plan import Plan
from dpsur.privacy.planning import Request, filtered_plan, make_plan, repeated_plan

FORMAT: Final = "dpsur-account/1"
ACCOUNTING: Final = "every-trial"
PROVEN: Final = "proven"
# Kinds of steps up to which `spent` composes privacy loss distributions, one for each kind.
MOST_KINDS = 32


class Account:
    """Charges the steps of a loop before they are made, and refuses those that do not fit.

    What limits it is chosen before the first step:

    - `Account.for_steps(step, steps, delta=...)`: a number of equal steps. `guarantee()` is their
      exact composition by privacy loss distributions.
    - `Account.for_updates(trial, updates, delta=...)`: a number of accepted updates. Rejected
      trials cost nothing.
    - `Account.for_budget(epsilon, delta, typical)`: the allowance of a Rényi filter. Steps may
      differ, and each may depend on everything released before it. `guarantee()` is at most
      epsilon.
    - `Account.from_plan(plan)`: the steps of any plan, in its order.
    - `Account.without_limit(delta)`: a record only. Nothing is promised in advance, so
      `guarantee()` is infinite.

    Formal guarantee: let every step be charged before it is made; let each be what its event says,
    given everything released before; and let the records be used in no other way. Then all that the
    steps release, and all that follows from it, satisfies (`guarantee()`, delta)-DP under adding or
    removing one record, whenever the loop stops. `spent()` is for display only. It is a guarantee
    of its own only where the number and the kind of the steps made so far were fixed without
    looking at anything that depends on the records. Stopping early because of what one sees does
    not lower the guarantee to `spent()`: it stays that of all steps, or of the whole allowance.

    Where rejected trials cost nothing, this holds under more conditions: the loop ends after
    exactly the planned number of accepted updates, everything that a rejected trial touched is
    restored, the number of rejected trials stays private, and a loop that reaches the cap on trials
    releases nothing.
    """

    def __init__(self, plan: Plan | None, delta: float, charged: Ledger | None = None) -> None:
        checks.probability("delta", delta)
        self._plan, self._delta = plan, delta
        self._charged = charged or Ledger(setup=() if plan is None else plan.setup)

    @staticmethod
    def for_steps(
        step: Step,
        steps: int,
        *,
        delta: float,
        epsilon: float | None = None,
        setup: tuple[Event, ...] = (),
    ) -> "Account":
        """A number of equal steps, fixed before the first; refused where they exceed epsilon."""
        checks.at_least_one("the number of steps", steps)
        trial = _as_trial(step)
        unlimited = math.inf if epsilon is None else epsilon
        plan = repeated_plan(Budget(unlimited, delta), ACCOUNTING, trial, steps, setup=setup)
        if plan.epsilon() > unlimited:
            raise BudgetError(
                f"{steps} steps of {trial} spend epsilon {plan.epsilon():.4g} at delta {delta:g}, "
                f"above {unlimited:g}: raise epsilon or the noise multiplier, or make fewer steps"
            )
        return Account(plan, delta)

    @staticmethod
    def for_updates(
        trial: Trial,
        updates: int,
        *,
        delta: float,
        epsilon: float | None = None,
        accounting: str = PROVEN,
    ) -> "Account":
        """This many accepted updates; refused where they exceed epsilon."""
        if epsilon is None:
            checks.at_least_one("the number of updates", updates)
            epsilon = accounting_named(accounting).planned((), trial, updates, delta)
        update = _as_trial(trial).update
        assert isinstance(update, SampledGaussian)
        request = Request(lambda _: trial, update.noise_multiplier, updates)
        return Account(make_plan(request, Budget(epsilon, delta), accounting), delta)

    @staticmethod
    def for_budget(
        epsilon: float, delta: float, typical: Step, *, setup: tuple[Event, ...] = ()
    ) -> "Account":
        """The allowance of a Rényi filter, at the order that affords most steps like `typical`."""
        trial = _as_trial(typical)
        plan = filtered_plan(Budget(epsilon, delta), ACCOUNTING, trial, updates=None, setup=setup)
        return Account(plan, delta)

    @staticmethod
    def from_plan(plan: Plan, charged: Ledger | None = None) -> "Account":
        """An account for the steps of a plan, some of which may have been made."""
        gated = (PROVEN, SELECTIVE_ACCOUNTING)
        if plan.accounting not in (gated if plan.charges_accepted else (ACCOUNTING,)):
            raise InvalidInputError(
                f"an account has the accounting {ACCOUNTING}, or {' or '.join(gated)} behind a "
                f"gate, got {plan.accounting}"
            )
        if plan.epsilon() > plan.budget.epsilon:
            raise InvalidInputError(
                f"the account's plan comes to epsilon {plan.epsilon():.4g}, above the "
                f"{plan.budget.epsilon:g} that it states"
            )
        account = Account(plan, plan.budget.delta)
        return account if charged is None else account.resumed(charged)

    @staticmethod
    def without_limit(delta: float) -> "Account":
        """A record of steps, without a promise made in advance."""
        return Account(None, delta)

    def resumed(self, charged: Ledger) -> "Account":
        """The same account after steps that were made before; refuses those that do not fit it."""
        account, plan = Account(self.plan, self.delta), self.plan
        if plan is not None and charged.setup != plan.setup:
            raise InvalidInputError("the account's setup events differ from the plan's")
        account._charged = Ledger(setup=charged.setup)
        for entry in charged.entries:
            if not entry.trials:
                raise InvalidInputError(f"the account lists {entry.step} with count {entry.trials}")
            if plan is not None and (plan.tests or plan.menu):
                for _ in range(entry.trials):  # their order counts
                    account.book(entry.step)
                continue
            # The last of equal steps fits if and only if all of them do.
            last = min(1, entry.updates)
            account._charged = account.charged.record(
                entry.step, updates=entry.updates - last, trials=entry.trials - 1
            )
            account._check(entry.step)
            account._charged = account.charged.record(entry.step, updates=last)
        return account

    def __repr__(self) -> str:
        return f"Account({self.describe()}{self._progress})"

    @property
    def _progress(self) -> str:  # which is private where rejected trials are free
        return "" if self.charges_accepted else f" after {self.steps} steps"

    # None of these can be set: what was charged stays charged.

    @property
    def plan(self) -> Plan | None:
        """What was fixed before the first step."""
        return self._plan

    @property
    def delta(self) -> float:
        """The delta of the guarantee."""
        return self._delta

    @property
    def charged(self) -> Ledger:
        """All steps charged so far."""
        return self._charged

    @property
    def steps(self) -> int:
        """Steps charged so far."""
        return self.charged.steps

    @property
    def charges_accepted(self) -> bool:
        """Whether rejected trials cost nothing, and `decide` says which ones were accepted."""
        return self.plan is not None and self.plan.charges_accepted

    def describe(self) -> str:
        """What the account allows, in one line."""
        if self.plan is None:
            return "no limit, nothing is promised in advance"
        return f"{self.plan.describe()}, epsilon {self.guarantee():.4g} at delta {self.delta:g}"

    # What comes next

    @property
    def due(self) -> tuple[Step, ...]:
        """What may come next, as of `Plan.due`."""
        return () if self.plan is None else self.plan.due(self.charged)

    @property
    def completed(self) -> bool:
        """Whether all that was planned was made, so that its result may be released."""
        return self.plan is not None and self.plan.completed(self.charged)

    @property
    def given_up(self) -> bool:
        """Whether the cap on trials was reached before that."""
        if self.plan is None or self.completed:
            return False
        return self.charged.trials >= self.plan.trials

    @property
    def position(self) -> int:
        """Where schedules stand: updates or trials so far."""
        return 0 if self.plan is None else self.plan.position(self.charged)

    @property
    def dummy_trials_left(self) -> bool:
        """Whether what comes next is a trial whose outcome is dropped, to hide rejections."""
        return self.plan is not None and self.plan.dummy_trials_left(self.charged)

    @property
    def tests(self) -> int:
        """Tests of blocks charged so far."""
        return self.steps - self.charged.trials

    @property
    def test_is_due(self) -> bool:
        """Whether a test of a block comes next."""
        return self.plan is not None and self.plan.tests > 0 and self.due == (self.plan.test,)

    @property
    def made(self) -> int:
        """Updates since the last test."""
        assert self.plan is not None
        return self.charged.updates - sum(self.plan.blocks[: self.tests])

    def update_steps(self) -> list[int]:
        """The numbers of the steps that are updates still to be made."""
        assert self.plan is not None
        is_update = [kind for size in self.plan.blocks for kind in (*[True] * size, False)]
        return [n for n, update in enumerate(is_update, start=1) if update and n > self.steps]

    def affords(self, step: Step) -> bool:
        """Whether one more step like this fits."""
        try:
            self._check(self._as_step(step))
        except BudgetError:
            return False
        return True

    # Charging

    def charge(self, step: Step) -> None:
        """Charge one step that is about to be made. Raises BudgetError where it does not fit.

        After an error nothing was charged, and the step must not be made. Where accepted updates
        are charged, this counts a trial, and `decide` charges it.
        """
        self.book(self._as_step(step))

    def book(self, step: Step) -> None:
        """The same for a step as a plan names it, in which an update is a `Trial`."""
        self._check(step)
        tested = isinstance(step, Trial) and step.test is not None
        self._charged = self.charged.record(step, updates=0 if tested else 1)

    def decide(self, *, accepted: bool) -> None:
        """Book the verdict on the trial that was charged last: whether its candidate is kept.

        A trial with a test counts as rejected until then, one without as accepted. Where accepted
        updates are charged, this is what charges one.
        """
        *before, last = self.charged.entries
        if not isinstance(last.step, Trial) or accepted == (last.step.test is None):
            return
        booked = replace(last, updates=last.updates + (1 if accepted else -1))
        self._charged = replace(self.charged, entries=(*before, booked))

    def _as_step(self, step: Step) -> Step:
        return step if step in self.due else _as_step(step)

    def _check(self, step: Step) -> None:
        if isinstance(step, Trial) and step.test is not None and not self.charges_accepted:
            accounting_named(ACCOUNTING).check(step, RESTORE)
        if self.plan is None or self.dummy_trials_left:
            return
        if not self.plan.affords(self.charged, step):
            raise BudgetError(
                f"{step} does not fit{self._progress} ({self.describe()}): stop here and release "
                "what you have, or plan a new run with more steps or a larger epsilon"
            )

    # What it costs

    def guarantee(self, delta: float | None = None) -> float:
        """Epsilon that holds whenever the loop stops; infinite without a limit."""
        if self.plan is None:
            return math.inf
        return self.plan.epsilon(self.delta if delta is None else delta)

    def spent(self, delta: float | None = None) -> float:
        """Epsilon of the steps charged so far, by privacy loss distributions; for display only.

        Do not stop a loop because of it. Behind a filter that let many kinds of steps pass it is
        the filter's own figure, which is larger and takes no time.
        """
        delta = self.delta if delta is None else delta
        checks.probability("delta", delta)
        counts: Counter[Event] = Counter(self.charged.setup)
        for entry in self.charged.entries:  # equal steps together, in any order
            counts[entry.step] += entry.trials
        if self.plan is None or (self.plan.filter is not None and len(counts) <= MOST_KINDS):
            return accounting_named(ACCOUNTING).epsilon(list(counts.items()), delta)
        return self.plan.spent(self.charged, delta)

    def get_epsilon(self, delta: float) -> float:
        """The same as `spent`, under the name that other libraries use.

        Not a guarantee for a loop that stops because of what it sees: that is `guarantee()`.
        """
        return self.spent(delta)

    # Files

    def to_json(self) -> dict[str, Any]:
        """Write the account as plain values.

        Store it together with the weights. A loop that resumes from it must forget whatever came of
        steps that are not in it. Private where it holds the number of rejected trials.
        """
        return {
            "format": FORMAT,
            "delta": self.delta,
            "plan": None if self.plan is None else self.plan.to_json(),
            "charged": self.charged.to_json(),
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Account":
        """Read what `to_json` wrote; refuses an account whose steps do not fit its own plan."""
        if values.get("format") != FORMAT:
            raise InvalidInputError(f"not a privacy account of the format {FORMAT}")
        charged = Ledger.from_json(values["charged"])
        if values["plan"] is None:
            return Account.without_limit(values["delta"]).resumed(charged)
        plan = Plan.from_json(values["plan"])
        if plan.budget.delta != values["delta"]:
            raise InvalidInputError("the account's plan has another delta")
        return Account.from_plan(plan, charged)


def replays(plan: Plan, charged: Ledger) -> bool:
    """Whether a history is that of a whole run under a plan."""
    try:
        return Account(plan, plan.budget.delta).resumed(charged).completed
    except (BudgetError, InvalidInputError):
        return False


def _as_step(step: Step) -> Step:
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
