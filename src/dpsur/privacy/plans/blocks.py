"""A plan for blocks of updates with a precise test after each, all of them charged."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

from dpsur import checks
from dpsur.errors import BudgetError, InvalidInputError
from dpsur.privacy.accounting import (
    accounting_named,
    check_covers_steering,
)
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import (
    Event,
    Gaussian,
    SampledGaussian,
    Step,
    Trial,
    event_from_json,
    event_to_json,
)
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.plans.charged import ChargedSequence
from dpsur.privacy.plans.protocol import stated_counts, stated_steps
from dpsur.privacy.search import least_noise, noise_at_least

BlockTest = Gaussian | SampledGaussian
# What tests may add to the noise of the updates by default, and the least noise that they get.
TESTS_COST = 0.015
LEAST_TEST_NOISE = 1.0


@dataclass(frozen=True)
class BlockPlan(ChargedSequence):
    """Updates of one kind in blocks, and a noisy test after each block.

    `blocks` are the numbers of updates before each test; 0 means that a test comes at once. What a
    test decides (keep a block or restore an earlier state, which learning rate comes next) is
    post-processing of its noisy value, and so may be anything.

    Formal guarantee: the number and order of updates and tests, their sampling rates and noise
    multipliers are fixed before the run, and every one of them is charged, whatever a test says. So
    the run, with all values of its tests, is an adaptive composition of these mechanisms and
    satisfies `epsilon()` at the budget's delta under adding or removing one record. Nothing is
    conditioned on acceptance: that is why the argument is not the one that fails for the paper.
    """

    budget: Budget
    accounting: str
    update: SampledGaussian
    test: BlockTest
    blocks: tuple[int, ...]
    setup: tuple[Event, ...] = ()
    part: ClassVar[str] = "blocks"

    def __post_init__(self) -> None:
        check_covers_steering(self.accounting)
        if not self.blocks or any(type(size) is not int or size < 0 for size in self.blocks):
            raise InvalidInputError(f"blocks must be whole numbers of updates, got {self.blocks!r}")
        checks.at_least_one("the number of updates", self.updates)

    @staticmethod
    def for_budget(
        budget: Budget,
        accounting: str,
        sample_rate: float,
        test: BlockTest,
        blocks: tuple[int, ...],
        *,
        setup: tuple[Event, ...] = (),
    ) -> "BlockPlan":
        """The plan whose updates have the least noise that the budget allows beside its tests."""

        @cache
        def with_noise(noise: float) -> BlockPlan:
            update = SampledGaussian(sample_rate, noise)
            return BlockPlan(budget, accounting, update, test, blocks, setup)

        @cache
        def epsilon_of(noise: float) -> float:
            return with_noise(noise).epsilon()

        @cache
        def ideal_epsilon_of(noise: float) -> float:
            plan = with_noise(noise)
            return plan._accounting.ideal_epsilon(plan.charges(), budget.delta)

        others = [*((event, 1) for event in setup), (test, len(blocks))]
        if accounting_named(accounting).epsilon(others, budget.delta) >= budget.epsilon:
            raise BudgetError(
                f"{len(blocks)} tests of blocks spend epsilon {budget.epsilon:g} by themselves; "
                "raise val_noise_multiplier or epsilon"
            )
        # The tail of the noise seldom matters, and then the noise does not depend on its bound.
        ideal = least_noise(ideal_epsilon_of, budget.epsilon)
        noise = noise_at_least(epsilon_of, budget.epsilon, ideal)
        if noise is None:
            raise BudgetError(
                f"epsilon {budget.epsilon:g} is too small for {sum(blocks)} updates, whatever the "
                "noise; raise epsilon or make fewer updates"
            )
        return with_noise(noise)

    def affords(self, ledger: Ledger, step: Step) -> bool:
        """Whether one more step fits. Asked before the step, never after."""
        if self.completed(ledger):
            return False
        due = self.due(ledger)
        if step != due:
            raise BudgetError(f"{step} was not planned: after {ledger.steps} steps comes {due}")
        return True

    def due(self, ledger: Ledger) -> Step:
        """What comes next: an update, or a test where a block is done."""
        tests = self._tests(ledger)
        reached = sum(self.blocks[: tests + 1])
        return self.test if ledger.updates >= reached else Trial(self.update)

    def alike(self, ledger: Ledger) -> int:
        """The updates that are left of a block, which differ in nothing that is charged."""
        return sum(self.blocks[: self._tests(ledger) + 1]) - ledger.updates

    def _tests(self, ledger: Ledger) -> int:
        return sum(entry.trials for entry in ledger.entries if entry.step == self.test)

    def completed(self, ledger: Ledger) -> bool:
        """Whether the run did what was planned, so that its result may be released."""
        return self._tests(ledger) >= len(self.blocks)

    @property
    def updates(self) -> int:
        """All updates, whether what they led to is kept or not."""
        return sum(self.blocks)

    @property
    def typical(self) -> Trial:
        """One update."""
        return Trial(self.update)

    @property
    def fixed_counts(self) -> Mapping[str, int]:
        """The updates of the last block, which the setting counts: a search comes on top."""
        return {"updates": self.blocks[-1]}

    def spent(self, ledger: Ledger, delta: float | None = None) -> float:
        """Epsilon so far, as a progress figure."""
        charges: list[tuple[Event, int]] = [
            *((event, 1) for event in self.setup),
            (Trial(self.update), ledger.updates),
            (self.test, self._tests(ledger)),
        ]
        return self.epsilon_of(charges, delta)

    def charges(self) -> list[tuple[Event, int]]:
        """All updates and all tests, kept or not."""
        return [
            *((event, 1) for event in self.setup),
            (Trial(self.update), self.updates),
            (self.test, len(self.blocks)),
        ]

    def describe(self) -> str:
        """One line for whoever starts the run."""
        noise = self.update.noise_multiplier
        return (
            f"{self.updates} updates at noise multiplier {noise:.3f} and {len(self.blocks)} tests "
            f"of blocks at {self.test.noise_multiplier:.3g}, {self.accounting}"
        )

    def limited(self, most: int) -> "BlockPlan":
        """The same plan with a shorter last block; the search and all tests stay."""
        searched = sum(self.blocks[:-1])
        if most <= searched:
            raise InvalidInputError(
                f"max_updates {most} ends the run before its last block: the blocks that search "
                f"for a learning rate make {searched} updates; raise it, or lower blocks or "
                "block_updates"
            )
        return replace(self, blocks=(*self.blocks[:-1], min(self.blocks[-1], most - searched)))

    def to_statement(self, ledger: Ledger) -> dict[str, Any]:
        """The mechanism in a privacy statement: blocks, tests, and the steps in order."""
        return {
            "trial": event_to_json(self.typical),
            "filter": None,
            "blocks": {
                "updates": list(self.blocks),
                "test": event_to_json(self.test),
                "steps": stated_steps(self, ledger),
            },
            **stated_counts(self),
        }

    @staticmethod
    def from_statement(statement: Mapping[str, Any]) -> "BlockPlan":
        """The plan that a privacy statement describes."""
        mechanism = statement["mechanism"]
        return BlockPlan.from_json(
            {
                **statement["budget"],
                "accounting": statement["guarantee"]["accounting"],
                "update": mechanism["trial"]["update"],
                "test": mechanism["blocks"]["test"],
                "blocks": mechanism["blocks"]["updates"],
                "setup": mechanism["setup"],
            }
        )

    def to_json(self) -> dict[str, Any]:
        """Write the plan as plain values."""
        return {
            "epsilon": self.budget.epsilon,
            "delta": self.budget.delta,
            "accounting": self.accounting,
            "update": event_to_json(self.update),
            "test": event_to_json(self.test),
            "blocks": list(self.blocks),
            "setup": [event_to_json(event) for event in self.setup],
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "BlockPlan":
        """Read what `to_json` wrote."""
        update, test = (event_from_json(values[name]) for name in ("update", "test"))
        if not isinstance(update, SampledGaussian):
            raise InvalidInputError(f"blocks are made of sampled Gaussians, got {update!r}")
        if not isinstance(test, Gaussian | SampledGaussian):
            raise InvalidInputError(f"a test of a block is a Gaussian, got {test!r}")
        return BlockPlan(
            budget=Budget(values["epsilon"], values["delta"]),
            accounting=values["accounting"],
            update=update,
            test=test,
            blocks=tuple(values["blocks"]),
            setup=tuple(event_from_json(event) for event in values["setup"]),
        )


def plan_blocks(
    budget: Budget,
    accounting: str,
    blocks: tuple[int, ...],
    *,
    sample_rate: float,
    test_rate: float | None = None,
    noise_multiplier: float | None = None,
    test_noise: float | None = None,
    setup: tuple[Event, ...] = (),
) -> BlockPlan:
    """The plan with the noise that was given, or with what the budget needs where it was not.

    Without a `test_rate` tests look at all records. If both kinds of noise are left open, tests
    raise the noise of the updates by `TESTS_COST`; if only that of tests is, they take what the
    updates leave of the budget.
    """

    def plan_with(noise: float, of_tests: float) -> BlockPlan:
        update = SampledGaussian(sample_rate, noise)
        return BlockPlan(budget, accounting, update, _test(test_rate, of_tests), blocks, setup)

    if noise_multiplier is None and test_noise is not None:
        test = _test(test_rate, test_noise)
        return BlockPlan.for_budget(budget, accounting, sample_rate, test, blocks, setup=setup)
    noise = noise_multiplier
    if noise is None:
        plain = _noise_without_tests(budget, accounting, sample_rate, sum(blocks), setup)
        noise = (1 + TESTS_COST) * plain
    if test_noise is None:
        found = least_noise(lambda value: plan_with(noise, value).epsilon(), budget.epsilon)
        if found is None:
            raise BudgetError(
                f"updates at noise multiplier {noise:g} leave nothing of epsilon "
                f"{budget.epsilon:g} for tests of blocks; raise noise_multiplier or leave it out, "
                "or make fewer updates"
            )
        test_noise = max(found, LEAST_TEST_NOISE)
    plan = plan_with(noise, test_noise)
    spent = plan.epsilon()
    if not spent <= budget.epsilon:
        raise BudgetError(
            f"{plan.updates} updates at noise multiplier {noise:g} and {len(blocks)} tests of "
            f"blocks at {test_noise:g} spend epsilon {spent:.4g}, more than "
            f"{budget.epsilon:g}; leave one of the noise multipliers open, or make fewer updates"
        )
    return plan


def _test(sample_rate: float | None, noise_multiplier: float) -> BlockTest:
    """The test of a block: on all records, or on a Poisson sample of them."""
    if sample_rate is None:
        return Gaussian(noise_multiplier)
    return SampledGaussian(sample_rate, noise_multiplier)


def _noise_without_tests(
    budget: Budget, accounting: str, sample_rate: float, count: int, setup: tuple[Event, ...]
) -> float:
    """The least noise at which so many updates fit the budget by themselves."""

    def epsilon_of(noise: float) -> float:
        trial = Trial(SampledGaussian(sample_rate, noise))
        return accounting_named(accounting).planned(setup, trial, count, budget.delta)

    found = least_noise(epsilon_of, budget.epsilon)
    if found is None:
        raise BudgetError(
            f"epsilon {budget.epsilon:g} is too small for {count} updates, whatever the noise; "
            "raise epsilon or make fewer updates"
        )
    return found
