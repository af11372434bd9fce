"""Deliberately broken mechanisms, to learn what an audit sees.

Each takes the place of a method's procedure while the plan, and so the claim, stays what it was.
None of them may be used for anything else.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dpsur.audits.bounds import Finding
from dpsur.audits.training import audit_training
from dpsur.errors import InvalidInputError
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.functional.tree import Params
from dpsur.mechanism.blocks import RateSearchTraining
from dpsur.mechanism.gaussian import Batch, dp_mean_gradient
from dpsur.mechanism.proposer import DpGradient, GradientProposer, GradientSource, Sampler
from dpsur.mechanism.state import Candidate, Procedure, State, Verdict
from dpsur.mechanism.streams import BATCH, NOISE, VAL_NOISE, Draws
from dpsur.mechanism.trial import LossTestGate, Selective, mean_losses
from dpsur.methods.gradient_method import GradientMethod
from dpsur.privacy.events import SampledGaussian
from dpsur.privacy.plan import Plan
from dpsur.runs.session import Session

Bind = Callable[[GradientMethod, Problem, Plan], Procedure]
NEXT_TO_NOTHING = 1e-9  # of the noise: an event with none does not exist


@dataclass(frozen=True)
class Fault:
    """A way to be wrong.

    `needs_test`: it is in the test, so a method without one cannot have it. `own_divisor`: it does
    not divide by the expected batch size.
    """

    name: str
    bind: Bind
    needs_test: bool = False
    own_divisor: bool = False

    def tamper(self, session: Session) -> Session:
        """The session with the fault in the place of its procedure."""
        if self.bind is _sound:
            return session
        fits = not session.plan.steered or session.plan.tests > 0
        if not isinstance(session.method, GradientMethod) or not fits:
            raise InvalidInputError(f"the faults are not made for the method {session.method.name}")
        if self.needs_test and session.plan.typical.gate is None:
            raise InvalidInputError(
                f"the fault {self.name} is in the test of candidates, which {session.method.name} "
                "does not have; choose dpsur, or a gate"
            )
        procedure = self.bind(session.method, session.problem, session.plan)
        return replace(session, procedure=procedure)


def with_source(change: Callable[[DpGradient], GradientSource]) -> Bind:
    """The method with another source of gradients."""

    def bind(method: GradientMethod, problem: Problem, plan: Plan) -> Procedure:
        procedure = method.build(problem, plan)
        assert isinstance(procedure, Selective | RateSearchTraining)
        proposer = (
            procedure.updates if isinstance(procedure, RateSearchTraining) else procedure.proposer
        )
        assert isinstance(proposer, GradientProposer)
        if not isinstance(proposer.source, DpGradient):
            raise InvalidInputError(f"the faults are not made for the method {method.name}")
        changed = replace(proposer, source=change(proposer.source))
        if isinstance(procedure, RateSearchTraining):
            return replace(procedure, updates=changed)
        return replace(procedure, proposer=changed)

    return bind


def with_gate(change: Callable[[LossTestGate], LossTestGate]) -> Bind:
    """The method with another gate."""

    def bind(method: GradientMethod, problem: Problem, plan: Plan) -> Procedure:
        procedure = method.build(problem, plan)
        assert isinstance(procedure, Selective)
        assert isinstance(procedure.gate, LossTestGate)
        return replace(procedure, gate=change(procedure.gate))

    return bind


def less_noise(factor: float) -> Bind:
    """Noise of a fraction of what is charged."""

    def change(source: DpGradient) -> GradientSource:
        noise = factor * source.update.noise_multiplier
        less = replace(source.update, noise_multiplier=noise)
        return _LessNoise(source.sampler, less, source.max_grad_norm, source)

    return with_source(change)


@dataclass(frozen=True)
class _LessNoise(DpGradient):
    """Steps as another source charges them, with its own noise."""

    charged: DpGradient

    def event(self, state: State) -> SampledGaussian:
        """What is charged."""
        return self.charged.event(state)


class DividedByDrawnSize(DpGradient):
    """The noisy sum is divided by the number of records that were drawn."""

    def gradient(self, state: State, draws: Draws) -> Params:
        """The gradient with the wrong divisor."""
        problem, update = self.sampler.problem, self.update
        batch = self.sampler.batch(update.sample_rate, draws)
        drawn = len(batch) if batch.mask is None else int(batch.mask.sum())
        with self.sampler.layer_randomness(draws):
            return dp_mean_gradient(
                problem,
                state.params,
                batch,
                max(1, drawn) / len(problem.train),  # in the place of the sample rate
                update.noise_multiplier,
                self.max_grad_norm,
                draws[NOISE],
            )

    def padded(self) -> None:
        """Counts exact batches only."""
        return


def _divided_by_drawn_size(source: DpGradient) -> GradientSource:
    return DividedByDrawnSize(source.sampler, source.update, source.max_grad_norm)


def _fixed_batches(source: DpGradient) -> GradientSource:
    sampler = source.sampler
    fixed = _FixedSampler(sampler.problem, random_layers=sampler.random_layers)
    return replace(source, sampler=fixed)


@dataclass(frozen=True)
class _FixedSampler(Sampler):
    """Batches of one size, drawn without replacement."""

    def batch(self, sample_rate: float, draws: Draws, purpose: str = BATCH) -> Batch:
        """The records with the smallest draws."""
        train = self.problem.train
        order = draws[purpose].uniform(len(train)).argsort()
        return Batch(train, rows=order[: math.ceil(sample_rate * len(train))])

    def padded(self) -> None:
        """Draws exact batches only."""
        return


@dataclass(frozen=True)
class StaleLoss(LossTestGate):
    """The loss before an update is remembered from the batch that accepted the last one.

    It is remembered outside of the state, so that nothing undoes it: the fault itself.
    """

    remembered: dict[str, Tensor] = field(default_factory=dict)

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:
        """Compare the candidate's loss with a loss on other records."""
        batch = self._fresh_batch(draws)
        after, before = mean_losses(self.problem, candidate.state.params, state.params, batch)
        if int(draws.step) > 1:  # a procedure may be run again from the start
            before = self.remembered["loss"]
        accept = self.rule.decide(after - before, draws[VAL_NOISE])
        self.remembered["loss"] = torch.where(accept, after, before)
        return Verdict(accept)


class _NotReplayed(Selective):
    """A procedure that remembers something outside of its state, so that no graph can replay it."""

    def padded(self) -> None:
        """Makes one trial after another."""
        return


def _stale_loss(method: GradientMethod, problem: Problem, plan: Plan) -> Procedure:
    procedure = with_gate(_as(StaleLoss))(method, problem, plan)
    assert isinstance(procedure, Selective)
    return _NotReplayed(procedure.proposer, procedure.gate, procedure.setup)


class KeptMomentum(LossTestGate):
    """Rejected gradients stay in the momentum, and are not charged."""

    def after_rejection(self, state: State, candidate: Candidate) -> State:
        """The weights as they were, the optimizer as the candidate left it."""
        return replace(state, optimizer=candidate.state.optimizer)


def _as(kind: type[LossTestGate]) -> Callable[[LossTestGate], LossTestGate]:
    return lambda gate: kind(gate.problem, gate.test, gate.rule, gate.keep_momentum)


def _sound(method: GradientMethod, problem: Problem, plan: Plan) -> Procedure:
    return method.build(problem, plan)


SOUND = Fault("none", _sound)
FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("no-noise", less_noise(NEXT_TO_NOTHING)),
        Fault("noise-1/4", less_noise(1 / 4)),
        Fault("noise-2/3", less_noise(2 / 3)),
        Fault("drawn-size", with_source(_divided_by_drawn_size), own_divisor=True),
        Fault("fixed-batches", with_source(_fixed_batches)),
        Fault("kept-momentum", with_gate(_as(KeptMomentum)), needs_test=True),
        Fault("stale-loss", _stale_loss, needs_test=True),
    )
}


def audit_broken_training(
    model: nn.Module, train: Examples, *, fault: Fault, **known: Any
) -> Finding:
    """`audit_training` with a fault in what runs, named in the details."""
    found = audit_training(model, train, change=fault.tamper, **known)
    return replace(found, details={"fault": fault.name, **found.details})
