"""Learning rates as functions of the position in a run, computed on the device."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dpsur import checks


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
