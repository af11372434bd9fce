"""The architectures that only the benchmark needs; the paper's are those of the tasks.

Every weight is in a layer that all arms know, and nothing works in place, so that no arm is ruled
out by an accident of how a network is written.
"""

import torch
from torch import Tensor, nn

ENCODER_WORDS, ENCODER_LENGTH, ENCODER_WIDTH = 5_000, 64, 64


def widened_cnn(width: int) -> nn.Module:
    """The paper's network for 32x32 colour images with other widths: its own begins with 32."""
    layers: list[nn.Module] = []
    before = 3
    for channels in (width, 2 * width, 4 * width):
        for inputs in (before, channels):
            layers += [nn.Conv2d(inputs, channels, kernel_size=3, padding=1), nn.Tanh()]
        layers.append(nn.MaxPool2d(2))
        before = channels
    hidden = 4 * width
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(16 * hidden, hidden), nn.Tanh(), nn.Linear(hidden, 10)
    )


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm around a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(32, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.GroupNorm(32, width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, width, 1, stride=stride, bias=False), nn.GroupNorm(32, width)
            )

    def forward(self, images: Tensor) -> Tensor:
        """Body plus shortcut."""
        return torch.relu(self.body(images) + self.shortcut(images))


def resnet18() -> nn.Module:
    """ResNet-18 for 32x32 images, with GroupNorm in place of BatchNorm."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 3, padding=1, bias=False),
        nn.GroupNorm(32, 64),
        nn.ReLU(),
    ]
    before = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [ResidualBlock(before, width, stride), ResidualBlock(width, width, 1)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class EncoderBlock(nn.Module):
    """Attention and a two-layer perceptron, each behind a LayerNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, num_heads=4, batch_first=True)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, states: Tensor) -> Tensor:
        """Two residual steps."""
        seen = self.before_attention(states)
        states = states + self.attention(seen, seen, seen, need_weights=False)[0]
        moved: Tensor = states + self.mlp(self.before_mlp(states))
        return moved


class TransformerEncoder(nn.Module):
    """A small encoder of token sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ENCODER_WORDS, ENCODER_WIDTH)
        self.positions = nn.Embedding(ENCODER_LENGTH, ENCODER_WIDTH)
        self.blocks = nn.Sequential(EncoderBlock(ENCODER_WIDTH), EncoderBlock(ENCODER_WIDTH))
        self.output = nn.Linear(ENCODER_WIDTH, 2)

    def forward(self, words: Tensor) -> Tensor:
        """Scores of the two classes."""
        # one row of positions per example, as per-example gradients by hooks need it
        places = torch.arange(words.shape[1], device=words.device).repeat(len(words), 1)
        states = self.blocks(self.words(words) + self.positions(places))
        scores: Tensor = self.output(states.mean(1))
        return scores
