"""Controls: acceptance by a coin that knows nothing of the data, and faults one at a time."""

import copy
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from dpsur.functional.problem import Problem
from dpsur.mechanism.state import Candidate, Procedure, State, Verdict
from dpsur.mechanism.streams import VAL_NOISE, Streams
from dpsur.methods.dpsur import Dpsur
from dpsur.methods.noisy_gradient import NoisyGradientSteps
from dpsur.methods.selection import Selective
from dpsur.privacy.events import Event, LossTest, Step
from dpsur.privacy.plans import AnyPlan, Plan


@dataclass(frozen=True)
class RandomAcceptance(Dpsur):
    """Candidates accepted at random, at the mean rate of the gate. Formal guarantee: none stated.

    Its plan is that of the gate, so that it makes the same updates at the same noise.
    """

    name = "random-acceptance"
    summary = "candidates accepted by a coin (experiments only)"
    keeps_momentum: ClassVar[bool] = False

    def bind(self, problem: Problem, plan: AnyPlan, streams: Streams) -> Procedure:
        """Tie the control to its data."""
        assert isinstance(plan, Plan)
        return RandomSelection(self, problem, plan, streams, self.keeps_momentum)


@dataclass(frozen=True)
class RandomAcceptanceKept(RandomAcceptance):
    """The same, with the momentum of rejected steps kept."""

    name = "random-acceptance-kept"
    summary = "candidates accepted by a coin, momentum kept (experiments only)"
    keeps_momentum = True


@dataclass(frozen=True)
class KeptMomentum(Dpsur):
    """Algorithm 1 with one fault: momentum keeps rejected gradients that are not charged."""

    name = "kept-momentum"
    summary = "Algorithm 1, momentum kept and not charged (experiments only)"

    def bind(self, problem: Problem, plan: AnyPlan, streams: Streams) -> Procedure:
        """Tie the control to its data."""
        steps = self._proposer(problem, plan, streams)
        selective = Selective(steps, problem, plan, streams, self.loss_clip)
        selective._keeps_momentum = True
        return selective


class RandomSelection:
    """A gate that does not look."""

    def __init__(
        self,
        method: RandomAcceptance,
        problem: Problem,
        plan: Plan,
        streams: Streams,
        keeps_momentum: bool,
    ) -> None:
        assert isinstance(plan.trial.test, LossTest)
        self.setup: tuple[Event, ...] = plan.setup
        self._trial = plan.trial
        self._rate = (plan.trial.test.accept_min + plan.trial.test.accept_max) / 2
        self._steps: NoisyGradientSteps = NoisyGradientSteps(method, problem, plan, streams)
        self._streams = streams
        self._keeps_momentum = keeps_momentum

    def step(self, state: State) -> Step:  # noqa: ARG002
        """What the gate would be charged."""
        return self._trial

    def initial_state(self) -> State:
        """The steps' own."""
        return self._steps.initial_state()

    def propose(self, state: State, position: Tensor) -> Candidate:
        """A noisy step."""
        return self._steps.propose(state, position)

    def judge(self, state: State, candidate: Candidate) -> Verdict:  # noqa: ARG002
        """Toss the coin."""
        generator = self._streams[VAL_NOISE]
        toss = torch.rand((), generator=generator, device=generator.device)
        return Verdict(toss < self._rate)

    def padded(self) -> Self | None:
        """The same on padded batches."""
        steps = self._steps.padded()
        if steps is None:
            return None
        copied = copy.copy(self)
        copied._steps = steps
        return copied

    def after_rejection(self, state: State, candidate: Candidate) -> State:
        """The state as it was, with or without the momentum of the rejected step."""
        if self._keeps_momentum:
            return replace(state, optimizer=candidate.state.optimizer)
        return state
