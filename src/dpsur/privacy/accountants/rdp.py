"""Rényi divergences: the conversion to (epsilon, delta), a filter, and the paper's accountant.

`epsilon_at` is the conversion that every proven figure uses. `RenyiFilter` bounds the sum of the
divergences of steps that may depend on earlier ones. The rest is the paper's accountant,
with divergences at integer orders and its own conversion lemma, for the `published` accounting,
which reproduces the paper's tables. The paper's theorem on the privacy loss of DPSUR is not proved
for its Algorithm 1 (docs/privacy.md says why).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import gammaln, logsumexp

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import (
    Event,
    Gaussian,
    LossTest,
    NonPrivate,
    SampledGaussian,
    Trial,
    mechanisms,
    precision,
)

PAPER_ORDERS = tuple(range(2, 65))
# Sums of many small charges are rounded; the allowance is shortened by more than they can lose.
_ROUNDING = 1e-9


def epsilon_at(order: float, divergence: float, delta: float) -> float:
    """The smallest epsilon that two lemmas grant to a pair with D_order(P || Q) <= divergence.

    Let S be the event that maximises P(S) - e^eps Q(S), p = P(S) and t = Q(S). Data processing
    gives p^a t^(1-a) + (1-p)^a (1-t)^(1-a) <= M = exp((a-1) D). Dropping the second term is
    Proposition 12 of arXiv:2004.00010. Keeping (1-p)^a >= 1 - a p of it instead gives p^a t^(1-a)
    <= M - 1 + a p, and the worst p is again explicit; this is better when M is near 1. Finally
    delta >= sqrt(1 - exp(-D)) is total variation.
    """
    a, d = order, divergence
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must be in (0, 1), got {delta}")
    if a <= 1.0:
        raise ValueError(f"order must be above 1, got {a}")
    if math.isnan(d) or d == math.inf:
        return math.inf
    d = max(d, 0.0)
    if delta * delta + math.expm1(-d) >= 0.0:
        return 0.0
    best = d + math.log1p(-1.0 / a) - (math.log(delta) + math.log(a)) / (a - 1.0)
    exponent = (a - 1.0) * d
    if exponent < 600.0:
        m = math.expm1(exponent)
        rest = m - a * (a - 1.0) * delta
        p = min(1.0, a * m * delta / rest) if rest > 0.0 else 1.0
        if p > delta:
            best = min(
                best, math.log(p - delta) - (a * math.log(p) - math.log(m + a * p)) / (a - 1.0)
            )
    return max(0.0, best) * (1.0 + 1e-12)


@dataclass(frozen=True)
class RenyiFilter:
    """An allowance of Rényi divergence at one order, both fixed before the run.

    A composition theorem with parameters fixed in advance does not cover a sampling rate that is
    read off a noisy norm, or a noise level raised because progress stalled. A filter does: the run
    ends before the divergences of its steps add up to more than the allowance (Feldman and Zrnic
    2021, arXiv:2008.11193; Lécuyer 2021, arXiv:2103.01379). It may end earlier, after `stop_after`
    updates.

    Formal guarantee: if every step of a run was asked for with `affords` before it was taken and
    added to what is spent, each charge being a bound on the step's divergence of that order given
    all that was released before, in both directions, then the run is (epsilon, delta)-DP for the
    budget that the filter was made for.
    """

    order: float
    allowance: float
    stop_after: int | None = None

    @staticmethod
    def for_budget(budget: Budget, order: float) -> "RenyiFilter":
        """The largest allowance at an order that converts to at most the budget."""
        if not order > 1:
            raise InvalidInputError(f"the order of a filter must be above 1, got {order}")
        low, high = 0.0, budget.epsilon + 10.0
        while high - low > 1e-12 * high:
            middle = (low + high) / 2
            if epsilon_at(order, middle, budget.delta) <= budget.epsilon:
                low = middle
            else:
                high = middle
        return RenyiFilter(order, low * (1 - _ROUNDING))

    @staticmethod
    def best_for(
        budget: Budget,
        typical_rdp: Callable[[float], float],
        setup_rdp: Callable[[float], float] = lambda _: 0.0,
    ) -> "RenyiFilter":
        """The filter whose order affords most steps of a typical charge, chosen before the run."""

        def steps(candidate: RenyiFilter) -> float:
            charge = typical_rdp(candidate.order)
            left = candidate.allowance - setup_rdp(candidate.order)
            return left / charge if charge > 0 else math.inf

        orders = (1.0 + 0.1 * 1.2**step for step in range(1, 44))
        return max((RenyiFilter.for_budget(budget, order) for order in orders), key=steps)

    def affords(self, spent: float, charge: float) -> bool:
        """Whether a step of this divergence fits. To be asked before the step is taken."""
        checks.non_negative("the divergence of a step", charge)
        return spent + charge <= self.allowance


@lru_cache(maxsize=4096)
def sampled_gaussian_rdp(q: float, sigma: float, alpha: int) -> float:
    """Rényi divergence of order alpha of a sampled Gaussian mechanism (paper, eq. for A_alpha)."""
    if q == 1.0 or math.isinf(precision(sigma)):
        return alpha / 2 * precision(sigma)
    k = np.arange(alpha + 1)
    log_binomial = gammaln(alpha + 1) - gammaln(k + 1) - gammaln(alpha - k + 1)
    log_joins = log_binomial + (alpha - k) * math.log1p(-q) + k * math.log(q)
    log_terms = log_joins + (k * k - k) * precision(sigma) / 2
    return max(0.0, float(logsumexp(log_terms))) / (alpha - 1)


def event_rdp(event: Event, alpha: int) -> float:
    """What the paper charges for one event. A trial is charged both its parts."""
    match event:
        case NonPrivate():
            return math.inf
        case Gaussian(noise_multiplier=sigma):
            return alpha / 2 * precision(sigma)
        case SampledGaussian():
            one = event.as_one
            return sampled_gaussian_rdp(one.sample_rate, one.noise_multiplier, alpha)
        case LossTest() | Trial():
            return sum(event_rdp(part, alpha) for part in mechanisms(event))
    raise InvalidInputError(f"unknown privacy event: {event!r}")


def epsilon_from_rdp(rdp: float, alpha: int, delta: float) -> float:
    return rdp + math.log((alpha - 1) / alpha) - (math.log(delta) + math.log(alpha)) / (alpha - 1)


def composed_epsilon(charges: Sequence[tuple[Event, int]], delta: float) -> float:
    """Smallest epsilon over the paper's orders for events, each repeated a number of times."""
    if all(count == 0 for _, count in charges):
        return 0.0

    def epsilon(alpha: int) -> float:
        total = sum(count * event_rdp(event, alpha) for event, count in charges if count)
        return epsilon_from_rdp(total, alpha, delta)

    return max(0.0, min(map(epsilon, PAPER_ORDERS)))
