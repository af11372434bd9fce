"""The one place that adds noise to gradients."""

import math

import torch
from torch import Tensor

from dpsur.functional.parameters import Params, elementwise
from dpsur.per_example import ClippedSum

# Numbers that get their noise at once on the host, where float64 would take twice the room of all
# parameters, several times over.
_AT_ONCE = 2**16


def add_gaussian(
    total: ClippedSum, noise_multiplier: float | Tensor, generator: torch.Generator
) -> Params:
    """Gaussian mechanism on a sum of bounded sensitivity (Alg. 1, L7).

    Formal guarantee: with Poisson sampling at rate q, a sampled Gaussian mechanism of rate q and
    this noise multiplier. The scale comes from the sensitivity that the sum itself reports.
    """
    scale = noise_multiplier * total.sensitivity

    def noisy(value: Tensor) -> Tensor:
        # Normal draws in float32 end at 5.8 standard deviations, where some records would be told
        # apart for certain. In float64 they end at 8.6, which `dpsur.privacy.noise_tail` charges.
        if value.device.type == "cpu":
            return _noisy_on_the_host(value, scale, generator)
        noise = torch.randn(
            value.shape, generator=generator, device=value.device, dtype=torch.float64
        )
        return noise.mul_(scale).add_(value).to(value.dtype)

    return elementwise(noisy, total.params)


def _noisy_on_the_host(value: Tensor, scale: float | Tensor, generator: torch.Generator) -> Tensor:
    """The same sum of value and noise in float64, piece by piece."""
    exact, found = value.reshape(-1), torch.empty(value.numel(), dtype=value.dtype)
    pieces, places = torch.split(exact, _AT_ONCE), torch.split(found, _AT_ONCE)
    for piece, place in zip(pieces, places, strict=True):
        place.copy_(_normal_draws(len(piece), generator).mul_(scale).add_(piece))
    return found.view(value.shape)


def _normal_draws(count: int, generator: torch.Generator) -> Tensor:
    """Standard normal draws in float64, on the host.

    The transform of Box and Muller (1958), as PyTorch uses it on a CPU, where it computes one
    number at a time. Uniform draws are multiples of 2^-53 below 1: 1 - u is exact and positive.
    """
    pairs = (count + 1) // 2
    uniform = torch.rand(2, pairs, generator=generator, dtype=torch.float64)
    radius = uniform[0].neg_().log1p_().mul_(-2.0).sqrt_()
    angle = uniform[1].mul_(2 * math.pi)
    normal = torch.empty_like(uniform)
    torch.cos(angle, out=normal[0])
    torch.sin(angle, out=normal[1])
    return normal.mul_(radius).view(-1)[:count]
