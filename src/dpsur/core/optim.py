"""Optimizers as pure functions: state in, state out, nothing changed in place."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dpsur import checks
from dpsur.core.types import OptimizerState, Params


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
    return {name: torch.zeros_like(value) for name, value in params.items()}


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
        velocity = {
            name: self.momentum * value + gradient[name]
            for name, value in state.buffers["velocity"].items()
        }
        moved = {
            name: value - learning_rate.to(value.dtype) * velocity[name]
            for name, value in params.items()
        }
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
        mean = {
            name: self.beta1 * value + (1 - self.beta1) * gradient[name]
            for name, value in state.buffers["mean"].items()
        }
        square = {
            name: self.beta2 * value + (1 - self.beta2) * gradient[name] ** 2
            for name, value in state.buffers["square"].items()
        }
        # Corrections in double precision: 1 - beta2^t loses digits in single at the first steps.
        mean_correction = 1 - torch.pow(self.beta1, step.double())
        square_correction = (1 - torch.pow(self.beta2, step.double())).sqrt()
        moved = {}
        for name, value in params.items():
            rate = (learning_rate / mean_correction).to(value.dtype)
            root = square[name].sqrt() / square_correction.to(value.dtype) + self.eps
            moved[name] = value - rate * mean[name] / root
        return moved, OptimizerState(step, {"mean": mean, "square": square})
