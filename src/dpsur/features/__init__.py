"""Fixed features of the records, by name, computed once.

Formal guarantee: the features of a record depend on that record alone, so adding or removing one
record adds or removes one row, and training on features costs no privacy beyond the training.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dpsur.errors import InvalidInputError
from dpsur.features import cache
from dpsur.features.layers import (
    ChannelNorm,
    LayerDescription,
    WithFeatures,
    apply_layers,
    build_layers,
    group_norm,
)
from dpsur.features.scattering import Scattering2d

Shape = tuple[int, ...]
# How features can be normalised (see `dpsur.runs.input_features`).
NONE, GROUP, PRIVATE = "none", "group", "private"
NORMALISATIONS = (NONE, GROUP, PRIVATE)


@dataclass(frozen=True)
class Features:
    """A map from the inputs of one record to its features.

    `layers` describes it for inputs of a shape (without the dimension of the records); no layers
    leave the inputs as they are. `version` changes whenever the numbers do.
    """

    name: str
    summary: str
    layers: Callable[[Shape], tuple[LayerDescription, ...]]
    version: int = 1

    def output_shape(self, shape: Shape) -> Shape:
        """The shape of one record's features, from that of its inputs."""
        layers = build_layers(self.layers(shape))
        return tuple(layers(torch.zeros(1, *shape)).shape[1:])


def _none(_: Shape) -> tuple[LayerDescription, ...]:
    return ()


def _scattering(shape: Shape) -> tuple[LayerDescription, ...]:
    if len(shape) != 3:
        raise InvalidInputError(
            f"scattering needs images of shape (channels, height, width), but a record of these "
            f"data has the shape {shape}; use the features pixels or tokens"
        )
    _, height, width = shape
    sizes = {"height": height, "width": width}
    return ({"name": "scattering", **sizes, "scales": 2, "angles": 8},)


FEATURES: dict[str, Features] = {
    features.name: features
    for features in (
        Features("pixels", "the inputs themselves", _none),
        Features("tokens", "the inputs themselves", _none),
        Features("vectors", "the inputs themselves", _none),
        Features(
            "scattering", "wavelet moduli, 81 per channel, a quarter of the size", _scattering
        ),
    )
}


def features_named(name: str) -> Features:
    """Look features up by name."""
    try:
        return FEATURES[name]
    except KeyError:
        known = ", ".join(FEATURES)
        raise InvalidInputError(f"unknown features {name!r}; choose one of {known}") from None


def compute(
    features: Features,
    inputs: Tensor,
    *,
    device: torch.device | None = None,
    cached: bool = True,
) -> Tensor:
    """The features of all records, one row each, where the inputs are.

    `device` is where to compute. What was computed is kept on disk for the next time, readable by
    its owner only, since it says as much as the records do; `cached=False` neither reads nor writes
    files.
    """
    shape = tuple(inputs.shape[1:])
    layers = features.layers(shape)
    if not layers:
        return inputs
    module = build_layers(layers)
    if not cached or not len(inputs):
        return apply_layers(module, inputs, device=device)
    transform = {"features": features.name, "version": features.version, "layers": layers}
    path = cache.path_for(transform, inputs)
    known = cache.read(path, (len(inputs), *features.output_shape(shape)))
    if known is None:
        known = apply_layers(module, inputs, device=device)
        cache.write(path, known)
    return known.to(inputs.device)


__all__ = [
    "FEATURES",
    "GROUP",
    "NONE",
    "NORMALISATIONS",
    "PRIVATE",
    "ChannelNorm",
    "Features",
    "Scattering2d",
    "WithFeatures",
    "apply_layers",
    "build_layers",
    "compute",
    "features_named",
    "group_norm",
]
