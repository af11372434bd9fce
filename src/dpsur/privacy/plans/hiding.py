"""What a run may do so that the time it takes does not tell how many trials were rejected.

Where rejections are not charged their number is private, and it shows in the duration of a run.
`constant` makes a number of trials that was fixed before the run: those after the last update are
real trials whose outcome is dropped. `delay` is the paper's suggestion, a random time of waiting
after every accepted update: it blurs the duration and proves nothing.
"""

from bisect import bisect_left
from dataclasses import replace

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Test
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.plans import AnyPlan, Plan
from dpsur.privacy.plans.cap import late_enough, trial_cap

NOT_HIDDEN, DELAY, CONSTANT = "no", "delay", "constant"
WAYS_TO_HIDE = (NOT_HIDDEN, DELAY, CONSTANT)


def check_way_to_hide(way: str) -> None:
    """Refuse a word that is none of the ways to hide rejections."""
    checks.one_of("hide_rejections", way, WAYS_TO_HIDE)


def hiding_plan(plan: AnyPlan, way: str) -> AnyPlan:
    """The plan of a run that hides its rejections; refuses where there are none to hide.

    Formal guarantee of `constant`: the release together with the number of trials satisfies the
    plan's (epsilon, delta). The number is the same whatever the records are, also in a run that
    hits its cap, and hitting this cap is covered by the share of delta that is set aside for it.
    `delay` has no guarantee beyond that of the release alone.
    """
    check_way_to_hide(way)
    if way == NOT_HIDDEN:
        return plan
    if not isinstance(plan, Plan):
        raise InvalidInputError(
            f"hide_rejections {way} needs trials that all take the same work, and a method that "
            "steers itself makes different ones; leave it out, or use the method dpsur"
        )
    gate = plan.trial.gate
    if gate is None or plan.updates is None:
        reason = "no candidate is rejected" if gate is None else "verdicts are charged and public"
        raise InvalidInputError(
            f"hide_rejections {way} has nothing to hide in this run, where {reason}; leave it out"
        )
    if way == DELAY:
        return plan
    return replace(plan, trials=least_cap(gate, plan.updates, plan.budget), to_the_cap=True)


def least_cap(test: Test, updates: int, budget: Budget) -> int:
    """The smallest cap on trials that delta pays for: a run that goes on to it makes no more."""

    def enough(trials: int) -> bool:
        return late_enough(test, updates, budget, trials)

    return bisect_left(range(trial_cap(test, updates, budget)), True, key=enough)


def duration(plan: AnyPlan) -> int:
    """How long a run is for whoever watches it: in trials where their number is a constant.

    What happens by this scale, evaluations and what is shown of a run, tells of no rejections then.
    """
    return plan.trials if plan.to_the_cap else plan.length


def elapsed(plan: AnyPlan, ledger: Ledger) -> int:
    """How far a run has come on that scale."""
    return ledger.trials if plan.to_the_cap else plan.position(ledger)
