"""A kernel that slides over an input."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Window:
    """A sliding kernel, and the zeros around its input in every dimension."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    margins: tuple[int, ...]

    def padded(self, inputs: Tensor) -> Tensor:
        """The input with its zeros."""
        if not any(self.margins):
            return inputs
        return F.pad(inputs, [m for margin in reversed(self.margins) for m in (margin, margin)])
