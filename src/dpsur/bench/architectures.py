"""The architectures that only the benchmark needs.

Every weight is in a layer that all arms know, and nothing works in place, so that no arm is ruled
out by an accident of how a network is written.
"""

import torch
from torch import Tensor, nn

IMDB_WORDS, IMDB_LENGTH = 20_000, 80
ENCODER_WORDS, ENCODER_LENGTH, ENCODER_WIDTH = 5_000, 64, 64


def cifar_pixel_cnn() -> nn.Module:
    """The paper's network for 32x32 colour images."""
    layers: list[nn.Module] = []
    before = 3
    for width in (32, 64, 128):
        for channels in (before, width):
            layers += [nn.Conv2d(channels, width, kernel_size=3, padding=1), nn.Tanh()]
        layers.append(nn.MaxPool2d(2))
        before = width
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(128 * 4 * 4, 128), nn.Tanh(), nn.Linear(128, 10)
    )


def scattering_cnn() -> nn.Module:
    """The paper's network on scattering features of 28x28 images."""
    return nn.Sequential(
        nn.Conv2d(81, 16, kernel_size=3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


def cifar_scattering_cnn() -> nn.Module:
    """The paper's network on scattering features of 32x32 colour images."""
    return nn.Sequential(
        nn.Conv2d(243, 64, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


class ImdbLstm(nn.Module):
    """The paper's network for reviews: embedding, bidirectional LSTM, mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(IMDB_WORDS, 100)
        self.narrow = nn.Linear(100, 32)
        self.lstm = nn.LSTM(32, 32, batch_first=True, bidirectional=True)
        self.hidden = nn.Linear(64, 16)
        self.output = nn.Linear(16, 2)

    def forward(self, words: Tensor) -> Tensor:
        """Scores of the two classes."""
        states, _ = self.lstm(self.narrow(self.embedding(words)))
        hidden: Tensor = self.output(torch.relu(self.hidden(states.mean(1))))
        return hidden


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
