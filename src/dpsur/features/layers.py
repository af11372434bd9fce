"""The layers that features are made of, by name, without anything to train."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpsur import checks
from dpsur.descriptions import build
from dpsur.errors import InvalidInputError
from dpsur.features.scattering import Scattering2d

LayerDescription = Mapping[str, Any]


def group_norm(groups: int, channels: int) -> nn.Module:
    """Normalise groups of channels of each record by itself: free of any privacy cost."""
    checks.at_least_one("groups", groups)
    checks.at_least_one("channels", channels)
    if channels % groups:
        raise InvalidInputError(
            f"groups must divide the {channels} channels, got {groups}; "
            f"choose one of {', '.join(str(n) for n in range(1, channels + 1) if not channels % n)}"
        )
    return nn.GroupNorm(groups, channels, affine=False)


class ChannelNorm(nn.Module):
    """Shift and scale channels by fixed numbers, which a release carries.

    Statistics of private records must be private ones, released and charged before they get here.
    """

    def __init__(
        self, channels: int, mean: Tensor | None = None, deviation: Tensor | None = None
    ) -> None:
        super().__init__()
        checks.at_least_one("channels", channels)
        mean = torch.zeros(channels) if mean is None else mean.detach().float().clone()
        deviation = (
            torch.ones(channels) if deviation is None else deviation.detach().float().clone()
        )
        for name, values in (("mean", mean), ("deviation", deviation)):
            if values.shape != (channels,) or not values.isfinite().all():
                raise InvalidInputError(
                    f"{name} must hold {channels} finite numbers, one per channel; "
                    f"got shape {tuple(values.shape)}"
                )
        if not (deviation > 0).all():
            raise InvalidInputError("deviation must be above 0 for every channel; clamp it")
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    def forward(self, features: Tensor) -> Tensor:
        """Normalise the channels (dimension 1)."""
        shape = (-1, *(1,) * (features.dim() - 2))
        mean, deviation = self.get_buffer("mean"), self.get_buffer("deviation")
        return (features - mean.reshape(shape)) / deviation.reshape(shape)


def _channel_norm(channels: int) -> nn.Module:
    return ChannelNorm(channels)


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "scattering": Scattering2d,
    "group-norm": group_norm,
    "channel-norm": _channel_norm,
}


def build_layers(descriptions: Sequence[LayerDescription]) -> nn.Sequential:
    """Build layers from their names and arguments, in order."""
    return nn.Sequential(*(build("feature layer", LAYERS, one) for one in descriptions))
