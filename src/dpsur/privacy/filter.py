"""A privacy filter: for methods whose parameters are chosen on the way from released values.

A composition theorem with parameters fixed in advance does not cover a sampling rate that is read
off a noisy norm, or a noise level raised because progress stalled. A filter does: it fixes one
order and one allowance of Rényi divergence before the run, and stops before the running sum would
pass it (Feldman and Zrnic 2021, arXiv:2008.11193; Lécuyer 2021, arXiv:2103.01379).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from dpsur import checks
from dpsur.errors import BudgetError, InvalidInputError
from dpsur.privacy.budget import Budget
from dpsur.privacy.conversion import epsilon_at

# Sums of many small charges are rounded; the allowance is shortened by more than they can lose.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class RenyiFilter:
    """An allowance of Rényi divergence at one order, and what is spent of it.

    Formal guarantee: if every step of a run was asked for with `affords` before it was taken and
    recorded with `spend`, each charge being a bound on the step's divergence of that order given
    all that was released before, in both directions, then the run is (epsilon, delta)-DP for the
    budget that the filter was made for.
    """

    order: float
    allowance: float
    spent: float = 0.0

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

    def affords(self, rdp: float) -> bool:
        """Whether a step of this divergence fits. To be asked before the step is taken."""
        checks.non_negative("the divergence of a step", rdp)
        return self.spent + rdp <= self.allowance

    def spend(self, rdp: float) -> "RenyiFilter":
        """The filter after a step; a step that does not fit is an error."""
        if not self.affords(rdp):
            raise BudgetError(
                f"a step of divergence {rdp:g} at order {self.order:g} does not fit the "
                f"{self.allowance - self.spent:g} that is left; ask affords() before taking it"
            )
        return replace(self, spent=self.spent + rdp)

    def epsilon(self, delta: float) -> float:
        """Epsilon of the steps so far, as a progress figure: the guarantee is the budget's."""
        return epsilon_at(self.order, self.spent, delta)
