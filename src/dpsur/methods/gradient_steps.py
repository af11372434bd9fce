"""Updates along a gradient, every one of them kept: what gradient methods have in common."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from dpsur.functional.parameters import Params
from dpsur.functional.problem import Problem
from dpsur.mechanism.optim import followed
from dpsur.mechanism.state import Candidate, State, Verdict
from dpsur.mechanism.streams import Streams
from dpsur.methods.draws import Draws
from dpsur.methods.optimization import Optimization
from dpsur.privacy.events import Event, Step
from dpsur.privacy.plans import AnyPlan


class GradientSteps(Draws, ABC):
    """A procedure whose candidate is one optimizer step along a gradient, always kept."""

    def __init__(
        self, method: Optimization, problem: Problem, plan: AnyPlan, streams: Streams
    ) -> None:
        super().__init__(problem, streams)
        self.setup: tuple[Event, ...] = plan.setup
        self._optimizer = method.make_optimizer()
        self._schedule = method.make_schedule(plan.length)
        self._average = method.make_average()

    @abstractmethod
    def step(self, state: State) -> Step:
        """The event of the next candidate."""

    @abstractmethod
    def _gradient(self, state: State) -> tuple[Params, Tensor | None]:
        """A gradient, and whether a padded batch had no room for its rows."""

    def initial_state(self) -> State:
        """The model's own weights, and buffers at rest."""
        params = self._problem.initial_params()
        return State(
            params=params,
            optimizer=self._optimizer.init(params),
            updates=torch.zeros((), dtype=torch.int64, device=self._problem.device),
            average=None if self._average is None else params,
        )

    def propose(self, state: State, position: Tensor) -> Candidate:
        """Take one step from the state (Alg. 1, L3-8)."""
        gradient, overflow = self._gradient(state)
        params, optimizer = self._optimizer.step(
            state.params, gradient, state.optimizer, self._schedule(position)
        )
        updates = state.updates + 1
        average = followed(self._average, state.average, params, updates)
        return Candidate(State(params, optimizer, updates, average, state.memory), overflow)

    def judge(self, state: State, candidate: Candidate) -> Verdict:  # noqa: ARG002
        """Keep every candidate."""
        return Verdict(torch.ones((), dtype=torch.bool, device=self._problem.device))

    def after_rejection(self, state: State, candidate: Candidate) -> State:  # noqa: ARG002
        """Nothing is ever rejected."""
        return state
