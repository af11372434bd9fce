"""More networks of the families that people train: none of them was used to make rules fast."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reproduction.bench.networks import (
    ENCODER_WORDS,
    IMAGE,
    Gpt,
    Network,
    next_word_loss,
    wide_resnet,
)

WORDS = 8_000


def _normalised(*layers: nn.Module, channels: int, groups: int = 32) -> list[nn.Module]:
    return [*layers, nn.GroupNorm(groups, channels)]


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut, as in ResNet-50."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            *_normalised(nn.Conv2d(before, width, 1, bias=False), channels=width),
            nn.ReLU(),
            *_normalised(nn.Conv2d(width, width, 3, stride, 1, bias=False), channels=width),
            nn.ReLU(),
            *_normalised(nn.Conv2d(width, after, 1, bias=False), channels=after),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            convolution = nn.Conv2d(before, after, 1, stride, bias=False)
            self.shortcut = nn.Sequential(*_normalised(convolution, channels=after))

    def forward(self, images: Tensor) -> Tensor:
        """Body plus shortcut."""
        return torch.relu(self.body(images) + self.shortcut(images))


def resnet50() -> nn.Module:
    """ResNet-50 with GroupNorm, without the strides of its first layers."""
    first = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    layers = [*_normalised(first, channels=64), nn.ReLU()]
    before = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(before, width, 1 if block else stride))
            before = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


class Inverted(nn.Module):
    """A depthwise convolution between two 1x1 ones, as in MobileNetV2."""

    def __init__(self, before: int, after: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = before * expansion
        depthwise = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False)
        self.body = nn.Sequential(
            *_normalised(nn.Conv2d(before, wide, 1, bias=False), channels=wide, groups=8),
            nn.ReLU6(),
            *_normalised(depthwise, channels=wide, groups=8),
            nn.ReLU6(),
            *_normalised(nn.Conv2d(wide, after, 1, bias=False), channels=after, groups=8),
        )
        self.adds = stride == 1 and before == after

    def forward(self, images: Tensor) -> Tensor:
        """With a shortcut where shapes allow it."""
        moved: Tensor = self.body(images)
        return images + moved if self.adds else moved


def mobilenet() -> nn.Module:
    """MobileNetV2 for 32x32 images, with GroupNorm."""
    first = nn.Conv2d(3, 32, 3, padding=1, bias=False)
    layers = [*_normalised(first, channels=32, groups=8), nn.ReLU6()]
    before = 32
    for expansion, after, blocks, stride in (
        (1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
    ):  # fmt: skip
        for block in range(blocks):
            layers.append(Inverted(before, after, 1 if block else stride, expansion))
            before = after
    last = nn.Conv2d(before, 640, 1, bias=False)
    layers += [*_normalised(last, channels=640, groups=8), nn.ReLU6()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(640, 10))


class ConvNextBlock(nn.Module):
    """A depthwise 7x7 convolution and a perceptron on channels, scaled by a trained vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.scale = nn.LayerNorm(width), nn.Parameter(0.1 * torch.ones(width))
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, images: Tensor) -> Tensor:
        """A residual step."""
        seen = self.norm(self.depthwise(images).permute(0, 2, 3, 1))
        moved: Tensor = self.scale * self.mlp(seen)
        return images + moved.permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    """A small ConvNeXt."""
    width = 64
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, stride=4)]
    for stage, blocks in enumerate((2, 2, 4, 2)):
        if stage:
            layers += [nn.GroupNorm(1, width), nn.Conv2d(width, 2 * width, 2, stride=2)]
            width *= 2
        layers += [ConvNextBlock(width) for _ in range(blocks)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class VisionTransformer(nn.Module):
    """Patches of 4x4 pixels and a class token."""

    def __init__(self, width: int = 384, depth: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 65, width))
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Scores from the class token."""
        seen = self.patches(images).flatten(2).mT
        tokens = torch.cat([self.token.expand(len(seen), -1, -1), seen], 1) + self.positions
        scores: Tensor = self.output(self.norm(self.encoder(tokens))[:, 0])
        return scores


def audio() -> nn.Module:
    """Convolutions along 8,000 samples."""
    layers: list[nn.Module] = []
    before = 1
    for after, size, stride in (
        (64, 80, 16), (64, 3, 1), (128, 3, 2), (128, 3, 1), (256, 3, 2), (256, 3, 1),
    ):  # fmt: skip
        convolution = nn.Conv1d(before, after, size, stride, size // 2, bias=False)
        layers += [*_normalised(convolution, channels=after, groups=8), nn.ReLU()]
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(before, 10))


class GruClassifier(nn.Module):
    """Words, one GRU layer, and the mean of its states."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.words = nn.Embedding(ENCODER_WORDS, 128)
        self.gru, self.output = nn.GRU(128, width, batch_first=True), nn.Linear(width, 2)

    def forward(self, words: Tensor) -> Tensor:
        """Scores of the two classes."""
        scores: Tensor = self.output(self.gru(self.words(words))[0].mean(1))
        return scores


class UNet(nn.Module):
    """Two levels down, two up, and the mean over the last map."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = _double(3, width), _double(width, 2 * width)
        self.bottom = _double(2 * width, 4 * width)
        self.up = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.joined = _double(4 * width, 2 * width)
        self.up_again = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.joined_again, self.output = _double(2 * width, width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes."""
        large = self.first(images)
        middle = self.second(F.max_pool2d(large, 2))
        raised = self.up(self.bottom(F.max_pool2d(middle, 2)))
        raised = self.up_again(self.joined(torch.cat([raised, middle], 1)))
        scores: Tensor = self.output(self.joined_again(torch.cat([raised, large], 1)).mean((2, 3)))
        return scores


def _double(before: int, after: int) -> nn.Module:
    return nn.Sequential(
        *_normalised(nn.Conv2d(before, after, 3, padding=1), channels=after, groups=8),
        nn.SiLU(),
        *_normalised(nn.Conv2d(after, after, 3, padding=1), channels=after, groups=8),
        nn.SiLU(),
    )


SMALL_GPT = partial(Gpt, 6, 512, WORDS, tied=True)
# Networks with their batch sizes.
GRID = (
    ("resnet50-64", 128), ("wrn-40-4", 256), ("mobilenet", 256), ("convnext-64", 256),
    ("vit", 256), ("audio", 256), ("gru-256", 512), ("unet", 256), ("gpt-6x512", 32),
)  # fmt: skip
FAMILIES: dict[str, Network] = {
    network.name: network
    for network in (
        Network("resnet50-64", "ResNet-50, 64x64", 23_520_842, resnet50, (3, 64, 64)),
        Network(
            "wrn-40-4", "WRN-40-4 with GroupNorm", 8_949_210, partial(wide_resnet, 40), IMAGE
        ),
        Network("mobilenet", "MobileNetV2 with GroupNorm", 1_448_970, mobilenet, IMAGE),
        Network("convnext-64", "small ConvNeXt, 64x64", 7_458_378, convnext, (3, 64, 64)),
        Network("vit", "Vision Transformer", 14_244_490, VisionTransformer, IMAGE),
        Network("audio", "convolutions along one dimension", 390_410, audio, (1, 8_000)),
        Network("gru-256", "GRU of width 256", 936_962, GruClassifier, (128,), 2, ENCODER_WORDS),
        Network("unet", "small U-Net", 468_106, UNet, IMAGE),
        Network(
            "gpt-6x512", "GPT-2 shaped, tied", 23_142_400, SMALL_GPT, (256,), WORDS, WORDS,
            labelled_positions=True, loss=next_word_loss,
        ),
    )
}  # fmt: skip
