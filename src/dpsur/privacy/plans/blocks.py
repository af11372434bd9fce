"""A plan for blocks of updates with a precise test after each, all of them charged."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

from dpsur import checks
from dpsur.errors import BudgetError, InvalidInputError
from dpsur.privacy.accountants.rdp import sampled_gaussian_rdp
from dpsur.privacy.accounting import accounting_named, check_covers_steering
from dpsur.privacy.budget import Budget
from dpsur.privacy.calibration_cache import remembered, remembered_noise
from dpsur.privacy.events import (
    Event,
    Gaussian,
    Menu,
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
MENU_FIELDS = ("offer", "steering")  # as a statement calls them
# What tests may add to the noise of the updates by default, and the least noise that they get.
TESTS_COST = 0.015
LEAST_TEST_NOISE = 1.0
# A sampled test may cost so many times what one on all records does, compared at a Rényi order; a
# sample of more than MOST_SAMPLED of the records is not worth drawing.
SAMPLE_COST, COST_ORDER, MOST_SAMPLED = 1.25, 8, 0.5


@dataclass(frozen=True)
class BlockPlan(ChargedSequence):
    """Updates of one kind in blocks, and a noisy test after each block.

    `blocks` are the numbers of updates before each test; 0 means that a test comes at once. What a
    test decides (keep a block or restore an earlier state, which learning rate comes next) is
    post-processing of its noisy value, and so may be anything.

    With a `menu`, a block consists of releases of `steering`, each followed by at most
    `menu.repeats` updates of a choice from the menu, as in a `MenuPlan`; a block starts with a
    release. `update` is then the first choice.

    `searches` says that blocks before the last one search for a learning rate and come on top of
    the updates that were asked for. Otherwise every block continues the one before, and tests only
    measure. With `may_stop` a run may end after any of its tests, as released values decide.

    Formal guarantee: the number and order of updates and tests, their sampling rates and noise
    multipliers are fixed before the run, and every one of them is charged, whatever a test says. So
    the run, with all values of its tests, is an adaptive composition of these mechanisms and
    satisfies `epsilon()` at the budget's delta under adding or removing one record. Nothing is
    conditioned on acceptance: that is why the argument is not the one that fails for the paper. A
    run that stops early satisfies the same figure, that of the whole plan: it releases a part of
    what the whole would. No smaller figure is stated for it.
    """

    budget: Budget
    accounting: str
    update: SampledGaussian
    test: BlockTest
    blocks: tuple[int, ...]
    setup: tuple[Event, ...] = ()
    menu: Menu | None = None
    steering: SampledGaussian | None = None
    searches: bool = True
    may_stop: bool = False
    part: ClassVar[str] = "blocks"

    def __post_init__(self) -> None:
        check_covers_steering(self.accounting)
        if not self.blocks or any(type(size) is not int or size < 0 for size in self.blocks):
            raise InvalidInputError(f"blocks must be whole numbers of updates, got {self.blocks!r}")
        checks.at_least_one("the number of updates", self.updates)
        for name in ("searches", "may_stop"):
            if type(getattr(self, name)) is not bool:
                raise InvalidInputError(
                    f"{name} must be true or false, got {getattr(self, name)!r}"
                )
        if self.searches and self.may_stop:
            raise InvalidInputError("a run that searches for a learning rate does not stop early")
        if (self.menu is None) != (self.steering is None):
            raise InvalidInputError("a menu and the release that it is chosen by come together")
        if self.menu is not None and self.update != self.menu.choices[0]:
            raise InvalidInputError(f"the update {self.update} is not the first of the menu")
        if self.steering == self.test:
            raise InvalidInputError(
                f"tests of blocks and releases of norms are both {self.test}, so that a ledger "
                "cannot tell them apart; change val_noise_multiplier or norm_noise_multiplier"
            )

    @staticmethod
    def for_budget(
        budget: Budget,
        accounting: str,
        sample_rate: float,
        test: BlockTest,
        blocks: tuple[int, ...],
        *,
        setup: tuple[Event, ...] = (),
        menu: Menu | None = None,
        steering: SampledGaussian | None = None,
    ) -> "BlockPlan":
        """The plan whose updates have the least noise that the budget allows beside its tests.

        Of a menu the ratios are kept.
        """

        @cache
        def with_noise(noise: float) -> BlockPlan:
            update, scaled = _updates(sample_rate, noise, menu)
            return BlockPlan(budget, accounting, update, test, blocks, setup, scaled, steering)

        @cache
        def epsilon_of(noise: float) -> float:
            return with_noise(noise).epsilon()

        @cache
        def ideal_epsilon_of(noise: float) -> float:
            plan = with_noise(noise)
            return plan._accounting.ideal_epsilon(plan.charges(), budget.delta)

        others = [(e, n) for e, n in with_noise(1.0).charges() if not isinstance(e, Trial | Menu)]
        if accounting_named(accounting).epsilon(others, budget.delta) >= budget.epsilon:
            raise BudgetError(
                f"{len(blocks)} tests of blocks spend epsilon {budget.epsilon:g} by themselves; "
                "raise val_noise_multiplier or epsilon"
            )

        def search() -> float | None:
            # The tail of the noise seldom matters, and then the noise does not depend on its bound.
            ideal = least_noise(ideal_epsilon_of, budget.epsilon)
            return noise_at_least(epsilon_of, budget.epsilon, ideal)

        question = ("blocks", accounting, budget, with_noise(1.0))
        noise = remembered(question, search, lambda noise: epsilon_of(noise) <= budget.epsilon)
        if noise is None:
            raise BudgetError(
                f"epsilon {budget.epsilon:g} is too small for {sum(blocks)} updates, whatever the "
                "noise; raise epsilon or make fewer updates"
            )
        return with_noise(noise)

    def affords(self, ledger: Ledger, step: Step) -> bool:
        """Whether one more step fits. Asked before the step, never after."""
        if self._tests(ledger) >= len(self.blocks):
            return False
        due = self.due(ledger)
        if step not in due:
            planned = due[0] if len(due) == 1 else f"a choice of the menu of {len(due)}"
            raise BudgetError(f"{step} was not planned: after {ledger.steps} steps comes {planned}")
        return True

    def due(self, ledger: Ledger) -> tuple[Step, ...]:
        """What may come next: an update, a test where a block is done; with a menu, a release."""
        left = self.alike(ledger)
        if not left:
            return (self.test,)
        if self.menu is None:
            return (Trial(self.update),)
        assert self.steering is not None
        last = ledger.entries[-1].step if ledger.entries else None
        if last == self.steering:
            return tuple(Trial(choice) for choice in self.menu.choices)
        made = self.blocks[self._tests(ledger)] - left
        if not isinstance(last, Trial) or made % self.menu.repeats == 0:
            return (self.steering,)
        return (last,)

    def alike(self, ledger: Ledger) -> int:
        """The updates that are left of a block, which differ in nothing that is charged."""
        return sum(self.blocks[: self._tests(ledger) + 1]) - ledger.updates

    def _tests(self, ledger: Ledger) -> int:
        return sum(entry.trials for entry in ledger.entries if entry.step == self.test)

    def completed(self, ledger: Ledger) -> bool:
        """Whether the run did what was planned, so that its result may be released."""
        if self._tests(ledger) >= len(self.blocks):
            return True
        return self.may_stop and bool(ledger.entries) and ledger.entries[-1].step == self.test

    @property
    def updates(self) -> int:
        """All updates, whether what they led to is kept or not."""
        return sum(self.blocks)

    @property
    def kept(self) -> int | None:
        """Updates of a completed run; open where it may stop early."""
        return None if self.may_stop else self.updates

    @property
    def typical(self) -> Trial:
        """One update."""
        return Trial(self.update)

    @property
    def fixed_counts(self) -> Mapping[str, int]:
        """The updates of the last block, which the setting counts: a search comes on top."""
        return {"updates": self.blocks[-1] if self.searches else self.updates}

    def spent(self, ledger: Ledger, delta: float | None = None) -> float:
        """Epsilon so far, as a progress figure."""
        tests = self._tests(ledger)
        begun = ledger.updates - sum(self.blocks[:tests])
        if begun and self.menu is not None:  # what has begun counts as a whole
            whole = -(-begun // self.menu.repeats) * self.menu.repeats
            begun = min(self.blocks[tests], whole)
        return self.epsilon_of(self._charges((*self.blocks[:tests], begun), tests), delta)

    def charges(self) -> list[tuple[Event, int]]:
        """All updates and all tests, kept or not."""
        return self._charges(self.blocks, len(self.blocks))

    def _charges(self, blocks: tuple[int, ...], tests: int) -> list[tuple[Event, int]]:
        """What blocks of these sizes and so many tests are charged."""
        made: list[tuple[Event, int]] = [(Trial(self.update), sum(blocks))]
        if self.menu is not None:
            assert self.steering is not None
            repeats = self.menu.repeats
            shorter = Counter(size % repeats for size in blocks if size % repeats)
            made = [
                (self.steering, sum(-(-size // repeats) for size in blocks)),
                (self.menu, sum(size // repeats for size in blocks)),
                *((replace(self.menu, repeats=rest), n) for rest, n in sorted(shorter.items())),
            ]
        found = [*((event, 1) for event in self.setup), *made, (self.test, tests)]
        return [(event, count) for event, count in found if count]

    def describe(self) -> str:
        """One line for whoever starts the run."""
        noise = self.update.noise_multiplier
        return (
            f"{self.updates} updates at noise multiplier {noise:.3f} and {len(self.blocks)} tests "
            f"of blocks at {self.test.noise_multiplier:.3g}, {self.accounting}"
        )

    def limited(self, most: int) -> "BlockPlan":
        """The same plan with a shorter last block; the search and all tests stay.

        Where tests only measure, blocks that are not reached are left out, with their tests.
        """
        if not self.searches:
            left = [most - sum(self.blocks[:number]) for number in range(len(self.blocks))]
            reached = zip(self.blocks, left, strict=True)
            return replace(self, blocks=tuple(min(size, n) for size, n in reached if n > 0))
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
                "searches": self.searches,
                "may_stop": self.may_stop,
                "test": event_to_json(self.test),
                **self._stated_menu(),
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
                "searches": mechanism["blocks"]["searches"],
                "may_stop": mechanism["blocks"]["may_stop"],
                "setup": mechanism["setup"],
                **{n: mechanism["blocks"][n] for n in MENU_FIELDS if n in mechanism["blocks"]},
            }
        )

    def _stated_menu(self) -> dict[str, Any]:
        if self.menu is None or self.steering is None:
            return {}
        return {"offer": event_to_json(self.menu), "steering": event_to_json(self.steering)}

    def to_json(self) -> dict[str, Any]:
        """Write the plan as plain values."""
        return {
            "epsilon": self.budget.epsilon,
            "delta": self.budget.delta,
            "accounting": self.accounting,
            "update": event_to_json(self.update),
            "test": event_to_json(self.test),
            "blocks": list(self.blocks),
            "searches": self.searches,
            "may_stop": self.may_stop,
            "setup": [event_to_json(event) for event in self.setup],
            **self._stated_menu(),
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "BlockPlan":
        """Read what `to_json` wrote."""
        update, test = (event_from_json(values[name]) for name in ("update", "test"))
        if not isinstance(update, SampledGaussian):
            raise InvalidInputError(f"blocks are made of sampled Gaussians, got {update!r}")
        if not isinstance(test, Gaussian | SampledGaussian):
            raise InvalidInputError(f"a test of a block is a Gaussian, got {test!r}")
        menu, steering = (
            event_from_json(values[name]) if name in values else None for name in MENU_FIELDS
        )
        if not isinstance(menu, Menu | None) or not isinstance(steering, SampledGaussian | None):
            raise InvalidInputError(
                f"a menu of updates is steered by a SampledGaussian, got {menu!r}, {steering!r}"
            )
        return BlockPlan(
            budget=Budget(values["epsilon"], values["delta"]),
            accounting=values["accounting"],
            update=update,
            test=test,
            blocks=tuple(values["blocks"]),
            setup=tuple(event_from_json(event) for event in values["setup"]),
            menu=menu,
            steering=steering,
            searches=values["searches"],
            may_stop=values["may_stop"],
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
    menu: Menu | None = None,
    steering: SampledGaussian | None = None,
    searches: bool = True,
    tests_cost: float = TESTS_COST,
) -> BlockPlan:
    """The plan with the noise that was given, or with what the budget needs where it was not.

    Without a `test_rate` tests look at all records. If both kinds of noise are left open, tests
    raise the noise of the updates by `tests_cost`; if only that of tests is, they take what the
    updates leave of the budget. `menu` and `steering` are those of a `BlockPlan`; the noise is that
    of the first choice, and the others keep their ratio to it.
    """

    def plan_with(noise: float, of_tests: float) -> BlockPlan:
        update, scaled = _updates(sample_rate, noise, menu)
        test = _test(test_rate, of_tests)
        return BlockPlan(
            budget, accounting, update, test, blocks, setup, scaled, steering, searches
        )

    if noise_multiplier is None and test_noise is not None:
        test = _test(test_rate, test_noise)
        found = BlockPlan.for_budget(
            budget, accounting, sample_rate, test, blocks, setup=setup, menu=menu, steering=steering
        )
        return replace(found, searches=searches)
    noise = noise_multiplier
    if noise is None:
        noise = (1 + tests_cost) * _noise_without_tests(plan_with)
    if test_noise is None:

        def with_tests(value: float) -> float:
            return plan_with(noise, value).epsilon()

        question = ("tests of blocks", plan_with(noise, 1.0))
        least = remembered_noise(question, with_tests, budget.epsilon)
        if least is None:
            raise BudgetError(
                f"updates at noise multiplier {noise:g} leave nothing of epsilon "
                f"{budget.epsilon:g} for tests of blocks; raise noise_multiplier or leave it out, "
                "or make fewer updates"
            )
        test_noise = max(least, LEAST_TEST_NOISE)
    plan = plan_with(noise, test_noise)
    spent = plan.epsilon()
    if not spent <= budget.epsilon:
        raise BudgetError(
            f"{plan.updates} updates at noise multiplier {noise:g} and {len(blocks)} tests of "
            f"blocks at {test_noise:g} spend epsilon {spent:.4g}, more than "
            f"{budget.epsilon:g}; leave one of the noise multipliers open, or make fewer updates"
        )
    return plan


def cheapest_test(dataset_size: int, error: float) -> tuple[float, float]:
    """Sampling rate and noise multiplier of the smallest sample for a standard error of a mean.

    The mean is of values in [-1, 1]. For the same error a sample always costs more than all
    records do, since it has an error of its own, and less time. The rate is the lowest at which it
    costs at most `SAMPLE_COST` times as much, by Rényi divergence.
    """
    whole = error * dataset_size
    most = SAMPLE_COST * COST_ORDER / (2 * whole**2)

    def noise_at(rate: float) -> float:
        left = error**2 - (1 - rate) / (rate * dataset_size)
        return rate * dataset_size * math.sqrt(left) if left > 0 else 0.0

    def affordable(rate: float) -> bool:
        noise = noise_at(rate)
        return noise > 0 and sampled_gaussian_rdp(rate, noise, COST_ORDER) <= most

    low, high = 1 / (1 + dataset_size * error**2), 1.0  # below low no noise at all is allowed
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if affordable(middle) else (middle, high)
    return (1.0, whole) if high > MOST_SAMPLED else (high, noise_at(high))


def _test(sample_rate: float | None, noise_multiplier: float) -> BlockTest:
    """The test of a block: on all records, or on a Poisson sample of them."""
    if sample_rate is None:
        return Gaussian(noise_multiplier)
    return SampledGaussian(sample_rate, noise_multiplier)


def _updates(
    sample_rate: float, noise: float, menu: Menu | None
) -> tuple[SampledGaussian, Menu | None]:
    """The update of this noise, and the menu that it is the first choice of."""
    if menu is None:
        return SampledGaussian(sample_rate, noise), None
    scaled = menu.scaled(noise / menu.choices[0].noise_multiplier)
    return scaled.choices[0], scaled


def _noise_without_tests(plan_with: Callable[[float, float], BlockPlan]) -> float:
    """The least noise at which the updates fit the budget by themselves."""

    def epsilon_of(noise: float) -> float:
        plan = plan_with(noise, LEAST_TEST_NOISE)
        return plan.epsilon_of(plan._charges(plan.blocks, 0))

    plan = plan_with(1.0, LEAST_TEST_NOISE)
    found = remembered_noise(("blocks without tests", plan), epsilon_of, plan.budget.epsilon)
    if found is None:
        raise BudgetError(
            f"epsilon {plan.budget.epsilon:g} is too small for {plan.updates} updates, whatever "
            "the noise; raise epsilon or make fewer updates"
        )
    return found
