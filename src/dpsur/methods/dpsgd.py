"""DPSGD (Abadi et al. 2016): a noisy sum of clipped gradients, every update kept."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dpsur import checks
from dpsur.core.averaging import WeightAverage
from dpsur.core.flat import elementwise
from dpsur.core.gradients import clipped_sum, draws_randomness
from dpsur.core.noise import add_gaussian
from dpsur.core.optim import Adam, Optimizer, Sgd
from dpsur.core.problem import Problem
from dpsur.core.sampling import Draw, exact_batch, padded_batch
from dpsur.core.schedules import SHAPES, Schedule
from dpsur.core.streams import BATCH, LAYERS, NOISE, Streams
from dpsur.core.types import Candidate, Params, Procedure, State, Verdict
from dpsur.errors import InvalidInputError
from dpsur.methods.base import Method, option, power_of_two_near
from dpsur.privacy.events import Event, SampledGaussian, Trial
from dpsur.privacy.plan import Budget, Plan, Request, make_plan

DEFAULT_EPOCHS = 20


@dataclass(frozen=True)
class Dpsgd(Method):
    """Differentially private stochastic gradient descent.

    Formal guarantee of one step: a sampled Gaussian mechanism at rate batch_size / N.
    """

    name = "dpsgd"
    summary = "DP-SGD (Abadi et al. 2016): clipped, noisy gradients, every update kept"

    learning_rate: float = option(4.0, "learning rate at the start")
    schedule: str = option("linear", "how the learning rate decays over the run", tuple(SHAPES))
    optimizer: str = option("sgd", "optimizer", ("sgd", "adam"))
    momentum: float = option(0.9, "momentum (sgd)")
    adam_beta1: float = option(0.9, "decay of the mean (adam)")
    adam_beta2: float = option(0.999, "decay of the mean square (adam)")
    adam_eps: float = option(1e-7, "added to the root of the mean square (adam)")
    average_decay: float | None = option(
        None, "release an exponential average of the weights with this decay instead of the last"
    )
    batch_size: int | None = option(
        None, "expected size of a Poisson training batch (default: near 8 times the root of N)"
    )
    max_grad_norm: float = option(0.1, "L2 norm to which each record's gradient is clipped")
    noise_multiplier: float | None = option(
        None, "noise relative to the clip norm (default: calibrated to the budget)"
    )
    updates: int | None = option(
        None, "updates to make (default: what the budget allows at the noise given, else 20 epochs)"
    )

    def __post_init__(self) -> None:
        checks.positive("max_grad_norm", self.max_grad_norm)
        self.make_optimizer()
        self.make_schedule(length=1)
        if self.average_decay is not None:
            WeightAverage(self.average_decay)
        if self.noise_multiplier is not None:
            checks.positive("noise_multiplier", self.noise_multiplier)
        for name in ("batch_size", "updates"):
            value = getattr(self, name)
            if value is not None:
                checks.at_least_one(name, value)

    def settle(self, dataset_size: int, budget: Budget, accounting: str) -> tuple[Self, Plan]:
        """Choose what was left open, then noise and length against the budget."""
        settled = self._with_defaults(dataset_size, budget, accounting)
        plan = make_plan(settled._request(dataset_size, accounting), budget, accounting)
        return settled._with_plan(plan), plan

    def bind(self, problem: Problem, plan: Plan, streams: Streams) -> Procedure:
        """Tie the method to its data."""
        return NoisyGradientSteps(self, problem, plan, streams)

    def _with_defaults(self, dataset_size: int, budget: Budget, accounting: str) -> Self:  # noqa: ARG002
        if self.batch_size is None:
            chosen = min(power_of_two_near(8 * dataset_size**0.5), dataset_size)
            return replace(self, batch_size=chosen)
        check_batch_size("batch_size", self.batch_size, dataset_size)
        return self

    def _request(self, dataset_size: int, accounting: str) -> Request:  # noqa: ARG002
        return Request(
            trial_with=lambda noise: self._trial(dataset_size, noise),
            noise_multiplier=self.noise_multiplier,
            count=self.updates,
            default_count=self._default_count(dataset_size),
        )

    def _default_count(self, dataset_size: int) -> int:
        assert self.batch_size is not None
        return max(1, round(DEFAULT_EPOCHS * dataset_size / self.batch_size))

    def _trial(self, dataset_size: int, noise_multiplier: float) -> Trial:
        assert self.batch_size is not None
        return Trial(SampledGaussian(self.batch_size / dataset_size, noise_multiplier))

    def _with_plan(self, plan: Plan) -> Self:
        assert isinstance(plan.trial.update, SampledGaussian)
        return replace(
            self, noise_multiplier=plan.trial.update.noise_multiplier, updates=plan.length
        )

    def make_optimizer(self) -> Optimizer:
        """Build the optimizer that these hyper-parameters name."""
        if self.optimizer == "adam":
            return Adam(self.adam_beta1, self.adam_beta2, self.adam_eps)
        checks.one_of("optimizer", self.optimizer, ("sgd", "adam"))
        return Sgd(self.momentum)

    def make_schedule(self, length: int) -> Schedule:
        """Build the learning-rate schedule over a run of this length."""
        return Schedule(self.schedule, self.learning_rate, length)


def check_batch_size(name: str, value: int, dataset_size: int) -> None:
    """Refuse a batch larger than the data set."""
    if value > dataset_size:
        raise InvalidInputError(
            f"{name} {value} is larger than the data set of {dataset_size} records, a sample rate "
            f"of {value / dataset_size:.3g}; choose at most {dataset_size}"
        )


class NoisyGradientSteps:
    """DPSGD as a procedure: every candidate is kept."""

    def __init__(self, method: Dpsgd, problem: Problem, plan: Plan, streams: Streams) -> None:
        assert isinstance(plan.trial.update, SampledGaussian)
        self.trial = plan.trial
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
                self._problem,
                params,
                batch.data,
                self._max_grad_norm,
                mask=batch.mask,
                rows=batch.rows,
            )
        noisy = add_gaussian(total, self._event.noise_multiplier, self._streams[NOISE])
        # The expected size, not the drawn one: the drawn size is private, and dividing by it would
        # change the sensitivity.
        expected_size = self._event.sample_rate * len(train)
        return elementwise(lambda value: value / expected_size, noisy), batch.overflow
