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

from dpsur import checks
from dpsur.errors import BudgetError, InvalidInputError
from dpsur.privacy.accounting import CAP_SHARE
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Test
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.plans.protocol import PrivacyPlan

NOT_HIDDEN, DELAY, CONSTANT = "no", "delay", "constant"
WAYS_TO_HIDE = (NOT_HIDDEN, DELAY, CONSTANT)


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


def check_way_to_hide(way: str) -> None:
    """Refuse a word that is none of the ways to hide rejections."""
    checks.one_of("hide_rejections", way, WAYS_TO_HIDE)


def hiding_plan(plan: PrivacyPlan, way: str) -> PrivacyPlan:
    """The plan of a run that hides its rejections; refuses where there are none to hide.

    Formal guarantee of `constant`: the release together with the number of trials satisfies the
    plan's (epsilon, delta). The number is the same whatever the records are, also in a run that
    hits its cap, and hitting this cap is covered by the share of delta that is set aside for it.
    `delay` has no guarantee beyond that of the release alone.
    """
    check_way_to_hide(way)
    if way == NOT_HIDDEN:
        return plan
    return plan.hide_rejections(way)


def nothing_to_hide(way: str, reason: str) -> InvalidInputError:
    """The refusal where no rejections are private."""
    return InvalidInputError(
        f"hide_rejections {way} has nothing to hide in this run, where {reason}; leave it out"
    )


def steps_differ(way: str) -> InvalidInputError:
    """The refusal where steps depend on what was released before."""
    return InvalidInputError(
        f"hide_rejections {way} needs trials that all take the same work, and a method that "
        "steers itself makes different ones; leave it out, or use the method dpsur"
    )


def least_cap(test: Test, updates: int, budget: Budget) -> int:
    """The smallest cap on trials that delta pays for: a run that continues to it makes no more."""

    def enough(trials: int) -> bool:
        return late_enough(test, updates, budget, trials)

    return bisect_left(range(trial_cap(test, updates, budget)), True, key=enough)


def duration(plan: PrivacyPlan) -> int:
    """How long a run is for whoever watches it: in trials where their number is a constant.

    Evaluations and progress reports follow this scale, so that they reveal no rejections then.
    """
    return plan.trials if plan.to_the_cap else plan.length


def elapsed(plan: PrivacyPlan, ledger: Ledger) -> int:
    """How far a run has come on that scale."""
    return ledger.trials if plan.to_the_cap else plan.position(ledger)
