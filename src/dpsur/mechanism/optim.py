"""Optimizers as pure functions: state in, state out, nothing changed in place.

They work on each number by itself, so that a step can also be made for some of them at a time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dpsur import checks
from dpsur.functional.tree import Params, elementwise
from dpsur.mechanism.state import OptimizerState


class Optimizer(Protocol):
    """A pair of pure functions."""

    def init(self, params: Params) -> OptimizerState:
        """Buffers before the first step."""
        ...

    def step(
        self, params: Params, gradient: Params, state: OptimizerState, learning_rate: Tensor
    ) -> tuple[Params, OptimizerState]:
        """Weights and buffers after one step."""
        ...


def _zeros(params: Params) -> Params:
    return elementwise(torch.zeros_like, params)


def _count(params: Params) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=next(iter(params.values())).device)


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent with heavy-ball momentum, as torch.optim.SGD computes it."""

    momentum: float = 0.9

    def __post_init__(self) -> None:
        checks.fraction_below_one("momentum", self.momentum)

    def init(self, params: Params) -> OptimizerState:
        """A velocity of zero."""
        return OptimizerState(_count(params), {"velocity": _zeros(params)})

    def step(
        self, params: Params, gradient: Params, state: OptimizerState, learning_rate: Tensor
    ) -> tuple[Params, OptimizerState]:
        """Velocity, then weights."""
        velocity = elementwise(
            lambda before, new: torch.add(new, before, alpha=self.momentum),
            state.buffers["velocity"],
            gradient,
        )
        moved = elementwise(
            lambda value, by: torch.addcmul(value, by, learning_rate.to(value.dtype), value=-1),
            params,
            velocity,
        )
        return moved, OptimizerState(state.step + 1, {"velocity": velocity})


@dataclass(frozen=True)
class Adam:
    """Adam with bias correction, as torch.optim.Adam computes it."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-7

    def __post_init__(self) -> None:
        checks.fraction_below_one("adam_beta1", self.beta1)
        checks.fraction_below_one("adam_beta2", self.beta2)
        checks.positive("adam_eps", self.eps)

    def init(self, params: Params) -> OptimizerState:
        """Both moments zero."""
        moments = {"mean": _zeros(params), "square": _zeros(params)}
        return OptimizerState(_count(params), moments)

    def step(
        self, params: Params, gradient: Params, state: OptimizerState, learning_rate: Tensor
    ) -> tuple[Params, OptimizerState]:
        """Moments, then weights by the corrected moments."""
        step = state.step + 1
        mean = elementwise(
            lambda before, new: self.beta1 * before + (1 - self.beta1) * new,
            state.buffers["mean"],
            gradient,
        )
        square = elementwise(
            lambda before, new: self.beta2 * before + (1 - self.beta2) * new**2,
            state.buffers["square"],
            gradient,
        )
        # Corrections in double precision: 1 - beta2^t loses digits in single at the first steps.
        rate = learning_rate / (1 - torch.pow(self.beta1, step.double()))
        correction = (1 - torch.pow(self.beta2, step.double())).sqrt()

        def move(value: Tensor, mean: Tensor, square: Tensor) -> Tensor:
            root = square.sqrt() / correction.to(value.dtype) + self.eps
            return value - rate.to(value.dtype) * mean / root

        moved = elementwise(move, params, mean, square)
        return moved, OptimizerState(step, {"mean": mean, "square": square})


def _constant(progress: Tensor) -> Tensor:
    return torch.ones_like(progress)


def _linear(progress: Tensor) -> Tensor:
    return 1 - progress


def _cosine(progress: Tensor) -> Tensor:
    return 0.5 * (1 + torch.cos(math.pi * progress))


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
}


@dataclass(frozen=True)
class Schedule:
    """A learning rate that starts at `learning_rate` and decays over `length` positions."""

    shape: str
    learning_rate: float
    length: int

    def __post_init__(self) -> None:
        checks.one_of("schedule", self.shape, tuple(SHAPES))
        checks.positive("learning_rate", self.learning_rate)

    def __call__(self, position: Tensor) -> Tensor:
        """Learning rate at a position from 0 to length - 1; never zero within the run."""
        progress = position.double() / self.length
        return self.learning_rate * SHAPES[self.shape](progress)


def update_average(
    rule: "WeightAverage | None", average: Params | None, params: Params, updates: Tensor
) -> Params | None:
    """The average after one more update; None where none is kept."""
    return None if rule is None or average is None else rule(average, params, updates)


@dataclass(frozen=True)
class WeightAverage:
    """Average with a decay that warms up, so that the initial weights are soon forgotten."""

    decay: float

    def __post_init__(self) -> None:
        checks.fraction_below_one("average_decay", self.decay)

    def __call__(self, average: Params, params: Params, updates: Tensor) -> Params:
        """The average after one more accepted update."""
        warm = (1 + updates.double()) / (10 + updates.double())
        decay = torch.minimum(torch.full_like(warm, self.decay), warm)
        return elementwise(
            lambda old, new: torch.lerp(new, old, decay.to(old.dtype)), average, params
        )
