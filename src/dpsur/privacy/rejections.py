"""Where rejections are not charged: the cap on trials, and ways to hide how many were rejected.

A run that pays for accepted updates alone gives up after so many trials that giving up costs a
negligible part of delta. The number of its rejections is private, and it shows in how long the run
takes. `constant` makes a number of trials that was fixed before the run: those after the last
update are real trials whose outcome is dropped. `delay` is the paper's suggestion, a random wait
after every accepted update: it blurs the duration and proves nothing.
"""

import math
from bisect import bisect_left

from scipy.special import bdtr

from dpsur.errors import BudgetError
from dpsur.privacy.accounting import CAP_SHARE
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Test

NOT_HIDDEN, DELAY, CONSTANT = "no", "delay", "constant"
WAYS_TO_HIDE = (NOT_HIDDEN, DELAY, CONSTANT)


def trial_cap(test: Test, updates: int, budget: Budget) -> int:
    """Trials after which a run gives up, so late that giving up costs less than CAP_SHARE * delta.

    Stopping early fails with probability at most eta = P[Bin(m, a_min) < T] for any data, and
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
    """The largest probability that so many trials are not enough, for any records."""
    return float(bdtr(updates - 1, trials, test.accept_min))


def least_cap(test: Test, updates: int, budget: Budget) -> int:
    """The smallest cap on trials that delta pays for: a run that continues to it makes no more."""

    def enough(trials: int) -> bool:
        return late_enough(test, updates, budget, trials)

    return bisect_left(range(trial_cap(test, updates, budget)), True, key=enough)
