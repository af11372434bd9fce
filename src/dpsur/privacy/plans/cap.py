"""After how many trials a run gives up that pays for accepted updates alone."""

import math

from scipy.special import bdtr

from dpsur.errors import BudgetError
from dpsur.privacy.accounting import CAP_SHARE
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Test


def trial_cap(test: Test, updates: int, budget: Budget) -> int:
    """Trials after which a run gives up, so late that giving up costs less than CAP_SHARE * delta.

    Stopping early fails with probability at most eta = P[Bin(m, a_min) < T] whatever the data, and
    turns (epsilon, delta) into (epsilon, delta + (1 + e^epsilon) eta).
    """
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
    """Whether giving up after so many trials costs no more than is set aside for it."""
    allowed = CAP_SHARE * budget.delta / (1 + math.exp(min(budget.epsilon, 700.0)))
    return early_end(test, updates, trials) <= allowed


def early_end(test: Test, updates: int, trials: int) -> float:
    """The largest probability that so many trials are not enough, whatever the records are."""
    return float(bdtr(updates - 1, trials, test.accept_min))
