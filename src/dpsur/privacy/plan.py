"""Plans: everything that decides a run's privacy, fixed before it starts.

A plan is a sequence of phases. A phase repeats one kind of step: a trial, or a choice from a menu
that is made by what was released before. DP-SGD and DPSUR are one phase of equal trials, DPIS is
one phase of choices from a menu, and a search for a learning rate has one phase for each of its
blocks. Where steps are free to depend on what was released, the plan has a filter: an allowance
that they must fit.

Where rejections are not charged: the cap on trials, and ways to hide how many were rejected.

A run that pays for accepted updates alone gives up after so many trials that giving up costs a
negligible part of delta. The number of its rejections is private, and it shows in how long the run
takes. `constant` makes a number of trials that was fixed before the run: those after the last
update are real trials whose outcome is dropped. `delay` is the paper's suggestion, a random wait
after every accepted update: it blurs the duration and proves nothing.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal

from scipy.special import bdtr

from dpsur import checks
from dpsur.errors import BudgetError, InvalidInputError
from dpsur.privacy.accountants.noise_tail import noise_tail
from dpsur.privacy.accountants.proven import event_divergence
from dpsur.privacy.accountants.rdp import RenyiFilter, epsilon_at
from dpsur.privacy.accounting import (
    CAP_SHARE,
    KEEP_MOMENTUM,
    RESTORE,
    Accounting,
    accounting_named,
    check_covers_steering,
    figures,
    only_figure,
)
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import (
    Event,
    Gaussian,
    Ledger,
    Menu,
    SampledGaussian,
    Step,
    Test,
    Trial,
    event_from_json,
    event_to_json,
)

NOT_HIDDEN, DELAY, CONSTANT = "no", "delay", "constant"
WAYS_TO_HIDE = (NOT_HIDDEN, DELAY, CONSTANT)


def trial_cap(test: Test, updates: int, budget: Budget) -> int:
    """Trials after which a run gives up, so late that `late_enough` says yes."""
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
    """Whether giving up after this many trials costs no more than CAP_SHARE of delta.

    Stopping early fails with probability at most eta = P[Bin(m, a_min) < T] for any data, and
    turns (epsilon, delta) into (epsilon, delta + (1 + e^epsilon) eta).
    """
    allowed = CAP_SHARE * budget.delta / (1 + math.exp(min(budget.epsilon, 700.0)))
    return early_end(test, updates, trials) <= allowed


def early_end(test: Test, updates: int, trials: int) -> float:
    """The largest probability that this many trials are not enough, for any records."""
    return float(bdtr(updates - 1, trials, test.accept_min))


def least_cap(test: Test, updates: int, budget: Budget) -> int:
    """The smallest cap on trials that delta pays for: a run that continues to it makes no more."""
    counts = range(trial_cap(test, updates, budget))
    return bisect_left(counts, True, key=lambda trials: late_enough(test, updates, budget, trials))


BlockTest = Gaussian | SampledGaussian
Charges = list[tuple[Event, int]]
TRIALS: Final = "trials"
ACCEPTED: Final = "accepted"
# Trials after which a run of an adaptive method ends even if its filter would afford more.
MOST_TRIALS = 1_000_000
# The share of delta that is set aside for the missing tail of the noise behind a filter, since
# noise that is chosen on the way is not known before.
TAIL_SHARE = 1e-3
# An open-ended run measures its progress in thousandths of its allowance.
ALLOWANCE_PARTS = 1000


@dataclass(frozen=True)
class Phase:
    """Steps of one kind, and the test after them.

    `count` of them are made, or as many as the filter affords where it is None. `counts` says what
    is counted: all trials, or those that are accepted. `cap` ends the phase after this many trials;
    where accepted ones are counted, a run that reaches it releases nothing. Before every
    `step.repeats` choices from a menu comes a release of `steering`, which they are chosen by. A
    `test` comes after the last step; with a count of 0 it comes at once.
    """

    step: Trial | Menu
    count: int | None
    counts: Literal["trials", "accepted"] = ACCEPTED
    cap: int | None = None
    test: BlockTest | None = None
    steering: SampledGaussian | None = None

    def __post_init__(self) -> None:
        checks.one_of("counts", self.counts, (TRIALS, ACCEPTED))
        for name, least in (("count", 0 if self.test else 1), ("cap", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise InvalidInputError(
                    f"blocks must be whole numbers of updates: the {name} of a phase must be at "
                    f"least {least}, got {value!r}"
                )
        if self.count is None and self.cap is None:
            raise InvalidInputError("a phase needs a count, or a cap on its trials")
        if not isinstance(self.step, Trial | Menu):
            raise InvalidInputError(f"a phase repeats a Trial or a Menu, got {self.step!r}")
        if not isinstance(self.test, BlockTest | None):
            raise InvalidInputError(f"a test of a block is a Gaussian, got {self.test!r}")
        if isinstance(self.step, Menu) != isinstance(self.steering, SampledGaussian):
            raise InvalidInputError(
                "a menu and the SampledGaussian that it is chosen by come together, got "
                f"{self.step!r} and {self.steering!r}"
            )
        if self.test is not None and self.steering == self.test:
            raise InvalidInputError(
                f"tests of blocks and releases of norms are both {self.test}, so that a ledger "
                "cannot tell them apart; change val_noise_multiplier or norm_noise_multiplier"
            )

    @property
    def trials(self) -> int:
        return (self.count or 0) if self.cap is None else self.cap

    @property
    def choices(self) -> tuple[Trial, ...]:
        if isinstance(self.step, Menu):
            return tuple(Trial(choice) for choice in self.step.choices)
        return (self.step,)

    def charges(self, count: int) -> Charges:
        if not isinstance(self.step, Menu):
            return [(self.step, count)]
        assert self.steering is not None
        whole, rest = divmod(count, self.step.repeats)
        shorter = [(replace(self.step, repeats=rest), 1)] if rest else []
        return [(self.steering, whole + len(shorter)), (self.step, whole), *shorter]


@dataclass(frozen=True)
class Plan:
    """Phases in their order, the budget, and what an accounting needs to know of them.

    With `searches`, phases before the last one search for a learning rate and come on top of the
    updates that were asked for; otherwise each continues the one before, and tests only measure.
    With `may_stop` a run may end after any test, as released values decide. With `run_all_trials`
    trials continue after the last update up to the cap and are dropped, so that their number is
    the same for all records.

    Formal guarantee: if every step of a run was asked for with `affords` before it was taken and
    recorded in the ledger, and the result is released only where the run is `completed`, then the
    release satisfies (`epsilon()`, `budget.delta`)-DP under adding or removing one record, as far
    as the accounting is proved. Where accepted trials are counted, what a rejected one touched must
    be restored and the number of rejections stay private. All other steps are charged whatever a
    test says, so that what tests decide is post-processing, and a run that stops early satisfies
    the figure of the whole plan. Choices from a menu and steps behind a filter may depend on
    everything released before, and on nothing else.
    """

    budget: Budget
    accounting: str
    phases: tuple[Phase, ...]
    setup: tuple[Event, ...] = ()
    on_reject: str = RESTORE
    run_all_trials: bool = False
    filter: RenyiFilter | None = None
    searches: bool = False
    may_stop: bool = False

    def __post_init__(self) -> None:
        # However a plan is made, it cannot state a guarantee that its accounting does not cover.
        if not self.phases:
            raise InvalidInputError("a plan needs a phase")
        for name in ("run_all_trials", "searches", "may_stop"):
            checks.flag(name, getattr(self, name))
        for phase in self.phases:
            self._accounting.check(phase.choices[0], self.on_reject)
        if self.steered:
            check_covers_steering(self.accounting)
        if self.searches and self.may_stop:
            raise InvalidInputError("a run that searches for a learning rate does not stop early")
        if len(self.phases) > 1 and any(phase.test is None for phase in self.phases):
            raise InvalidInputError("between two phases there must be a test")
        if self.tests and (self.typical.test is not None or self.filter is not None):
            raise InvalidInputError("a phase with a test has updates that are always kept")
        if self.filter is None:
            if any(phase.count is None for phase in self.phases):
                raise InvalidInputError("without a filter the number of updates must be fixed")
            checks.at_least_one("the number of updates", self.length)
            return
        if len(self.phases) > 1 or isinstance(self.phases[0].step, Menu):
            raise InvalidInputError("behind a filter there is one phase of trials")
        if self.charges_accepted and self.updates is None:
            raise InvalidInputError("behind a gate the number of updates must be fixed in advance")
        if not self.left_after_setup() >= 0:
            raise BudgetError(
                f"what happens before the first step spends more than epsilon "
                f"{self.budget.epsilon:g}; raise epsilon, or the noise of the setup",
                code="budget-too-small",
            )

    @cached_property
    def _accounting(self) -> Accounting:
        return accounting_named(self.accounting)

    # What the plan consists of

    @property
    def typical(self) -> Trial:
        """The trial that is repeated, or a typical one where trials differ."""
        return self.phases[0].choices[0]

    @property
    def update(self) -> SampledGaussian:
        assert isinstance(self.typical.update, SampledGaussian)
        return self.typical.update

    @property
    def menu(self) -> Menu | None:
        """What updates are chosen from, where they are."""
        step = self.phases[0].step
        return step if isinstance(step, Menu) else None

    @property
    def test(self) -> BlockTest:
        assert self.phases[0].test is not None
        return self.phases[0].test

    @property
    def tests(self) -> int:
        return sum(phase.test is not None for phase in self.phases)

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(phase.count or 0 for phase in self.phases)

    @property
    def steered(self) -> bool:
        """Whether what comes next may depend on what was released; then runs list their steps."""
        return self.filter is not None or self.menu is not None or self.tests > 0

    @property
    def charges_accepted(self) -> bool:
        """Whether rejected trials are not charged; otherwise verdicts may be published."""
        return self._accounting.charges == "updates" and self.typical.gate is not None

    # Counts

    @property
    def updates(self) -> int | None:
        """How many updates are kept; None where trials are counted."""
        known = [p.count for p in self.phases if p.counts == ACCEPTED and p.count is not None]
        return sum(known) if len(known) == len(self.phases) else None

    @property
    def trials(self) -> int:
        """How many trials are made, or the cap on them where updates are counted."""
        return sum(phase.trials for phase in self.phases)

    @property
    def length(self) -> int:
        """What a schedule counts to: updates, trials, or parts of an allowance."""
        if self.filter is not None and self.updates is None:
            return ALLOWANCE_PARTS
        return self.trials if self.updates is None else self.updates

    @property
    def unit(self) -> str:
        if self.updates is not None:
            return "updates"
        return "trials" if self.filter is None else "thousandths of the allowance"

    @property
    def kept(self) -> int | None:
        """Updates of a completed run, where they are fixed in advance."""
        if self.filter is not None:
            counts = [n for n in (self.updates, self.filter.stop_after) if n is not None]
            return min(counts, default=None)
        if self.may_stop:
            return None
        return self.trials if self.typical.gate is None else self.updates

    @property
    def fixed_counts(self) -> Mapping[str, int]:
        if self.filter is not None:
            return {}
        if self.searches:  # which comes on top
            return {"updates": self.blocks[-1]}
        return {"updates": self.length, "trials": self.trials}

    # What comes next

    def _tests_made(self, ledger: Ledger) -> int:
        if not self.tests:
            return 0
        return sum(entry.trials for entry in ledger.entries if entry.step == self.test)

    def _phase(self, ledger: Ledger) -> tuple[Phase, int, int] | None:
        """The phase that a run is in, with the trials and updates made in it; None at the end."""
        number = self._tests_made(ledger)
        if number >= len(self.phases):
            return None
        trials = ledger.trials - sum(phase.trials for phase in self.phases[:number])
        return self.phases[number], trials, ledger.updates - sum(self.blocks[:number])

    def due(self, ledger: Ledger) -> tuple[Step, ...]:
        """What may come next, nothing at the end; behind a filter anything may that fits it."""
        place = self._phase(ledger)
        if place is None:
            return ()
        phase, trials, updates = place
        kept = phase.counts == ACCEPTED and phase.count is not None and updates >= phase.count
        if kept or trials >= phase.trials:
            return () if phase.test is None else (phase.test,)
        if not isinstance(phase.step, Menu):
            return phase.choices
        assert phase.steering is not None
        last = ledger.last
        if last == phase.steering:
            return phase.choices
        if not isinstance(last, Trial) or updates % phase.step.repeats == 0:
            return (phase.steering,)
        return (last,)

    def affords(self, ledger: Ledger, step: Step) -> bool:
        """Whether one more step fits. Asked before the step, never after."""
        if self.filter is not None:
            most = math.inf if self.kept is None else self.kept
            if ledger.updates >= most or ledger.trials >= self.trials:
                return False
            if self.tail(ledger.record(step, updates=1)) > TAIL_SHARE * self.budget.delta:
                return False
            return self.filter.affords(self.divergence(ledger), self.cost(step))
        due = self.due(ledger)
        if due and step not in due:
            planned = due[0] if len(due) == 1 else f"a choice of the menu of {len(due)}"
            raise BudgetError(f"{step} was not planned: after {ledger.steps} steps comes {planned}")
        return bool(due)

    def identical_trials_left(self, ledger: Ledger) -> int:
        """How many trials like the next one come before the ledger is read again, or a test."""
        place = self._phase(ledger)
        if place is None:
            return 0
        phase, trials, _ = place
        left = phase.trials - trials
        return min(left, 1) if self.filter is not None or self.menu is not None else left

    def dummy_trials_left(self, ledger: Ledger) -> bool:
        return self.run_all_trials and self.completed(ledger) and ledger.trials < self.trials

    def completed(self, ledger: Ledger) -> bool:
        """Whether the result of a run may be released."""
        if self.filter is not None:
            whole = ledger.trials < self.trials or ledger.updates == self.updates
            return whole or not self.charges_accepted
        if self.tests:
            if self._tests_made(ledger) >= len(self.phases):
                return True
            return self.may_stop and ledger.last == self.test
        if self.updates is None:
            return ledger.trials == self.trials
        return ledger.updates == self.updates

    def position(self, ledger: Ledger) -> int:
        if self.filter is not None and self.updates is None:
            return int(ALLOWANCE_PARTS * self.divergence(ledger) / self.filter.allowance)
        return ledger.trials if self.updates is None else ledger.updates

    @property
    def duration(self) -> int:
        """How long a run is for anyone who watches it: in trials where their number is a constant.

        Evaluations and progress reports follow this scale, so that they reveal no rejections then.
        """
        return self.trials if self.run_all_trials else self.length

    def elapsed(self, ledger: Ledger) -> int:
        return ledger.trials if self.run_all_trials else self.position(ledger)

    # What it costs

    def charges(self) -> Charges:
        """All events of a completed run, and how often each happens; tests of blocks come last."""
        counts = (phase.trials if phase.count is None else phase.count for phase in self.phases)
        return self._charges(tuple(counts), self.tests)

    def _charges(self, counts: tuple[int, ...], tests: int) -> Charges:
        made: Counter[Event] = Counter()
        for phase, count in zip(self.phases, counts, strict=False):
            for event, times in phase.charges(count):
                made[event] += times
        found = [*((event, 1) for event in self.setup), *made.items()]
        if tests:
            found.append((self.test, tests))
        return [(event, count) for event, count in found if count]

    def supports_delta(self, delta: float) -> bool:
        if self.filter:
            return delta == self.budget.delta
        return not (self.updates is not None and self.typical.gate) or delta >= self.budget.delta

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon of the completed run at the budget's delta, or at another one.

        A filter's guarantee is its whole allowance, however the run goes.
        """
        delta = self.budget.delta if delta is None else delta
        if not self.supports_delta(delta):
            kind = "privacy filter" if self.filter else "cap on trials"
            raise InvalidInputError(
                f"the {kind} of this run was made for delta {self.budget.delta:g}; plan the run "
                f"with delta {delta:g}"
            )
        if self.filter is not None:
            return epsilon_at(self.filter.order, self.filter.allowance, self.kept_budget.delta)
        return self._accounting.epsilon(self.charges(), delta)

    def spent(self, ledger: Ledger, delta: float | None = None) -> float:
        """Epsilon so far, for display only: the guarantee is `epsilon()`."""
        delta = self.budget.delta if delta is None else delta
        if self.filter is not None:
            if not ledger.entries and not ledger.setup:
                return 0.0
            return epsilon_at(self.filter.order, self.divergence(ledger), delta)
        tests = self._tests_made(ledger)
        begun = ledger.updates if self.charges_accepted else ledger.trials
        begun -= sum(self.blocks[:tests])
        if self.menu is not None:  # what has begun counts as a whole
            begun += ledger.last == self.phases[0].steering
            whole = -(-begun // self.menu.repeats) * self.menu.repeats
            begun = min(self.blocks[tests], whole) if begun else 0
        return self._accounting.epsilon(self._charges((*self.blocks[:tests], begun), tests), delta)

    def figures(self) -> dict[str, float | None]:
        """Epsilon of a completed run under each accounting; None where one does not apply.

        Where steps are chosen on the way there is a guarantee under its own accounting only.
        """
        if self.steered:
            return only_figure(self.accounting, self.epsilon())
        updates, trials, ended = self.updates, self.trials if self.updates is None else None, 0.0
        if self.typical.test is None:  # every trial is an update, so both counts are fixed
            updates = trials = self.length
        if self.typical.gate is not None and updates is not None:
            ended = early_end(self.typical.gate, updates, self.trials)
        return figures(
            self.setup,
            self.typical,
            self.budget.delta,
            updates=updates,
            trials=trials,
            on_reject=self.on_reject,
            early_end=ended,
            requested=self.accounting,
        )

    # The filter

    def _paid(self, ledger: Ledger) -> list[tuple[Step, int]]:
        counted = "updates" if self.charges_accepted else "trials"
        return [(entry.step, getattr(entry, counted)) for entry in ledger.entries]

    def cost(self, step: Event | Step) -> float:
        """What a step takes of the allowance.

        A trial behind a gate whose rejections are free is charged as an update that was accepted.
        Otherwise its verdict is an output too: then it is two mechanisms, one after the other.
        """
        assert self.filter is not None
        return step_divergence(step, self.filter.order, selected=self.charges_accepted)

    def divergence(self, ledger: Ledger) -> float:
        assert self.filter is not None
        setup = sum(event_divergence(event, self.filter.order) for event in ledger.setup)
        return setup + sum(count * self.cost(step) for step, count in self._paid(ledger))

    def tail(self, ledger: Ledger) -> float:
        charges = [*((event, 1) for event in ledger.setup), *self._paid(ledger)]
        return noise_tail(charges, verdicts_charged=not self.charges_accepted)

    @property
    def kept_budget(self) -> Budget:
        delta = kept_delta(self.budget.delta, capped=self.charges_accepted)
        return replace(self.budget, delta=delta)

    def left_after_setup(self) -> float:
        assert self.filter is not None
        return self.filter.allowance - self.divergence(Ledger(setup=self.setup))

    # Other plans

    def limited(self, most: int) -> "Plan":
        """The same plan, ended after fewer updates (or trials, where those are counted).

        A search and its tests stay. Where tests only measure, those that are not reached are left
        out. A filter promises the same, wherever the run ends.
        """
        if self.filter is not None:
            return replace(self, filter=replace(self.filter, stop_after=most))
        if most >= self.length:
            return self
        searched = sum(self.blocks[:-1]) if self.searches else 0
        if self.searches and most <= searched:
            raise InvalidInputError(
                f"max_updates {most} ends the run before its last block: the blocks that search "
                f"for a learning rate make {searched} updates; raise it, or lower blocks or "
                "block_updates"
            )
        shortened = []
        for number, phase in enumerate(self.phases):
            left = most - sum(self.blocks[:number])
            gate, cap = self.typical.gate, phase.cap
            if left > 0 or self.searches:
                count = min(phase.count or 0, left)
                if cap is not None:
                    cap = count if gate is None else trial_cap(gate, count, self.budget)
                shortened.append(replace(phase, count=count, cap=cap))
        return replace(self, phases=tuple(shortened))

    def hide_rejections(self, way: str) -> "Plan":
        """The plan of a run that hides its rejections; refuses where there are none to hide.

        Formal guarantee of `constant`: the release together with the number of trials satisfies the
        plan's (epsilon, delta). The number is the same for any records, also in a run that
        hits its cap, and hitting this cap is covered by the share of delta that is set aside for
        it. `delay` has no guarantee beyond that of the release alone.
        """
        checks.one_of("hide_rejections", way, WAYS_TO_HIDE)
        if way == NOT_HIDDEN:
            return self
        if self.steered:
            raise InvalidInputError(
                f"hide_rejections {way} needs trials that all take the same work, and a method "
                "that steers itself makes different ones; leave it out, or use the method dpsur"
            )
        (phase,), gate = self.phases, self.typical.gate
        if gate is None or self.updates is None:
            reason = "no candidate is rejected" if gate is None else "verdicts are public"
            raise InvalidInputError(
                f"hide_rejections {way} has nothing to hide in this run, where {reason}; leave it "
                "out"
            )
        if way == DELAY:
            return self
        constant = replace(phase, cap=least_cap(gate, self.updates, self.budget))
        return replace(self, phases=(constant,), run_all_trials=True)

    # Words and plain values

    def describe(self) -> str:
        """One line for anyone who starts the run."""
        if self.filter is not None:
            length = "as many trials as fit" if self.updates is None else f"{self.updates} updates"
            what = f"{length} under a privacy filter of order {self.filter.order:.3g}"
        elif self.menu is not None and not self.tests:
            first, last = (self.menu.choices[n].noise_multiplier for n in (0, -1))
            what = f"{self.updates} updates at noise multipliers from {first:.3f} to {last:.3f}"
        else:
            noise = getattr(self.typical.update, "noise_multiplier", 0.0)
            dropped = f" in {self.trials} trials, whatever is rejected," * self.run_all_trials
            what = f"{self.length} {self.unit}{dropped} at noise multiplier {noise:.3f}"
        if self.tests:
            what += f" and {self.tests} tests of blocks at {self.test.noise_multiplier:.3g}"
        return f"{what}, {self.accounting}"

    def to_json(self) -> dict[str, Any]:
        def plain(value: Any) -> Any:
            return event_to_json(value) if isinstance(value, Event) else value

        epsilon = self.budget.epsilon
        return {
            "epsilon": None if math.isinf(epsilon) else epsilon,  # which JSON can write
            "delta": self.budget.delta,
            "accounting": self.accounting,
            "phases": [{n: plain(value) for n, value in vars(p).items()} for p in self.phases],
            "filter": None if self.filter is None else asdict(self.filter),
            "setup": [event_to_json(event) for event in self.setup],
            "on_reject": self.on_reject,
            "to_the_cap": self.run_all_trials,
            "searches": self.searches,
            "may_stop": self.may_stop,
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Plan":
        epsilon, phases = values["epsilon"], []
        for phase in values["phases"]:
            events = {name: phase[name] for name in ("step", "test", "steering")}
            read = {n: None if e is None else event_from_json(e) for n, e in events.items()}
            phases.append(Phase(**{**phase, **read}))
        checks.one_of("on_reject", values["on_reject"], (RESTORE, KEEP_MOMENTUM))
        return Plan(
            budget=Budget(math.inf if epsilon is None else epsilon, values["delta"]),
            accounting=values["accounting"],
            phases=tuple(phases),
            setup=tuple(event_from_json(event) for event in values["setup"]),
            on_reject=values["on_reject"],
            run_all_trials=values["to_the_cap"],
            filter=None if values["filter"] is None else RenyiFilter(**values["filter"]),
            searches=values["searches"],
            may_stop=values["may_stop"],
        )


def kept_delta(delta: float, *, capped: bool) -> float:
    """What a filter has of delta, without what is set aside for noise tails and a cap on trials."""
    return delta * (1 - TAIL_SHARE - (CAP_SHARE if capped else 0.0))


def step_divergence(step: Event | Step, order: float, *, selected: bool) -> float:
    """What one step is charged at an order; `selected` as an update that was accepted."""
    if selected or not isinstance(step, Trial) or step.gate is None:
        return event_divergence(step, order)
    return event_divergence(step.update, order) + event_divergence(step.gate, order)
