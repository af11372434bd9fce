"""The authors' code as it runs and controls, to reproduce the published figures and explain them.

`ReleasedCode` has all faults of the authors' code. The other classes put one fault, or acceptance
by a coin, in Algorithm 1 as it is printed. Each replaces parts of the procedure (the source of
gradients, the proposer or the gate) while the plan, and so the claim, stays what it was. These are
experiments, not methods: they cannot be named for training, and no epsilon is known to hold for any
of them.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from dpsur.functional.problem import Problem
from dpsur.functional.tree import Params, map_tensors
from dpsur.mechanism.gaussian import Draw, padded_batch, steady_batch
from dpsur.mechanism.proposer import DpGradient, GradientProposer
from dpsur.mechanism.state import Candidate, Gate, Procedure, Proposer, State, Verdict
from dpsur.mechanism.streams import STEERING, VAL_BATCH, VAL_NOISE, Draws
from dpsur.mechanism.trial import LossTestGate, Rule, Selective
from dpsur.methods.dpsgd import Dpsur
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event, Gaussian, LossTest, Step, Test
from dpsur.privacy.plan import Plan
from reproduction.presets.settings import STATISTICS_NOISE

# The stored loss before there is one.
NO_LOSS = 1e5


# --- parts that are wrong -----------------------------------------------------------------------


class OtherDivisorGradient(DpGradient):
    """Noisy gradients divided by the size of another draw."""

    def gradient(self, state: State, draws: Draws) -> Params:
        """The gradient with the wrong divisor."""
        gradient = super().gradient(state, draws)
        size, rate = len(self.sampler.problem.train), self.update.sample_rate
        other = (draws[STEERING].uniform(size) < rate).sum().clamp(min=1)
        factor = rate * size / other
        return {name: value * factor.to(value.dtype) for name, value in gradient.items()}


@dataclass(frozen=True)
class StoredLossProposer:
    """Stores the loss of every candidate, on a fresh batch, with its state."""

    steps: Proposer
    problem: Problem
    sample_rate: float
    draw: Draw = steady_batch

    def step(self, state: State) -> Step:
        """The event of the candidate."""
        return self.steps.step(state)

    def initial_state(self) -> State:
        """No loss is stored yet."""
        state = self.steps.initial_state()
        nothing = torch.full((), NO_LOSS, dtype=torch.float64, device=self.problem.device)
        return replace(state, memory={"stored_loss": nothing})

    def propose(self, state: State, draws: Draws, position: Tensor) -> Candidate:
        """A candidate, and its loss on a fresh batch."""
        candidate = self.steps.propose(state, draws, position)
        batch = self.draw(self.problem.train, self.sample_rate, draws[VAL_BATCH])
        losses = self.problem.losses(candidate.state.params, batch.examples)
        tested = replace(candidate.state, memory={"stored_loss": batch.mean(losses.double())})
        return Candidate(tested)

    def padded(self) -> "StoredLossProposer | None":
        """The same on padded batches."""
        steps = self.steps.padded()
        return None if steps is None else replace(self, steps=steps, draw=padded_batch)


@dataclass(frozen=True)
class _BatchlessGate:
    """A gate that draws no batch. `test` is what is charged."""

    test: LossTest
    rejects: ClassVar[bool] = True

    def begin(self, state: State, draws: Draws) -> None:
        """Nothing to prepare."""

    def after_rejection(self, state: State, candidate: Candidate) -> State:  # noqa: ARG002
        """The state as it was."""
        return state

    def padded(self) -> Self:
        """The same: no batch is drawn."""
        return self


@dataclass(frozen=True)
class StaleLossGate(_BatchlessGate):
    """Compares with the loss that was stored at the last acceptance."""

    rule: Rule

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:
        """Compare the loss of the candidate with a loss of another model on another batch."""
        assert state.memory is not None
        assert candidate.state.memory is not None
        after = candidate.state.memory["stored_loss"]
        difference = after - state.memory["stored_loss"]
        accept = self.rule.decide(difference, draws[VAL_NOISE])
        return Verdict(accept, {"loss": after, "loss_difference": difference})


@dataclass(frozen=True)
class CoinFlipGate(_BatchlessGate):
    """Accepts at random, at the mean rate of the test."""

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:  # noqa: ARG002
        """Toss the coin."""
        rate = (self.test.accept_min + self.test.accept_max) / 2
        return Verdict(draws[VAL_NOISE].uniform(1)[0] < rate)


@dataclass(frozen=True)
class LeakyGate:
    """A gate whose rejected trials leave something behind.

    `momentum`: the optimizer as the candidate left it. `first_weights`: its weights too, until a
    candidate was accepted.
    """

    gate: Gate
    rejects: ClassVar[bool] = True
    momentum: bool = False
    first_weights: bool = False

    @property
    def test(self) -> Test | None:
        """The inner gate's."""
        return self.gate.test

    def begin(self, state: State, draws: Draws) -> object:
        """The inner gate's."""
        return self.gate.begin(state, draws)

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:
        """The inner gate's."""
        return self.gate.judge(state, candidate, draws)

    def after_rejection(self, state: State, candidate: Candidate) -> State:
        """The state with what should not be there."""
        after = self.gate.after_rejection(state, candidate)
        if self.momentum:
            after = replace(after, optimizer=candidate.state.optimizer)
        if self.first_weights:
            first = state.updates == 0
            params = map_tensors(
                lambda new, old: torch.where(first, new, old), candidate.state.params, state.params
            )
            after = replace(after, params=params)
        return after

    def padded(self) -> "LeakyGate":
        """The same on padded batches."""
        return replace(self, gate=self.gate.padded())


# --- putting them in ----------------------------------------------------------------------------


def with_other_divisor(procedure: Selective) -> Selective:
    """The procedure with gradients divided by the size of another draw."""
    proposer = procedure.proposer
    assert isinstance(proposer, GradientProposer)
    source = proposer.source
    assert isinstance(source, DpGradient)
    faulty = OtherDivisorGradient(source.sampler, source.update, source.max_grad_norm)
    return replace(procedure, proposer=replace(proposer, source=faulty))


def with_stale_loss(procedure: Selective) -> Selective:
    """The procedure with a comparison of losses of different models on different batches."""
    gate = procedure.gate
    assert isinstance(gate, LossTestGate)
    assert isinstance(gate.test, LossTest)
    return replace(
        procedure,
        proposer=StoredLossProposer(procedure.proposer, gate.problem, gate.test.sample_rate),
        gate=StaleLossGate(gate.test, gate.rule),
    )


# --- the released code, and its faults one at a time --------------------------------------------


@dataclass(frozen=True, repr=False)
class _Altered(Dpsur):
    """Algorithm 1 with parts replaced."""

    def build(self, problem: Problem, plan: Plan) -> Procedure:
        """Compose Algorithm 1 and replace parts of it."""
        procedure = super().build(problem, plan)
        assert isinstance(procedure, Selective)
        return self._altered(procedure)

    def _altered(self, procedure: Selective) -> Selective:
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class ReleasedCode(_Altered):
    """DPSUR with the five faults of the released code that matter for its accuracy.

    1. A rejected trial restores the weights, not the momentum. 2. The loss of the candidate is
    compared with the stored loss of an earlier model on an earlier batch. 3. Until the first
    acceptance a rejected update is not undone. 4. The noisy sum is divided by the size of another
    draw of the batch. 5. The budget is checked one update too late. Formal guarantee: none.
    """

    name = "released-code"
    summary = "the authors' code as it runs (experiments only)"

    def resolve(
        self,
        dataset_size: int,
        budget: Budget,
        accounting: str,
        setup: tuple[Event, ...] = (),
    ) -> tuple[Self, Plan]:
        """The paper's plan, and one update more. Clip bounds of statistics are not charged."""
        claimed = (Gaussian(STATISTICS_NOISE),) * 2 if setup else ()
        settled, plan = super().resolve(dataset_size, budget, accounting, claimed)
        assert plan.updates is not None
        return settled, replace(plan, phases=(replace(plan.phases[0], count=plan.updates + 1),))

    def _altered(self, procedure: Selective) -> Selective:
        stale = with_stale_loss(with_other_divisor(procedure))
        return replace(stale, gate=LeakyGate(stale.gate, momentum=True, first_weights=True))


@dataclass(frozen=True, repr=False)
class KeptMomentum(_Altered):
    """Momentum keeps rejected gradients that are not charged: the fault that matters most."""

    name = "kept-momentum"
    summary = "Algorithm 1, momentum kept and not charged (experiments only)"

    def _altered(self, procedure: Selective) -> Selective:
        return replace(procedure, gate=LeakyGate(procedure.gate, momentum=True))


@dataclass(frozen=True, repr=False)
class StaleLoss(_Altered):
    """A candidate's loss is compared with that of an earlier model on an earlier batch."""

    name = "stale-loss"
    summary = "Algorithm 1, compared with a stale loss (experiments only)"

    def _altered(self, procedure: Selective) -> Selective:
        return with_stale_loss(procedure)


@dataclass(frozen=True, repr=False)
class OtherDivisor(_Altered):
    """The noisy sum is divided by the size of another draw of the batch."""

    name = "other-divisor"
    summary = "Algorithm 1, sums divided by another batch's size (experiments only)"

    def _altered(self, procedure: Selective) -> Selective:
        return with_other_divisor(procedure)


@dataclass(frozen=True, repr=False)
class FirstRejectionsKept(_Altered):
    """Until the first acceptance a rejected update is not undone."""

    name = "first-rejections-kept"
    summary = "Algorithm 1, rejected updates kept until one is accepted (experiments only)"

    def _altered(self, procedure: Selective) -> Selective:
        return replace(procedure, gate=LeakyGate(procedure.gate, first_weights=True))


# --- controls -----------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class RandomAcceptance(_Altered):
    """Candidates accepted at random, at the mean rate of the gate. Formal guarantee: none stated.

    Its plan is that of the gate, so that it makes the same updates at the same noise.
    """

    name = "random-acceptance"
    summary = "candidates accepted by a coin (experiments only)"

    def _altered(self, procedure: Selective) -> Selective:
        assert isinstance(procedure.gate.test, LossTest)
        return replace(procedure, gate=CoinFlipGate(procedure.gate.test))


@dataclass(frozen=True, repr=False)
class RandomAcceptanceKept(RandomAcceptance):
    """The same, with the momentum of rejected steps kept."""

    name = "random-acceptance-kept"
    summary = "candidates accepted by a coin, momentum kept (experiments only)"

    def _altered(self, procedure: Selective) -> Selective:
        tossed = super()._altered(procedure)
        return replace(tossed, gate=LeakyGate(tossed.gate, momentum=True))
