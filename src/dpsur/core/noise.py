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
        noise = torch.randn(
            value.shape, generator=generator, device=value.device, dtype=value.dtype
        )
        return value + scale * noise

    return elementwise(noisy, total.params)
