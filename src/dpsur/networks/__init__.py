"""The networks, by name. A release names its network, so that it can be built again."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dpsur.features.layers import WithFeatures, build_layers
from dpsur.networks import general
from dpsur.networks.general import linear_head as linear_head
from dpsur.networks.general import pixel_cnn as pixel_cnn
from dpsur.registry import build


def with_features(features: Sequence[Mapping[str, Any]], network: Mapping[str, Any]) -> nn.Module:
    """A network behind the layers that compute its features, so that it takes raw inputs."""
    return WithFeatures(build_layers(features), build_network(network))


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "pixel-cnn": pixel_cnn,
    "linear": general.linear,
    "linear-features": general.linear_features,
    "linear-head": linear_head,
    "mlp": general.mlp,
    "small-cnn": general.small_cnn,
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
