"""Deliberately broken mechanisms, to learn what an audit sees.

Each takes the place of a method's procedure while the plan, and so the claim, stays what it was.
None of them may be used for anything else.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpsur.errors import InvalidInputError
from dpsur.functional.parameters import Params
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.mechanism.gate import mean_losses
from dpsur.mechanism.sampling import Batch, Draw
from dpsur.mechanism.state import Candidate, Procedure, State, Verdict
from dpsur.mechanism.streams import VAL_BATCH, VAL_NOISE, Streams
from dpsur.methods.gated import NO_GATE, Gated
from dpsur.methods.noisy_gradient import NoisyGradientSteps
from dpsur.methods.selection import Selective
from dpsur.privacy.plans import Plan
from dpsur.runs.session import Session

Bind = Callable[[Gated, Problem, Plan, Streams], Procedure]
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
        if not isinstance(session.method, Gated) or not isinstance(session.plan, Plan):
            raise InvalidInputError(f"the faults are not made for the method {session.method.name}")
        if self.needs_test and session.plan.trial.gate is None:
            raise InvalidInputError(
                f"the fault {self.name} is in the test of candidates, which {session.method.name} "
                "does not have; choose dpsur, or a gate"
            )
        procedure = self.bind(session.method, session.problem, session.plan, session.streams)
        return replace(session, procedure=procedure)


def _with_steps(
    steps: NoisyGradientSteps, method: Gated, problem: Problem, plan: Plan, streams: Streams
) -> Procedure:
    """Steps alone, or behind the method's gate."""
    if method.gate == NO_GATE:
        return steps
    return Selective(steps, problem, plan, streams, method.loss_clip)


def less_noise(factor: float) -> Bind:
    """Noise of a fraction of what is charged."""

    class LessNoise(NoisyGradientSteps):
        def __init__(self, method: Gated, problem: Problem, plan: Plan, streams: Streams) -> None:
            super().__init__(method, problem, plan, streams)
            noise = factor * self._event.noise_multiplier
            self._event = replace(self._event, noise_multiplier=noise)

    return _steps(LessNoise)


class DividedByDrawnSize(NoisyGradientSteps):
    """The noisy sum is divided by the number of records that were drawn."""

    def __init__(self, method: Gated, problem: Problem, plan: Plan, streams: Streams) -> None:
        super().__init__(method, problem, plan, streams)
        self._drawn = 1
        exact = self._draw

        def counted(examples: Examples, rate: float, generator: torch.Generator) -> Batch:
            batch = exact(examples, rate, generator)
            self._drawn = max(1, len(batch))
            return batch

        self._draw: Draw = counted

    def padded(self) -> None:
        """Counts exact batches only."""
        return

    def _noisy_gradient(self, params: Params) -> tuple[Params, Tensor | None]:
        gradient, overflow = super()._noisy_gradient(params)
        expected = self._event.sample_rate * len(self._problem.train)
        return {name: value * expected / self._drawn for name, value in gradient.items()}, overflow


class FixedBatches(NoisyGradientSteps):
    """Batches of one size, drawn without replacement, charged as Poisson samples."""

    def __init__(self, method: Gated, problem: Problem, plan: Plan, streams: Streams) -> None:
        super().__init__(method, problem, plan, streams)

        def fixed(examples: Examples, rate: float, generator: torch.Generator) -> Batch:
            draws = torch.rand(len(examples), generator=generator, device=generator.device)
            return Batch(examples, rows=draws.argsort()[: math.ceil(rate * len(examples))])

        self._draw: Draw = fixed

    def padded(self) -> None:
        """Draws exact batches only."""
        return


class StaleLoss(Selective):
    """The loss before an update is remembered from the batch that accepted the last one."""

    _remembered: Tensor | None = None

    def initial_state(self) -> State:
        """The proposer's; nothing is remembered from another run."""
        self._remembered = None
        return super().initial_state()

    def judge(self, state: State, candidate: Candidate) -> Verdict:
        """Compare the candidate's loss with a loss on other records."""
        train = self._problem.train
        batch = self._draw(train, self._test.sample_rate, self._streams[VAL_BATCH])
        after, before = mean_losses(self._problem, candidate.state.params, state.params, batch)
        if self._remembered is not None:
            before = self._remembered
        accept = self._gate.decide(after - before, self._streams[VAL_NOISE])
        self._remembered = torch.where(accept, after, before)
        return Verdict(accept)

    def padded(self) -> None:
        """What it remembers is outside the state, so it cannot be replayed."""
        return


class KeptMomentum(Selective):
    """Rejected gradients stay in the momentum, and are not charged."""

    def after_rejection(self, state: State, candidate: Candidate) -> State:
        """The weights as they were, the optimizer as the candidate left it."""
        return replace(state, optimizer=candidate.state.optimizer)


def _steps(kind: type[NoisyGradientSteps]) -> Bind:
    def bind(method: Gated, problem: Problem, plan: Plan, streams: Streams) -> Procedure:
        return _with_steps(kind(method, problem, plan, streams), method, problem, plan, streams)

    return bind


def _gated(kind: type[Selective]) -> Bind:
    def bind(method: Gated, problem: Problem, plan: Plan, streams: Streams) -> Procedure:
        steps = NoisyGradientSteps(method, problem, plan, streams)
        return kind(steps, problem, plan, streams, method.loss_clip)

    return bind


def _sound(method: Gated, problem: Problem, plan: Plan, streams: Streams) -> Procedure:
    return method.bind(problem, plan, streams)


SOUND = Fault("none", _sound)
FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("no-noise", less_noise(NEXT_TO_NOTHING)),
        Fault("noise-1/4", less_noise(1 / 4)),
        Fault("noise-2/3", less_noise(2 / 3)),
        Fault("drawn-size", _steps(DividedByDrawnSize), own_divisor=True),
        Fault("fixed-batches", _steps(FixedBatches)),
        Fault("kept-momentum", _gated(KeptMomentum), needs_test=True),
        Fault("stale-loss", _gated(StaleLoss), needs_test=True),
    )
}
