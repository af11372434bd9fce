"""Activations by name: those of torch that the paper uses, and the tempered sigmoid."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpsur import checks
from dpsur.registry import build

Activation = str | Mapping[str, Any]


class TemperedSigmoid(nn.Module):
    """`scale * sigmoid(temperature * x) - offset`, bounded so that gradients stay small.

    Papernot et al., "Tempered sigmoid activations for deep learning with differential privacy"
    (2021). The default (2, 2, 1) is tanh.
    """

    def __init__(self, scale: float = 2.0, temperature: float = 2.0, offset: float = 1.0) -> None:
        super().__init__()
        checks.positive("scale", scale)
        checks.positive("temperature", temperature)
        checks.finite("offset", offset)
        self.scale, self.temperature, self.offset = scale, temperature, offset

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale * torch.sigmoid(self.temperature * inputs) - self.offset

    def extra_repr(self) -> str:
        return f"scale={self.scale}, temperature={self.temperature}, offset={self.offset}"


ACTIVATIONS: dict[str, Callable[..., nn.Module]] = {
    "tanh": lambda: nn.Tanh(),
    "relu": lambda: nn.ReLU(),
    "tempered-sigmoid": TemperedSigmoid,
}


def build_activation(description: Activation) -> nn.Module:
    """Build an activation from its name, or from a mapping of its name and parameters."""
    if isinstance(description, str):
        description = {"name": description}
    return build("activation", ACTIVATIONS, description)
