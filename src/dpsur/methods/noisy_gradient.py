"""Updates from noisy sums of clipped gradients, as a procedure (Alg. 1, L3-8)."""

import copy
from contextlib import nullcontext

import torch
from torch import Tensor

from dpsur.core.averaging import WeightAverage
from dpsur.core.gradients import clipped_sum, draws_randomness
from dpsur.core.noise import add_gaussian
from dpsur.core.problem import Problem
from dpsur.core.sampling import Draw, exact_batch, padded_batch
from dpsur.core.streams import BATCH, LAYERS, NOISE, Streams
from dpsur.core.types import Candidate, Params, State, Verdict
from dpsur.methods.noisy_steps import NoisySteps
from dpsur.privacy.events import Event, SampledGaussian, Step
from dpsur.privacy.filtered import AnyPlan
from dpsur.privacy.plan import Plan


class NoisyGradientSteps:
    """DP-SGD as a procedure: every candidate is kept."""

    def __init__(
        self, method: NoisySteps, problem: Problem, plan: AnyPlan, streams: Streams
    ) -> None:
        assert isinstance(plan, Plan)
        assert isinstance(plan.trial.update, SampledGaussian)
        self._trial = plan.trial
        self.setup: tuple[Event, ...] = plan.setup
        self._problem = problem
        self._streams = streams
        self._draw: Draw = exact_batch
        self._random_layers = draws_randomness(problem.model, problem.train)
        self._event = plan.trial.update
        self._max_grad_norm = method.max_grad_norm
        self._optimizer = method.make_optimizer()
        self._schedule = method.make_schedule(plan.length)
        decay = method.average_decay
        self._average = None if decay is None else WeightAverage(decay)

    def step(self, state: State) -> Step:  # noqa: ARG002
        """The same trial every time."""
        return self._trial

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
        """Take one noisy step from the state (Alg. 1, L3-8)."""
        gradient, overflow = self._noisy_gradient(state.params)
        params, optimizer = self._optimizer.step(
            state.params, gradient, state.optimizer, self._schedule(position)
        )
        updates = state.updates + 1
        average = None
        if self._average is not None and state.average is not None:
            average = self._average(state.average, params, updates)
        return Candidate(State(params, optimizer, updates, average), overflow)

    def judge(self, state: State, candidate: Candidate) -> Verdict:  # noqa: ARG002
        """Keep every candidate."""
        return Verdict(torch.ones((), dtype=torch.bool, device=self._problem.device))

    def padded(self) -> "NoisyGradientSteps | None":
        """The same steps on padded batches; not for layers that draw random numbers."""
        if self._random_layers:
            return None
        copied = copy.copy(self)
        copied._draw = padded_batch
        return copied

    def after_rejection(self, state: State, candidate: Candidate) -> State:  # noqa: ARG002
        """Nothing is ever rejected."""
        return state

    def _noisy_gradient(self, params: Params) -> tuple[Params, Tensor | None]:
        train = self._problem.train
        batch = self._draw(train, self._event.sample_rate, self._streams[BATCH])
        layers = self._streams.global_randomness(LAYERS) if self._random_layers else nullcontext()
        with layers:
            total = clipped_sum(
                self._problem, params, batch.examples, self._max_grad_norm, mask=batch.mask
            )
        noisy = add_gaussian(total, self._event.noise_multiplier, self._streams[NOISE])
        # The expected size, not the drawn one: the drawn size is private, and dividing by it would
        # change the sensitivity.
        expected_size = self._event.sample_rate * len(train)
        return {name: value / expected_size for name, value in noisy.items()}, batch.overflow
