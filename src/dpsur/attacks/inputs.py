"""Networks that prepare their inputs themselves, so that whoever asks them gives raw records."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

# Of a number that hardly ever differs from record to record, such as a corner of an image.
SMALLEST_DEVIATION = 1e-3


class Standardised(nn.Module):
    """A network behind a fixed shift and scale of its inputs."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, network: nn.Module, mean: Tensor, deviation: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    def forward(self, inputs: Tensor) -> Tensor:
        """Answers to raw inputs."""
        result: Tensor = self.network((inputs - self.mean) / self.deviation)
        return result


def standardised(make: Callable[[], nn.Module], inputs: Tensor) -> Callable[[], nn.Module]:
    """Make networks that see each number of such inputs with mean 0 and deviation 1.

    Whole numbers are words, not quantities, and stay as they are.
    """
    if not inputs.is_floating_point():
        return make
    deviation, mean = (part.cpu() for part in torch.std_mean(inputs, dim=0, correction=0))
    deviation = deviation.clamp(min=SMALLEST_DEVIATION)
    return lambda: Standardised(make(), mean, deviation)
