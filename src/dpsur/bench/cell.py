"""What every arm is given, and the setting that all of them share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from dpsur.functional.records import Examples
from dpsur.functional.tree import device_of
from dpsur.mechanism.streams import Streams

# One setting for all arms. Steps are small, so that thousands of them leave the weights tame.
LEARNING_RATE, MOMENTUM = 0.01, 0.9
MAX_GRAD_NORM, NOISE_MULTIPLIER = 0.1, 1.0


class NotInstalledError(Exception):
    """The arm needs a package that is not there."""


class Network(Protocol):
    """A network to measure, and batches that it can be trained on."""

    @property
    def name(self) -> str:
        """What rows call it."""
        ...

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        ...

    def model(self, device: torch.device, seed: int = 0) -> nn.Module:
        """A freshly initialised network: the same seed gives every arm the same weights."""
        ...

    def batch(self, size: int, device: torch.device, seed: int = 0) -> Examples:
        """A batch of this size. Speed depends on shapes and types alone."""
        ...


@dataclass(frozen=True)
class Cell:
    """A network and a batch: what every arm of one comparison is given."""

    network: Network
    batch: Examples
    seed: int = 0

    @property
    def device(self) -> torch.device:
        """Where the step is made."""
        return device_of(self.batch.inputs)

    def model(self) -> nn.Module:
        """A copy of the network, in training mode."""
        return self.network.model(self.device, self.seed).train()

    def streams(self) -> Streams:
        """Random streams for noise."""
        return Streams(self.seed, self.device)


# A private step also has `clipped_sum()`, so that a test can check that all compute the same thing.
Step = Callable[[], None]
MakeArm = Callable[[Cell], Step]


def sgd(model: nn.Module) -> torch.optim.SGD:
    """The optimizer of every arm but ours, which computes the same."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
