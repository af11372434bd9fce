"""The authors' code as it runs, to reproduce the published figures and to explain them.

`ReleasedCode` has all of its faults, the other classes one at a time in Algorithm 1 as it is
printed. Experiments, not methods: they cannot be named for training. No epsilon is known to hold
for any of them, and the one that their plans carry is the paper's claim. The fault that matters
most, momentum that keeps rejected gradients, is among the controls.
"""

import copy
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from dpsur.functional.parameters import Params
from dpsur.functional.problem import Problem
from dpsur.functional.tree import map_tensors
from dpsur.mechanism.gate import make_gate
from dpsur.mechanism.sampling import Draw, exact_batch, padded_batch
from dpsur.mechanism.state import Candidate, Procedure, State, Verdict
from dpsur.mechanism.streams import STEERING, VAL_BATCH, VAL_NOISE, Streams
from dpsur.methods.dpsur import Dpsur
from dpsur.methods.noisy_gradient import NoisyGradientSteps
from dpsur.methods.selection import Selective
from dpsur.presets.settings import STATISTICS_NOISE
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event, Gaussian, LossTest, Step
from dpsur.privacy.plans import AnyPlan, Plan

# The stored loss before there is one.
NO_LOSS = 1e5


@dataclass(frozen=True)
class ReleasedCode(Dpsur):
    """DPSUR with the five faults of the released code that matter for its accuracy.

    1. A rejected trial restores the weights, not the momentum. 2. The loss of the candidate is
    compared with the stored loss of an earlier model on an earlier batch. 3. Until the first
    acceptance a rejected update is not undone. 4. The noisy sum is divided by the size of another
    draw of the batch. 5. The budget is checked one update too late. Formal guarantee: none.
    """

    name = "released-code"
    summary = "the authors' code as it runs (experiments only)"

    def settle(
        self,
        dataset_size: int,
        budget: Budget,
        accounting: str,
        setup: tuple[Event, ...] = (),
    ) -> tuple[Self, AnyPlan]:
        """The paper's plan, and one update more. Clip bounds of statistics are not charged."""
        claimed = (Gaussian(STATISTICS_NOISE),) * 2 if setup else ()
        settled, plan = super().settle(dataset_size, budget, accounting, claimed)
        assert isinstance(plan, Plan)
        assert plan.updates is not None
        return settled, replace(plan, updates=plan.updates + 1)

    def bind(self, problem: Problem, plan: AnyPlan, streams: Streams) -> Procedure:
        """Tie the faulty procedure to its data."""
        assert isinstance(plan, Plan)
        return FaultySelection(self, problem, plan, streams)


class FaultyGradient(NoisyGradientSteps):
    """Noisy gradients divided by the size of another draw."""

    def _noisy_gradient(self, params: Params) -> tuple[Params, Tensor | None]:
        gradient, overflow = super()._noisy_gradient(params)
        size, rate = len(self._problem.train), self._event.sample_rate
        draws = torch.rand(size, generator=self._streams[STEERING], device=self._problem.device)
        other = (draws < rate).sum().clamp(min=1)
        factor = rate * size / other
        return {n: v * factor.to(v.dtype) for n, v in gradient.items()}, overflow


class FaultySelection:
    """Selection that compares with a stale loss and keeps what rejected trials left behind."""

    gradients: ClassVar[type[NoisyGradientSteps]] = FaultyGradient

    def __init__(self, method: Dpsur, problem: Problem, plan: Plan, streams: Streams) -> None:
        assert isinstance(plan.trial.test, LossTest)
        self.setup: tuple[Event, ...] = plan.setup
        self._trial = plan.trial
        self._test = plan.trial.test
        self._gate = make_gate(plan.trial.test, method.loss_clip)
        self._steps = self.gradients(method, problem, plan, streams)
        self._problem, self._streams = problem, streams
        self._draw: Draw = exact_batch

    def step(self, state: State) -> Step:  # noqa: ARG002
        """What the paper charges."""
        return self._trial

    def initial_state(self) -> State:
        """No loss is stored yet."""
        state = self._steps.initial_state()
        nothing = torch.full((), NO_LOSS, dtype=torch.float64, device=self._problem.device)
        return replace(state, memory={"stored_loss": nothing})

    def propose(self, state: State, position: Tensor) -> Candidate:
        """A step, and its loss on a fresh batch."""
        candidate = self._steps.propose(state, position)
        batch = self._draw(self._problem.train, self._test.sample_rate, self._streams[VAL_BATCH])
        losses = self._problem.losses(candidate.state.params, batch.examples)
        loss = batch.mean(losses.double())
        tested = replace(candidate.state, memory={"stored_loss": loss})
        overflows = [o for o in (candidate.overflow, batch.overflow) if o is not None]
        overflow = torch.stack(overflows).any() if overflows else None
        return Candidate(tested, overflow)

    def judge(self, state: State, candidate: Candidate) -> Verdict:
        """Compare with the loss that was stored at the last acceptance."""
        assert state.memory is not None
        assert candidate.state.memory is not None
        after = candidate.state.memory["stored_loss"]
        difference = after - state.memory["stored_loss"]
        accept = self._gate.decide(difference, self._streams[VAL_NOISE])
        return Verdict(accept, {"loss": after, "loss_difference": difference})

    def padded(self) -> "FaultySelection | None":
        """The same on padded batches."""
        steps = self._steps.padded()
        if steps is None:
            return None
        copied = copy.copy(self)
        copied._steps, copied._draw = steps, padded_batch
        return copied

    def after_rejection(self, state: State, candidate: Candidate) -> State:
        """The momentum of the rejected step; its weights too, until one was accepted."""
        params = weights_until_accepted(state, candidate)
        return replace(state, params=params, optimizer=candidate.state.optimizer)


def weights_until_accepted(state: State, candidate: Candidate) -> Params:
    """Those of a rejected candidate where nothing was accepted before it, else the old ones."""
    first = state.updates == 0
    return map_tensors(
        lambda new, old: torch.where(first, new, old), candidate.state.params, state.params
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
