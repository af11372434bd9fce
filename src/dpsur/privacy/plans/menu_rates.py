"""Which rates to put on a menu, and how to spread the noise among them.

Nothing here decides what is promised: a guarantee is computed from the menu that comes out. Where
all choices cost about the same, whichever is chosen, little of the budget is left unspent.
"""

import math

from dpsur.errors import BudgetError
from dpsur.privacy.calibrate import least_noise
from dpsur.privacy.events import Menu, SampledGaussian
from dpsur.privacy.rdp import PAPER_ORDERS, epsilon_from_rdp, sampled_gaussian_rdp

# Each rate is a tenth above the one before, up to so many times the first.
RATE_STEP = 1.1
MOST_TIMES_THE_FIRST = 8.0


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
