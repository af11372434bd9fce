"""The layers that features are made of, by name, without anything to train."""

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.features.encoder import Encoder, ScatteringEncoder, WhitenedScattering
from dpsur.features.scattering import Scattering2d
from dpsur.features.table import TableRows
from dpsur.registry import build

LayerDescription = Mapping[str, Any]


def group_norm(groups: int, channels: int) -> nn.Module:
    """Normalise groups of channels of each record on its own: free of any privacy cost."""
    checks.at_least_one("groups", groups)
    checks.at_least_one("channels", channels)
    if channels % groups:
        raise InvalidInputError(
            f"groups must divide the {channels} channels, got {groups}; "
            f"choose one of {', '.join(str(n) for n in range(1, channels + 1) if not channels % n)}"
        )
    return nn.GroupNorm(groups, channels, affine=False)


def _fixed(name: str, values: Tensor | None, usual: float, count: int, of: str) -> Tensor:
    """Statistics that were given, or those that change nothing."""
    checks.at_least_one(f"{of}s", count)
    values = torch.full((count,), usual) if values is None else values.detach().float().clone()
    if values.shape != (count,) or not values.isfinite().all():
        raise InvalidInputError(
            f"{name} must hold {count} finite numbers, one per {of}; got shape "
            f"{tuple(values.shape)}"
        )
    return values


class ChannelNorm(nn.Module):
    """Shift and scale channels by fixed numbers, which a release carries.

    Statistics of private records must be private ones, released and charged before they get here.
    """

    def __init__(
        self, channels: int, mean: Tensor | None = None, deviation: Tensor | None = None
    ) -> None:
        super().__init__()
        mean = _fixed("mean", mean, 0.0, channels, "channel")
        deviation = _fixed("deviation", deviation, 1.0, channels, "channel")
        if not (deviation > 0).all():
            raise InvalidInputError("deviation must be above 0 for every channel; clamp it")
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    def forward(self, features: Tensor) -> Tensor:
        shape = (-1, *(1,) * (features.dim() - 2))
        mean, deviation = self.get_buffer("mean"), self.get_buffer("deviation")
        return (features - mean.reshape(shape)) / deviation.reshape(shape)


class Centre(nn.Module):
    """Subtract a fixed mean from rows of features and bring them to norm 1 again.

    A mean of private records must be a private one, released and charged before it gets here.
    """

    def __init__(self, features: int, centre: Tensor | None = None) -> None:
        super().__init__()
        centre = _fixed("centre", centre, 0.0, features, "feature")
        self.register_buffer("centre", centre)

    def forward(self, features: Tensor) -> Tensor:
        return F.normalize(features - self.get_buffer("centre"))


# Statistics are no arguments of a description: a release holds them among its weights.
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "scattering": Scattering2d,
    "encoder": Encoder,
    "whitened-scattering": WhitenedScattering,
    "scattering-encoder": ScatteringEncoder,
    "group-norm": group_norm,
    "channel-norm": lambda channels: ChannelNorm(channels),
    "centre": lambda features: Centre(features),
    "table": lambda width, columns, numbers: TableRows(width, columns, numbers),
}


def build_layers(descriptions: Sequence[LayerDescription]) -> nn.Sequential:
    return nn.Sequential(*(build("feature layer", LAYERS, one) for one in descriptions))


class WithFeatures(nn.Module):
    """Takes raw inputs: `network(features(inputs))`.

    Training sees the features only, computed once. What is released is this, so that anyone who has
    the model needs no other code to use it.
    """

    def __init__(self, features: nn.Sequential, network: nn.Module) -> None:
        super().__init__()
        trained = [name for name, value in features.named_parameters() if value.requires_grad]
        if trained:
            raise InvalidInputError(
                f"features must have nothing to train, but {trained[0]} has; "
                "put layers with weights into the network"
            )
        self.features = features
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.network(self.features(inputs))
        return outputs


# Records per call of the layers. On the host, what is made should still be in a cache when it is
# copied to its place.
_RECORDS_PER_THREAD, _RECORDS_ON_A_CARD = 32, 2048


def apply_layers(
    layers: nn.Sequential, inputs: Tensor, *, device: torch.device | None = None
) -> Tensor:
    """What the layers make of all records, computed on `device` and put where the inputs are."""
    device = device or inputs.device
    layers = copy.deepcopy(layers).to(device)
    with torch.no_grad():
        one = layers(torch.zeros(1, *inputs.shape[1:], device=device))
    result = torch.empty(len(inputs), *one.shape[1:], dtype=one.dtype, device=inputs.device)
    step = _RECORDS_ON_A_CARD if device.type == "cuda" else _RECORDS_PER_THREAD

    @torch.no_grad()
    def fill(start: int) -> None:
        rows = slice(start, start + step)
        result[rows] = layers(inputs[rows].to(device))

    starts = range(0, len(inputs), step)
    if device.type == "cuda":
        for start in starts:
            fill(start)
        return result
    # Threads with a microbatch each never wait for one another. Threads that share every operation
    # do, and are several times slower than one where other programs keep the cores busy.
    threads = int(torch.get_num_threads())
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, starts))
    finally:
        torch.set_num_threads(threads)
    return result
