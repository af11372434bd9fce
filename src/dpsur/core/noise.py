"""The one place that adds noise to gradients."""

import torch
from torch import Tensor

from dpsur.core.flat import elementwise
from dpsur.core.gradients import ClippedSum
from dpsur.core.types import Params


def add_gaussian(total: ClippedSum, noise_multiplier: float, generator: torch.Generator) -> Params:
    """Gaussian mechanism on a sum of bounded sensitivity (Alg. 1, L7).

    Formal guarantee: with Poisson sampling at rate q, a sampled Gaussian mechanism of rate q and
    this noise multiplier. The scale comes from the sensitivity that the sum itself reports.
    """
    scale = noise_multiplier * total.sensitivity

    def noisy(value: Tensor) -> Tensor:
        # Normal draws in float32 end at 5.8 standard deviations, where some records would be told
        # apart for certain. In float64 they end at 8.6, beyond any delta (docs/privacy.md).
        noise = torch.randn(
            value.shape, generator=generator, device=value.device, dtype=torch.float64
        )
        return noise.mul_(scale).add_(value).to(value.dtype)

    return elementwise(noisy, total.params)
