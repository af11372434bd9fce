"""DoG, an optimizer without a learning rate, as a pair of pure functions, and DP-SGD with it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpsur.functional.tree import Params, elementwise
from dpsur.mechanism.proposer import Optimizer
from dpsur.mechanism.state import OptimizerState
from dpsur.methods import Dpsgd


@dataclass(frozen=True)
class DogSteps:
    """DoG (Ivgi, Hinder and Carmon 2023): the rate is distance from the start over gradient norms.

    The distance is the largest so far, at first a millionth of the start's size; norms are those of
    the noisy gradients.
    """

    first_distance: float = 1e-6

    def init(self, params: Params) -> OptimizerState:
        """The first weights, and nothing seen."""
        some = next(iter(params.values()))
        zero = torch.zeros((), dtype=torch.float64, device=some.device)
        distance = self.first_distance * (1 + _length(params))
        sums = {"distance": distance, "squares": zero}
        return OptimizerState(zero.long(), {"first": params, "sums": sums})

    def step(
        self, params: Params, gradient: Params, state: OptimizerState, learning_rate: Tensor
    ) -> tuple[Params, OptimizerState]:
        """One step; `learning_rate` is a factor, 1 in the original."""
        first, sums = state.buffers["first"], state.buffers["sums"]
        away = _length({name: value - first[name] for name, value in params.items()})
        distance = torch.maximum(sums["distance"], away)
        squares = sums["squares"] + _length(gradient).square()
        rate = learning_rate * distance / (squares + 1e-16).sqrt()
        moved = elementwise(lambda value, by: value - rate.to(value.dtype) * by, params, gradient)
        new = {"distance": distance, "squares": squares}
        return moved, OptimizerState(state.step + 1, {"first": first, "sums": new})


def _length(params: Params) -> Tensor:
    return torch.stack([value.double().square().sum() for value in params.values()]).sum().sqrt()


@dataclass(frozen=True, repr=False)
class Dog(Dpsgd):
    """DP-SGD whose steps are those of DoG."""

    def make_optimizer(self) -> Optimizer:
        """DoG in place of what the options name."""
        return DogSteps()
