"""The plan of methods whose steps depend on what they have released so far: a privacy filter.

A composition theorem with parameters fixed in advance does not cover a sampling rate that is read
off a noisy norm, or a noise level raised because progress stalled. A filter does: it fixes one
order and one allowance of Rényi divergence before the run, and stops before the running sum would
pass it (Feldman and Zrnic 2021, arXiv:2008.11193; Lécuyer 2021, arXiv:2103.01379).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dpsur.errors import BudgetError, InvalidInputError
from dpsur.privacy.accountants.noise_tail import noise_tail, tail_refusal
from dpsur.privacy.accountants.proven import event_divergence
from dpsur.privacy.accountants.rdp import RenyiFilter, epsilon_at
from dpsur.privacy.accounting import (
    CAP_SHARE,
    RESTORE,
    accounting_named,
    check_covers_steering,
    only_figure,
)
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import (
    Event,
    NoisyChoice,
    SampledGaussian,
    Step,
    Test,
    Trial,
    event_from_json,
    event_to_json,
)
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.plans.protocol import planned_trials, stated_counts, stated_steps
from dpsur.privacy.plans.rejections import steps_differ, trial_cap
from dpsur.privacy.search import least_noise

# Trials after which a run of an adaptive method ends even if its filter would afford more.
MOST_TRIALS = 1_000_000
# The share of delta that is set aside for the missing tail of the noise, since noise that is chosen
# on the way is not known before.
TAIL_SHARE = 1e-3
# An open-ended run measures its progress in thousandths of its allowance.
ALLOWANCE_PARTS = 1000


def step_divergence(step: Event | Step, order: float, *, selected: bool) -> float:
    """What one step is charged.

    `selected` charges a trial behind a gate as an update that was accepted, which covers the update
    alone. Otherwise the verdict is an output too: then it is two mechanisms, one after the other.
    """
    if selected or not isinstance(step, Trial) or step.gate is None:
        return event_divergence(step, order)
    return event_divergence(step.update, order) + event_divergence(step.gate, order)


@dataclass(frozen=True)
class FilteredPlan:
    """An allowance of Rényi divergence at one order, both fixed before the run.

    Steps may differ and may depend on everything released before. Each is asked for before it is
    taken; the run ends when one does not fit, or after `updates` updates. A step does not fit
    either whose noise is so small that its missing tail takes more of delta than is set aside.
    Behind a gate whose rejections are not charged, `trials` is a cap as in a fixed plan.
    """

    budget: Budget
    accounting: str
    order: float
    allowance: float
    typical: Trial
    updates: int | None
    trials: int = MOST_TRIALS
    setup: tuple[Event, ...] = ()
    on_reject: str = RESTORE
    stop_after: int | None = None
    same_steps: ClassVar[bool] = False
    to_the_cap: ClassVar[bool] = False  # its trials differ in cost, so their number hides nothing

    def __post_init__(self) -> None:
        accounting_named(self.accounting).check(self.typical, self.on_reject)
        check_covers_steering(self.accounting)
        if self._pays_for_updates and self.updates is None:
            raise InvalidInputError("behind a gate the number of updates must be fixed in advance")
        if not self.left_after_setup() >= 0:
            raise BudgetError(
                f"what happens before the first step spends more than epsilon "
                f"{self.budget.epsilon:g}; raise epsilon, or the noise of the setup"
            )

    @staticmethod
    def for_budget(
        budget: Budget,
        accounting: str,
        typical: Trial,
        *,
        updates: int | None,
        trials: int = MOST_TRIALS,
        setup: tuple[Event, ...] = (),
        on_reject: str = RESTORE,
    ) -> "FilteredPlan":
        """The plan whose order affords most steps of a typical kind."""
        by_updates = accounting_named(accounting).charges == "updates" and typical.gate is not None
        kept = Budget(budget.epsilon, _kept(budget.delta, capped=by_updates))

        best = RenyiFilter.best_for(
            kept,
            lambda order: step_divergence(typical, order, selected=by_updates),
            lambda order: sum(event_divergence(event, order) for event in setup),
        )
        cost = step_divergence(typical, best.order, selected=by_updates)
        count = updates or (min(trials, int(best.allowance / cost)) if cost > 0 else trials)
        tail = noise_tail(
            [*((event, 1) for event in setup), (typical, count)], verdicts_charged=not by_updates
        )
        noise = getattr(typical.update, "noise_multiplier", 0.0)
        refusal = tail_refusal(tail / TAIL_SHARE, noise, count, budget.delta)
        if refusal is not None:
            raise BudgetError(refusal)
        cap = trials
        if by_updates and typical.gate is not None and updates is not None:
            cap = trial_cap(typical.gate, updates, budget)
        return FilteredPlan(
            budget,
            accounting,
            best.order,
            best.allowance,
            typical,
            updates,
            cap,
            setup,
            on_reject,
        )

    @property
    def _pays_for_updates(self) -> bool:
        charged = accounting_named(self.accounting).charges
        return charged == "updates" and self.typical.gate is not None

    def divergence(self, ledger: Ledger) -> float:
        """What is spent of the allowance."""
        setup = sum(event_divergence(event, self.order) for event in ledger.setup)
        return setup + sum(
            (entry.updates if self._pays_for_updates else entry.trials) * self.cost(entry.step)
            for entry in ledger.entries
        )

    def tail(self, ledger: Ledger) -> float:
        """What the missing tail of the noise has taken of delta."""
        counts = [
            (entry.step, entry.updates if self._pays_for_updates else entry.trials)
            for entry in ledger.entries
        ]
        charges = [*((event, 1) for event in ledger.setup), *counts]
        return noise_tail(charges, verdicts_charged=not self._pays_for_updates)

    @property
    def kept_budget(self) -> Budget:
        """The budget without what is set aside: what the allowance is made for."""
        kept = _kept(self.budget.delta, capped=self._pays_for_updates)
        return Budget(self.budget.epsilon, kept)

    @property
    def tail_allowance(self) -> float:
        """What it may take."""
        return TAIL_SHARE * self.budget.delta

    def affords(self, ledger: Ledger, step: Step) -> bool:
        """Whether one more step fits. Asked before the step, never after."""
        if self.updates is not None and ledger.updates >= self.updates:
            return False
        if self.stop_after is not None and ledger.updates >= self.stop_after:
            return False
        if ledger.trials >= self.trials:
            return False
        if self.tail(ledger.record(step, updates=1)) > self.tail_allowance:
            return False
        spent = RenyiFilter(self.order, self.allowance, self.divergence(ledger))
        return spent.affords(self.cost(step))

    def cost(self, step: Event | Step) -> float:
        """What a step takes of the allowance."""
        return step_divergence(step, self.order, selected=self._pays_for_updates)

    def completed(self, ledger: Ledger) -> bool:
        """Whether the result may be released: not if a cap came before the planned updates."""
        if not self._pays_for_updates:
            return True
        return ledger.trials < self.trials or ledger.updates == self.updates

    def alike(self, ledger: Ledger) -> int:  # noqa: ARG002
        """One: what the next step costs may depend on what this one released."""
        return 1

    def drops(self, ledger: Ledger) -> bool:  # noqa: ARG002
        """Never: a trial whose outcome is dropped is not made."""
        return False

    @property
    def length(self) -> int:
        """What a schedule counts to: updates, or parts of the allowance where they are open."""
        return ALLOWANCE_PARTS if self.updates is None else self.updates

    @property
    def kept(self) -> int | None:
        """Updates of a completed run, where they are fixed in advance."""
        counts = [n for n in (self.updates, self.stop_after) if n is not None]
        return min(counts, default=None)

    def position(self, ledger: Ledger) -> int:
        """How far a run has come on that scale."""
        if self.updates is not None:
            return ledger.updates
        return int(ALLOWANCE_PARTS * self.divergence(ledger) / self.allowance)

    @property
    def position_follows_counts(self) -> bool:
        """Whether `position` is the number of updates: not where it is a part of the allowance."""
        return self.updates is not None

    @property
    def fixed_counts(self) -> Mapping[str, int]:
        """None: the filter leaves counts open."""
        return {}

    @property
    def verdicts_are_public(self) -> bool:
        """Whether the filter pays for publishing which trials were rejected."""
        return not self._pays_for_updates

    def covers(self, delta: float) -> bool:
        """Whether there is an epsilon at this delta: a filter has one promise only."""
        return delta == self.budget.delta

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon of the run, however it goes: a filter's guarantee is its whole allowance."""
        delta = self.budget.delta if delta is None else delta
        if not self.covers(delta):
            raise InvalidInputError(
                f"the privacy filter of this run was made for delta {self.budget.delta:g}; "
                "plan the run with another delta"
            )
        kept = _kept(delta, capped=self._pays_for_updates)
        return epsilon_at(self.order, self.allowance, kept)

    def spent(self, ledger: Ledger, delta: float | None = None) -> float:
        """Epsilon so far, as a progress figure."""
        if not ledger.entries and not ledger.setup:
            return 0.0
        delta = self.budget.delta if delta is None else delta
        return epsilon_at(self.order, self.divergence(ledger), delta)

    def left_after_setup(self) -> float:
        """The allowance without what happens before the first step."""
        return self.allowance - sum(event_divergence(event, self.order) for event in self.setup)

    def noise_for(
        self, sample_rate: float, price: float, test: Test | NoisyChoice | None = None
    ) -> float:
        """The least noise at which an update of this rate costs at most `price` of the allowance.

        The rate may come from released values only. So the noise does too.
        """

        def cost(noise: float) -> float:
            return self.cost(Trial(SampledGaussian(sample_rate, noise), test))

        noise = least_noise(cost, price)
        if noise is None:
            raise BudgetError(
                f"an update at rate {sample_rate:g} costs more than its share of the budget, "
                "whatever the noise; raise epsilon, make fewer updates or weaken the test"
            )
        return noise

    @property
    def unit(self) -> str:
        """What `length` and `position` count."""
        return "thousandths of the allowance" if self.updates is None else "updates"

    def describe(self) -> str:
        """One line for whoever starts the run."""
        length = "as many trials as fit" if self.updates is None else f"{self.updates} updates"
        return f"{length} under a privacy filter of order {self.order:.3g}, {self.accounting}"

    def limited(self, most: int) -> "FilteredPlan":
        """The same plan, ended after fewer updates. What it promises stays the same."""
        return replace(self, stop_after=most)

    def hide_rejections(self, way: str) -> "FilteredPlan":
        """Refused: trials differ in cost."""
        raise steps_differ(way)

    def figures(self) -> dict[str, float | None]:
        """Epsilon under its own accounting; there is no guarantee under another."""
        return only_figure(self.accounting, self.epsilon())

    def to_statement(self, ledger: Ledger) -> dict[str, Any]:
        """The mechanism in a privacy statement, with the steps that the filter let pass."""
        steps = stated_steps(self, ledger)
        return {
            "trial": event_to_json(self.typical),
            "filter": {"order": self.order, "allowance": self.allowance, "steps": steps},
            **stated_counts(self),
        }

    @staticmethod
    def from_statement(statement: Mapping[str, Any]) -> "FilteredPlan":
        """The plan that a privacy statement describes."""
        mechanism = statement["mechanism"]
        return FilteredPlan.from_json(
            {
                **mechanism["filter"],
                **statement["budget"],
                "accounting": statement["guarantee"]["accounting"],
                "typical": mechanism["trial"],
                "updates": mechanism["updates"],
                "trials": planned_trials(mechanism),
                "setup": mechanism["setup"],
                "on_reject": mechanism["on_reject"],
                "stop_after": None,
            }
        )

    def step_faults(self, mechanism: Mapping[str, Any], tolerance: float) -> list[str]:
        """The steps of a run must fit the allowance that was fixed before it."""
        charges = [(event, 1) for event in mechanism["setup"]]
        charges += [(row["step"], row["charged"]) for row in mechanism["filter"]["steps"]]
        steps = [(event_from_json(event), count) for event, count in charges]
        spent = sum(count * self.cost(event) for event, count in steps)
        faults = []
        if not spent <= self.allowance * (1 + tolerance):
            faults.append(
                f"the steps spend {spent:g} at order {self.order:g}, of {self.allowance:g} allowed"
            )
        tail = noise_tail(steps, verdicts_charged=self.verdicts_are_public)
        if not tail <= self.tail_allowance * (1 + tolerance):
            faults.append(
                f"the missing tail of the noise takes {tail:.3g} of delta, "
                f"{self.tail_allowance:.3g} are set aside for it"
            )
        return faults

    def to_json(self) -> dict[str, Any]:
        """Write the plan as plain values."""
        return {
            "epsilon": self.budget.epsilon,
            "delta": self.budget.delta,
            "accounting": self.accounting,
            "order": self.order,
            "allowance": self.allowance,
            "typical": event_to_json(self.typical),
            "updates": self.updates,
            "trials": self.trials,
            "setup": [event_to_json(event) for event in self.setup],
            "on_reject": self.on_reject,
            "stop_after": self.stop_after,
        }

    @staticmethod
    def from_json(values: dict[str, Any]) -> "FilteredPlan":
        """Read what `to_json` wrote."""
        typical = event_from_json(values["typical"])
        if not isinstance(typical, Trial):
            raise InvalidInputError(f"a plan is made for a Trial, got {values['typical']!r}")
        return FilteredPlan(
            budget=Budget(values["epsilon"], values["delta"]),
            accounting=values["accounting"],
            order=values["order"],
            allowance=values["allowance"],
            typical=typical,
            updates=values["updates"],
            trials=values["trials"],
            setup=tuple(event_from_json(event) for event in values["setup"]),
            on_reject=values["on_reject"],
            stop_after=values["stop_after"],
        )


def _kept(delta: float, *, capped: bool) -> float:
    """What is left of delta without what is set aside for noise tails and a cap on trials."""
    return delta * (1 - TAIL_SHARE - (CAP_SHARE if capped else 0.0))
