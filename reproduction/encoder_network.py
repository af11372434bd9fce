"""The network of the encoder while it is trained, with batch normalisation.

`dpsur.features.encoder.FrozenWideResNet` is the same network after training.
"""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur.features.encoder import CENTRE, SPREAD, FrozenWideResNet


class _Block(nn.Module):
    """Two convolutions with normalisation before each, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, values: Tensor, active: Tensor) -> Tensor:
        """`active` is `relu(norm1(values))`, which the caller also needs."""
        hidden = F.relu(self.norm2(self.conv1(active)))
        direct = values if self.shortcut is None else self.shortcut(active)
        output: Tensor = direct + self.conv2(hidden)
        return output


class WideResNet(nn.Module):
    """A wide residual network (Zagoruyko and Komodakis, 2016) that returns three maps.

    `depth` is 6 n + 4 layers, `width` multiplies 16, 32 and 64 channels. The maps follow the ReLU
    behind each group of layers: for 32 x 32 pixels they have 32, 16 and 8 pixels per side.
    """

    def __init__(self, depth: int = 16, width: int = 4) -> None:
        super().__init__()
        if (depth - 4) % 6:
            raise ValueError(f"depth must be 6 n + 4 (10, 16, 22, ...), got {depth}")
        self.depth, self.width = depth, width
        self.channels = (16 * width, 32 * width, 64 * width)
        self.stem = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        groups = []
        inputs = 16
        for number, outputs in enumerate(self.channels):
            blocks = [_Block(inputs, outputs, 1 if number == 0 else 2)]
            blocks += [_Block(outputs, outputs, 1) for _ in range((depth - 4) // 6 - 1)]
            groups.append(nn.ModuleList(blocks))
            inputs = outputs
        self.groups = nn.ModuleList(groups)
        self.norm = nn.BatchNorm2d(inputs)

    def reset(self, seed: int) -> None:
        """Draw the weights anew (He initialisation), in place."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Conv2d):
                    fan = module.out_channels * math.prod(module.kernel_size)
                    drawn = torch.randn(module.weight.shape, generator=generator)
                    module.weight.copy_(drawn * math.sqrt(2 / fan))
                elif isinstance(module, nn.BatchNorm2d):
                    module.reset_running_stats()
                    module.weight.fill_(1)
                    module.bias.zero_()

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode (N, 3, height, width) in [0, 1]."""
        values = self.stem((images - CENTRE) / SPREAD)
        maps = []
        for number, group in enumerate(self.groups):
            blocks: Iterable[_Block] = group  # type: ignore[assignment]
            for place, block in enumerate(blocks):
                active = F.relu(block.norm1(values))
                if place == 0 and number > 0:
                    maps.append(active)
                values = block(values, active)
        maps.append(F.relu(self.norm(values)))
        first, second, third = maps
        return first, second, third


def frozen(network: WideResNet) -> FrozenWideResNet:
    """The network as the library has it, with its present weights."""
    weights = {name: values.detach() for name, values in network.state_dict().items()}
    return FrozenWideResNet(weights, network.depth)
