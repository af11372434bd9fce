"""Algorithm 1: propose, judge, keep or drop, until the plan is done."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpsur.errors import NothingReleasedError
from dpsur.functional.parameters import elementwise
from dpsur.functional.tree import map_tensors
from dpsur.mechanism.state import Procedure, State, Verdict
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.plans import AnyPlan


@dataclass(frozen=True, repr=False)
class Progress:
    """Where a run stands between two trials. Private as a whole."""

    state: State
    ledger: Ledger

    def __repr__(self) -> str:
        return "Progress(state and ledger; private)"


OnTrial = Callable[[Progress, Verdict], None]


def start(procedure: Procedure) -> Progress:
    """The progress of a run that has not made a trial."""
    return Progress(procedure.initial_state(), Ledger(setup=procedure.setup))


def train(
    procedure: Procedure,
    plan: AnyPlan,
    progress: Progress,
    on_trial: OnTrial = lambda *_: None,
) -> Progress:
    """Run trials until the plan affords no more, and return where the run ended.

    Formal guarantee: the returned state satisfies the plan's (epsilon, delta) under the plan's
    accounting, for adding or removing one record. Raises NothingReleasedError if the cap on trials
    came first: that event is as improbable as the plan says, provided nothing is released.
    """
    while goes_on(procedure, plan, progress):
        progress, verdict = make_trial(procedure, plan, progress)
        on_trial(progress, verdict)
    check_completed(plan, progress)
    return progress


def goes_on(procedure: Procedure, plan: AnyPlan, progress: Progress) -> bool:
    """Whether there is another trial to make. Asked before it, never after."""
    step = procedure.step(progress.state)
    return plan.affords(progress.ledger, step) or plan.drops(progress.ledger)


def make_trial(procedure: Procedure, plan: AnyPlan, progress: Progress) -> tuple[Progress, Verdict]:
    """One trial of Algorithm 1: propose, judge, keep or drop, and record."""
    state = progress.state
    step = procedure.step(state)
    position = torch.tensor(plan.position(progress.ledger), device=state.updates.device)
    candidate = procedure.propose(state, position)  # Alg. 1, L3-8
    verdict = procedure.judge(state, candidate)  # L9-14
    if plan.drops(progress.ledger):  # the last update is made: this trial hides how many it took
        verdict = replace(verdict, accept=torch.zeros_like(verdict.accept))
    rejected = procedure.after_rejection(state, candidate)
    state = keep(verdict.accept, candidate.state, rejected)  # L15-18
    ledger = progress.ledger.record(step, updates=int(verdict.accept))
    return Progress(state, ledger), verdict


def check_completed(plan: AnyPlan, progress: Progress) -> None:
    """Refuse to go on with a run that hit its cap: its result must not be released."""
    if not plan.completed(progress.ledger):
        raise NothingReleasedError(
            f"the cap of {plan.trials} trials came before {plan.updates} accepted updates; nothing "
            "may be released from this run: start another one"
        )


def keep(accept: Tensor, candidate: State, current: State) -> State:
    """Choose one of two states, whole, without waiting for a device."""
    if accept.device.type == "cpu":  # nothing to wait for, and nothing to compute
        return candidate if bool(accept) else current
    return map_tensors(
        lambda new, old: torch.where(accept, new, old), candidate, current, together=elementwise
    )
