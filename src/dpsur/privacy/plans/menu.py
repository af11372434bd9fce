"""A plan for updates whose rate and noise are chosen from a menu by what was released before.

A menu is a list of sampled Gaussians, fixed before the run. Every choice from it is charged as the
worst of them. The last functions say which rates to put on a menu and how to spread the noise among
them. They decide nothing of the guarantee, which is computed from the menu that comes out. Where
all choices cost about the same, whichever is chosen, little of the budget is left unspent.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

from dpsur import checks
from dpsur.errors import BudgetError, InvalidInputError
from dpsur.privacy.accountants.rdp import PAPER_ORDERS, epsilon_from_rdp, sampled_gaussian_rdp
from dpsur.privacy.accounting import (
    accounting_named,
    check_covers_steering,
)
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import (
    Event,
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

# Each rate is a tenth above the one before, up to so many times the first.
RATE_STEP = 1.1
MOST_TIMES_THE_FIRST = 8.0


@dataclass(frozen=True)
class MenuPlan(ChargedSequence):
    """Blocks of equal updates, each after a release that decides which choice of the menu it is.

    One release of `steering`, then `menu.repeats` updates of one choice, and so on until there are
    `updates`; the last block may be shorter. Only the choices are left open before the run.

    Formal guarantee: whatever the choices are, as long as they follow from what was released, the
    run satisfies `epsilon()` at the budget's delta under adding or removing one record.
    """

    budget: Budget
    accounting: str
    menu: Menu
    steering: SampledGaussian
    updates: int
    setup: tuple[Event, ...] = ()
    part: ClassVar[str] = "menu"

    def __post_init__(self) -> None:
        check_covers_steering(self.accounting)
        checks.at_least_one("the number of updates", self.updates)

    @staticmethod
    def for_budget(
        budget: Budget,
        accounting: str,
        menu: Menu,
        steering: SampledGaussian,
        *,
        updates: int,
        setup: tuple[Event, ...] = (),
    ) -> "MenuPlan | None":
        """The plan with all noise on the menu scaled as little as the budget needs; None if never.

        Scaled up or down: a menu is a proposal, of which the ratios are kept.
        """

        @cache
        def scaled(scale: float) -> MenuPlan:
            return MenuPlan(budget, accounting, menu.scaled(scale), steering, updates, setup)

        @cache
        def epsilon_of(scale: float) -> float:
            return scaled(scale).epsilon()

        @cache
        def ideal_epsilon_of(scale: float) -> float:
            plan = scaled(scale)
            return plan._accounting.ideal_epsilon(plan._charges(updates), budget.delta)

        others = [part for part in scaled(1.0)._charges(updates) if not isinstance(part[0], Menu)]
        if accounting_named(accounting).epsilon(others, budget.delta) >= budget.epsilon:
            return None
        # The tail of the noise seldom matters, and then the noise does not depend on its bound.
        ideal = least_noise(ideal_epsilon_of, budget.epsilon)
        scale = noise_at_least(epsilon_of, budget.epsilon, ideal)
        return None if scale is None else scaled(scale)

    def affords(self, ledger: Ledger, step: Step) -> bool:
        """Whether one more step fits. Asked before the step, never after."""
        if self.completed(ledger):
            return False
        due = self._due(ledger)
        if step not in due:
            planned = due[0] if len(due) == 1 else f"a choice of the menu of {len(due)}"
            raise BudgetError(f"{step} was not planned: after {ledger.updates} updates, {planned}")
        return True

    def _due(self, ledger: Ledger) -> tuple[Step, ...]:
        """What may come next: a release, a choice of the menu, or the choice that was made."""
        last = ledger.entries[-1].step if ledger.entries else None
        if last == self.steering:
            return tuple(Trial(choice) for choice in self.menu.choices)
        if last is None or ledger.updates % self.menu.repeats == 0:
            return (self.steering,)
        return (last,)

    def completed(self, ledger: Ledger) -> bool:
        """Whether the run did what was planned, so that its result may be released."""
        return ledger.updates >= self.updates

    def nearest(self, rate: float) -> SampledGaussian:
        """The choice whose rate is nearest, by ratio. The rate may come from released values only.

        So the choice does too.
        """
        return self.menu.nearest(rate)

    @property
    def typical(self) -> Trial:
        """The first choice of the menu."""
        return Trial(self.menu.choices[0])

    @property
    def fixed_counts(self) -> Mapping[str, int]:
        """Counts that the plan fixes, by the name of the setting that they belong to."""
        return {"updates": self.updates, "trials": self.updates}

    def spent(self, ledger: Ledger, delta: float | None = None) -> float:
        """Epsilon so far, as a progress figure: a block that has begun counts as a whole."""
        releases = sum(entry.trials for entry in ledger.entries if entry.step == self.steering)
        reached = min(self.updates, releases * self.menu.repeats)
        return self.epsilon_of(self._charges(reached), delta)

    def charges(self) -> list[tuple[Event, int]]:
        """All updates, with the releases before their blocks."""
        return self._charges(self.updates)

    def _charges(self, updates: int) -> list[tuple[Event, int]]:
        """What so many updates are charged, with the releases before their blocks."""
        blocks, rest = divmod(updates, self.menu.repeats)
        shorter = [(replace(self.menu, repeats=rest), 1)] if rest else []
        return [
            *((event, 1) for event in self.setup),
            (self.steering, blocks + len(shorter)),
            (self.menu, blocks),
            *shorter,
        ]

    def describe(self) -> str:
        """One line for whoever starts the run."""
        first, last = self.menu.choices[0], self.menu.choices[-1]
        noises = f"{first.noise_multiplier:.3f} to {last.noise_multiplier:.3f}"
        return f"{self.updates} updates at noise multipliers from {noises}, {self.accounting}"

    def limited(self, most: int) -> "MenuPlan":
        """The same plan, ended after fewer updates."""
        return replace(self, updates=min(most, self.updates))

    def to_statement(self, ledger: Ledger) -> dict[str, Any]:
        """The mechanism in a privacy statement, with the choices that were made."""
        return {
            "trial": event_to_json(self.typical),
            "filter": None,
            "menu": {
                "offer": event_to_json(self.menu),
                "steering": event_to_json(self.steering),
                "steps": stated_steps(self, ledger),
            },
            **stated_counts(self),
        }

    @staticmethod
    def from_statement(statement: Mapping[str, Any]) -> "MenuPlan":
        """The plan that a privacy statement describes."""
        mechanism = statement["mechanism"]
        return MenuPlan.from_json(
            {
                **statement["budget"],
                "accounting": statement["guarantee"]["accounting"],
                "menu": mechanism["menu"]["offer"],
                "steering": mechanism["menu"]["steering"],
                "updates": mechanism["updates"],
                "setup": mechanism["setup"],
            }
        )

    def to_json(self) -> dict[str, Any]:
        """Write the plan as plain values."""
        return {
            "epsilon": self.budget.epsilon,
            "delta": self.budget.delta,
            "accounting": self.accounting,
            "menu": event_to_json(self.menu),
            "steering": event_to_json(self.steering),
            "updates": self.updates,
            "setup": [event_to_json(event) for event in self.setup],
        }

    @staticmethod
    def from_json(values: dict[str, Any]) -> "MenuPlan":
        """Read what `to_json` wrote."""
        menu, steering = (event_from_json(values[name]) for name in ("menu", "steering"))
        if not isinstance(menu, Menu) or not isinstance(steering, SampledGaussian):
            raise InvalidInputError(
                f"a plan has a Menu and a SampledGaussian, got {menu!r} and {steering!r}"
            )
        return MenuPlan(
            budget=Budget(values["epsilon"], values["delta"]),
            accounting=values["accounting"],
            menu=menu,
            steering=steering,
            updates=values["updates"],
            setup=tuple(event_from_json(event) for event in values["setup"]),
        )


def best_order(typical: SampledGaussian, updates: int, delta: float) -> int:
    """The Rényi order at which so many updates of a kind look cheapest."""

    def epsilon(order: int) -> float:
        one = sampled_gaussian_rdp(typical.sample_rate, typical.noise_multiplier, order)
        return epsilon_from_rdp(updates * one, order, delta)

    return min(PAPER_ORDERS, key=epsilon)


def as_costly(typical: SampledGaussian, rate: float, order: int, share: float = 1.0) -> float:
    """The noise at which an event of some rate has a share of a typical one's Rényi divergence."""
    price = share * sampled_gaussian_rdp(typical.sample_rate, typical.noise_multiplier, order)
    noise = least_noise(lambda noise: sampled_gaussian_rdp(rate, noise, order), price)
    if noise is None:
        raise BudgetError(f"no noise makes an event of rate {rate:g} as cheap as {price:g}")
    return noise


def menu_around(typical: SampledGaussian, order: int, repeats: int) -> Menu:
    """Rates from the typical one upwards, each with the noise at which it costs about as much."""
    most = min(1.0, MOST_TIMES_THE_FIRST * typical.sample_rate)
    steps = math.ceil(math.log(most / typical.sample_rate) / math.log(RATE_STEP) - 1e-9)
    rates = [min(most, typical.sample_rate * RATE_STEP**k) for k in range(1, steps + 1)]
    others = (SampledGaussian(rate, as_costly(typical, rate, order)) for rate in rates)
    return Menu((typical, *others), repeats)
