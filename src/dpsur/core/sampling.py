"""Poisson sampling."""

import torch
from torch import Tensor


def poisson_sample(size: int, rate: float, generator: torch.Generator) -> Tensor:
    """Rows of a Poisson sample: every record joins independently with probability `rate`.

    The number of rows is random and may be zero. Draws are in double precision, so that the rate
    that happens is the rate that is accounted for to within 2^-53.
    """
    draws = torch.rand(size, generator=generator, device=generator.device, dtype=torch.float64)
    return (draws < rate).nonzero(as_tuple=True)[0]
