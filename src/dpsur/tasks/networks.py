"""The networks, by name. A release names its network, so that it can be built again."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from dpsur.errors import InvalidInputError


def pixel_cnn(classes: int = 10) -> nn.Module:
    """The paper's network for 28x28 images (26,010 parameters), with tanh."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(kernel_size=2, stride=1),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(kernel_size=2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        nn.Tanh(),
        nn.Linear(32, classes),
    )


NETWORKS: dict[str, Callable[..., nn.Module]] = {"pixel-cnn": pixel_cnn}


def build_network(description: Mapping[str, Any]) -> nn.Module:
    """Build a network from its name and arguments."""
    arguments = dict(description)
    name = arguments.pop("name", None)
    if name not in NETWORKS:
        raise InvalidInputError(f"unknown network {name!r}; choose one of {', '.join(NETWORKS)}")
    return NETWORKS[name](**arguments)
