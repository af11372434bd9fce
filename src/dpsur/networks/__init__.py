"""The networks, by name. A release names its network, so that it can be built again.

Networks for your own data are sized by the shape of an input. Every layer has a rule in the
gradient engine, and nothing works in place.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.features.layers import WithFeatures, build_layers
from dpsur.registry import build

Activation = str | Mapping[str, Any]


ACTIVATIONS: dict[str, Callable[..., nn.Module]] = {
    "tanh": lambda: nn.Tanh(),
    "relu": lambda: nn.ReLU(),
}


def build_activation(description: Activation) -> nn.Module:
    if isinstance(description, str):
        description = {"name": description}
    return build("activation", ACTIVATIONS, description)


LEAST_IMAGE = 8
# A hidden layer on wider vectors has more parameters than their noise allows.
WIDEST_FOR_HIDDEN_LAYER, HIDDEN = 256, 32


def linear(inputs: int, classes: int) -> nn.Module:
    _check_counts(inputs=inputs, classes=classes)
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))


def linear_head(inputs: int, classes: int) -> nn.Module:
    """Logistic regression without a bias on features of norm 1, from zero weights."""
    _check_counts(inputs=inputs, classes=classes)
    head = nn.Linear(inputs, classes, bias=False)
    nn.init.zeros_(head.weight)
    return nn.Sequential(nn.Flatten(), head)


def linear_features(channels: int, height: int, width: int, classes: int) -> nn.Module:
    _check_counts(channels=channels, height=height, width=width)
    return linear(channels * height * width, classes)


def mlp(
    inputs: int, hidden: int | Sequence[int], classes: int, activation: Activation = "tanh"
) -> nn.Module:
    """Fully connected layers: `hidden` is the width of the one between, or a list of widths."""
    widths = [hidden] if isinstance(hidden, int) else list(hidden)
    _check_counts(inputs=inputs, classes=classes)
    layers: list[nn.Module] = [nn.Flatten()]
    before = inputs
    for width in widths:
        checks.at_least_one("hidden", width)
        layers += [nn.Linear(before, width), build_activation(activation)]
        before = width
    return nn.Sequential(*layers, nn.Linear(before, classes))


def for_vectors(inputs: int, classes: int, hidden: bool | None = None) -> dict[str, Any]:
    """A linear model, or one with a hidden layer where that is asked for or suits the width."""
    if hidden is None:
        hidden = inputs <= WIDEST_FOR_HIDDEN_LAYER
    if hidden:
        return {"name": "mlp", "inputs": inputs, "hidden": HIDDEN, "classes": classes}
    return {"name": "linear", "inputs": inputs, "classes": classes}


def small_cnn(
    channels: int, height: int, width: int, classes: int, activation: Activation = "tanh"
) -> nn.Module:
    """Two convolutions and two linear layers for images of any size from 8x8."""
    _check_counts(channels=channels, classes=classes)
    for name, size in (("height", height), ("width", width)):
        if size < LEAST_IMAGE:
            raise InvalidInputError(
                f"small-cnn needs images of at least {LEAST_IMAGE}x{LEAST_IMAGE}, got {name} "
                f"{size}; use the network mlp instead"
            )
    # Averages leave 4 to 7 rows and columns of a large image (2 or 3 of the smallest), so that the
    # linear layer does not grow with it.
    quarters = [(size + 3) // 4 for size in (height, width)]
    windows = [max(1, size // 4) for size in quarters]
    rows, columns = (size // window for size, window in zip(quarters, windows, strict=True))
    return nn.Sequential(
        nn.Conv2d(channels, 16, kernel_size=3, stride=2, padding=1),
        build_activation(activation),
        nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1),
        build_activation(activation),
        nn.AvgPool2d((windows[0], windows[1])),
        nn.Flatten(),
        nn.Linear(32 * rows * columns, 32),
        build_activation(activation),
        nn.Linear(32, classes),
    )


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        checks.at_least_one(name, value)


def pixel_cnn(classes: int = 10, activation: Activation = "tanh") -> nn.Module:
    """The paper's, for 28x28 grey images: 26,010 parameters."""
    _check_counts(classes=classes)
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=8, stride=2, padding=2),
        build_activation(activation),
        nn.MaxPool2d(kernel_size=2, stride=1),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        build_activation(activation),
        nn.MaxPool2d(kernel_size=2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        build_activation(activation),
        nn.Linear(32, classes),
    )


def with_features(features: Sequence[Mapping[str, Any]], network: Mapping[str, Any]) -> nn.Module:
    """A network behind the layers that compute its features, so that it takes raw inputs."""
    return WithFeatures(build_layers(features), build_network(network))


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "pixel-cnn": pixel_cnn,
    "linear": linear,
    "linear-features": linear_features,
    "linear-head": linear_head,
    "mlp": mlp,
    "small-cnn": small_cnn,
    "with-features": with_features,
}


def build_network(description: Mapping[str, Any]) -> nn.Module:
    return build("network", NETWORKS, description)


def parameter_count(description: Mapping[str, Any]) -> int:
    """How many numbers a described network trains, without making room for them."""
    if description.get("name") == "with-features":
        inner = description.get("network")
        description = inner if isinstance(inner, Mapping) else {}
    with torch.device("meta"):
        network = build_network(description)
    return sum(parameter.numel() for parameter in network.parameters())


def takes(description: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
    return set(changes) <= set(inspect.signature(NETWORKS[description["name"]]).parameters)
