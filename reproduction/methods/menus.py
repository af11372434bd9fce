"""Plans whose updates are chosen from a menu by what was released before.

A menu is fixed before the run: rates, each with noise of its own, spread such that all choices
cost about the same, so that little of the budget is left unspent, whichever is chosen. A search
decides nothing of the guarantee, which is computed from the plan that comes out.
"""

import math

from dpsur.errors import BudgetError
from dpsur.privacy.accountants.rdp import PAPER_ORDERS, epsilon_from_rdp, sampled_gaussian_rdp
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event, Menu, NoisyChoice, SampledGaussian, Test, Trial
from dpsur.privacy.plan import Phase, Plan
from dpsur.privacy.planning import fitted_noise
from dpsur.privacy.search import least_noise

# On a menu each rate is a tenth above the one before, up to so many times the first.
RATE_STEP = 1.1
MOST_TIMES_THE_FIRST = 8.0


def menu_plan(
    budget: Budget,
    accounting: str,
    menu: Menu,
    steering: SampledGaussian,
    updates: int,
    setup: tuple[Event, ...] = (),
) -> Plan:
    """Updates from a menu, each `menu.repeats` of them after a release that they are chosen by."""
    return Plan(budget, accounting, (Phase(menu, updates, steering=steering),), setup)


def fitted_menu_plan(
    budget: Budget,
    accounting: str,
    menu: Menu,
    steering: SampledGaussian,
    *,
    updates: int,
    setup: tuple[Event, ...] = (),
) -> Plan | None:
    """The same with all noise on the menu scaled as little as the budget needs; None if never.

    Scaled up or down: a menu is a proposal, of which the ratios are kept.
    """

    def scaled(scale: float) -> Plan:
        return menu_plan(budget, accounting, menu.scaled(scale), steering, updates, setup)

    scale = fitted_noise(
        lambda scale: scaled(scale).charges(), accounting_named(accounting), budget
    )
    return None if scale is None else scaled(scale)


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


def noise_for(
    plan: Plan, sample_rate: float, price: float, test: Test | NoisyChoice | None = None
) -> float:
    """The least noise at which an update of this rate costs at most `price` of the allowance.

    The rate may come from released values only. So the noise does too.
    """

    def cost(noise: float) -> float:
        return plan.cost(Trial(SampledGaussian(sample_rate, noise), test))

    noise = least_noise(cost, price)
    if noise is None:
        raise BudgetError(
            f"an update at rate {sample_rate:g} costs more than its share of the budget, "
            "whatever the noise; raise epsilon, make fewer updates or weaken the test",
            code="budget-too-small",
        )
    return noise
