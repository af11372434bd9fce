"""One fault of the released code at a time, in Algorithm 1 as it is printed.

Experiments, not methods: no epsilon is known to hold for any of them. The fault that matters most,
momentum that keeps rejected gradients, is among the controls.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from dpsur.core.problem import Problem
from dpsur.core.streams import Streams
from dpsur.core.types import Candidate, Procedure, State
from dpsur.methods.dpsur import Dpsur
from dpsur.methods.noisy_gradient import NoisyGradientSteps
from dpsur.methods.selection import Selective
from dpsur.privacy.plans import AnyPlan, Plan
from reproduction.arms.released_code import (
    FaultyGradient,
    FaultySelection,
    weights_until_accepted,
)


@dataclass(frozen=True)
class StaleLoss(Dpsur):
    """A candidate's loss is compared with that of an earlier model on an earlier batch."""

    name = "stale-loss"
    summary = "Algorithm 1, compared with a stale loss (experiments only)"

    def bind(self, problem: Problem, plan: AnyPlan, streams: Streams) -> Procedure:
        """Tie the fault to its data."""
        assert isinstance(plan, Plan)
        return StaleSelection(self, problem, plan, streams)


@dataclass(frozen=True)
class OtherDivisor(Dpsur):
    """The noisy sum is divided by the size of another draw of the batch."""

    name = "other-divisor"
    summary = "Algorithm 1, sums divided by another batch's size (experiments only)"

    def _proposer(self, problem: Problem, plan: AnyPlan, streams: Streams) -> Procedure:
        return FaultyGradient(self, problem, plan, streams)


@dataclass(frozen=True)
class FirstRejectionsKept(Dpsur):
    """Until the first acceptance a rejected update is not undone."""

    name = "first-rejections-kept"
    summary = "Algorithm 1, rejected updates kept until one is accepted (experiments only)"

    def bind(self, problem: Problem, plan: AnyPlan, streams: Streams) -> Procedure:
        """Tie the fault to its data."""
        steps = self._proposer(problem, plan, streams)
        return KeepsFirstRejections(steps, problem, plan, streams, self.loss_clip)


class StaleSelection(FaultySelection):
    """The stale comparison alone: gradients and what a rejection leaves behind are as printed."""

    gradients: ClassVar[type[NoisyGradientSteps]] = NoisyGradientSteps

    def after_rejection(self, state: State, candidate: Candidate) -> State:  # noqa: ARG002
        """The state as it was."""
        return state


class KeepsFirstRejections(Selective):
    """Selection whose first rejections change the weights."""

    def after_rejection(self, state: State, candidate: Candidate) -> State:
        """The weights of the rejected step, until one was accepted."""
        return replace(state, params=weights_until_accepted(state, candidate))
