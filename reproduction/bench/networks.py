"""The networks to measure, each with synthetic inputs of the right shape.

The paper's are those of the tasks; the others are written here. Every weight is in a layer that all
arms know, and nothing works in place, so that no arm is ruled out by how a network is written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur.errors import InvalidInputError
from dpsur.functional.records import Examples
from dpsur.mechanism.streams import INIT, SETUP, Streams
from dpsur.networks import pixel_cnn
from reproduction.bench.arms import ARMS as ARMS  # registers them wherever networks are found
from reproduction.networks import (
    ImdbLstm,
    cifar_pixel_cnn,
    cifar_scattering_cnn,
    scattering_cnn,
)
from reproduction.tasks.imdb import LENGTH as IMDB_LENGTH
from reproduction.tasks.imdb import VOCABULARY as IMDB_WORDS

ENCODER_WORDS, ENCODER_LENGTH, ENCODER_WIDTH = 5_000, 64, 64
GPT_WORDS, GPT_LENGTH = 50_257, 256


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


class WideBlock(nn.Module):
    """Two 3x3 convolutions, each behind a GroupNorm, around a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.GroupNorm(16, before)
        self.inner = nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False)
        self.second = nn.GroupNorm(16, width)
        self.outer = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.shortcut = nn.Conv2d(before, width, 1, stride=stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Body plus shortcut, which sees the activated input where it is a convolution."""
        seen = torch.relu(self.first(images))
        body: Tensor = self.outer(torch.relu(self.second(self.inner(seen))))
        kept = images if isinstance(self.shortcut, nn.Identity) else self.shortcut(seen)
        return body + kept


def wide_resnet(depth: int = 16, factor: int = 4) -> nn.Module:
    """WRN with GroupNorm, the network of most work on private image classification."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    before = 16
    for width, stride in ((16 * factor, 1), (32 * factor, 2), (64 * factor, 2)):
        for block in range((depth - 4) // 6):
            layers.append(WideBlock(before, width, stride if block == 0 else 1))
            before = width
    layers += [nn.GroupNorm(16, before), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(before, 10))


def perceptron(width: int = 1_024) -> nn.Module:
    """Three linear layers."""
    return nn.Sequential(
        nn.Linear(512, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 100)
    )


class TokenClassifier(nn.Module):
    """PyTorch's own encoder over tokens."""

    def __init__(self, width: int = 192, depth: int = 6, length: int = 128) -> None:
        super().__init__()
        self.words = nn.Embedding(ENCODER_WORDS, width)
        self.positions = nn.Parameter(0.02 * torch.randn(1, length, width))
        layer = nn.TransformerEncoderLayer(
            width,
            nhead=width // 32,
            dim_feedforward=4 * width,
            dropout=0.0,
            batch_first=True,
            norm_first=True,
            activation="gelu",
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, words: Tensor) -> Tensor:
        """Scores of the classes, from the mean over positions."""
        states = self.encoder(self.words(words) + self.positions)
        scores: Tensor = self.output(self.norm(states).mean(1))
        return scores


class LowRank(nn.Module):
    """A frozen linear layer and a trained product of two thin ones (LoRA)."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.frozen = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """The sum of both."""
        moved: Tensor = self.frozen(states) + self.up(self.down(states))
        return moved


class GptBlock(nn.Module):
    """Causal attention and a perceptron, each behind a LayerNorm, as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed: nn.Module = nn.Linear(width, 3 * width)
        self.joined: nn.Module = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, states: Tensor) -> Tensor:
        """Two residual steps."""
        rows, length, width = states.shape
        parts = self.mixed(self.first(states)).view(rows, length, 3, self.heads, -1)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        states = states + self.joined(seen.transpose(1, 2).reshape(rows, length, width))
        moved: Tensor = states + self.mlp(self.second(states))
        return moved


def next_word_loss(scores: Tensor, words: Tensor) -> Tensor:
    """Mean cross entropy over positions."""
    return F.cross_entropy(scores.flatten(0, 1), words.flatten())


class Gpt(nn.Module):
    """A language model of GPT-2's shape."""

    def __init__(
        self,
        depth: int = 12,
        width: int = 768,
        words: int = GPT_WORDS,
        *,
        tied: bool = False,
        length: int = GPT_LENGTH,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(GptBlock(width, width // 64) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        """Scores of the next token at every position."""
        places = torch.arange(words.shape[1], device=words.device).repeat(len(words), 1)
        states = self.blocks(self.words(words) + self.positions(places))
        scores: Tensor = self.head(self.norm(states))
        return scores


def gpt_lora(
    depth: int = 12, width: int = 768, words: int = GPT_WORDS, *, length: int = GPT_LENGTH
) -> nn.Module:
    """The same with all weights frozen but products of rank 8 beside attention's projections."""
    model = Gpt(depth, width, words, length=length)
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("mixed", "joined"):
            setattr(block, name, LowRank(getattr(block, name)))
    return model


class LstmClassifier(nn.Module):
    """Words, one LSTM layer, and the mean of its states."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.words = nn.Embedding(ENCODER_WORDS, 128)
        self.lstm = nn.LSTM(128, width, batch_first=True)
        self.output = nn.Linear(width, 2)

    def forward(self, words: Tensor) -> Tensor:
        """Scores of the two classes."""
        scores: Tensor = self.output(self.lstm(self.words(words))[0].mean(1))
        return scores


IMAGE = (3, 32, 32)


@dataclass(frozen=True)
class Network:
    """A network, the shape of one input, and what the inputs are.

    `words` is the size of the vocabulary where inputs are tokens, None where they are real numbers.
    With `labelled_positions` every position of an input has a label: the next word.
    Networks of a `series` differ in their width alone, to show growth with the parameters.
    """

    name: str
    summary: str
    parameters: int
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    classes: int = 10
    words: int | None = None
    series: bool = False
    labelled_positions: bool = False
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy

    def model(self, device: torch.device, seed: int = 0) -> nn.Module:
        """A freshly initialised network: the same seed gives every arm the same weights."""
        with Streams(seed, torch.device("cpu")).at(SETUP).global_randomness(INIT):
            return self.build().to(device)

    def batch(self, size: int, device: torch.device, seed: int = 0) -> Examples:
        """Made-up records. Speed does not depend on their values, shapes and types are real."""
        generator = torch.Generator().manual_seed(seed)
        shape = (size, *self.input_shape)
        if self.words is None:
            inputs = torch.randn(shape, generator=generator)
        else:
            inputs = torch.randint(self.words, shape, generator=generator)
        labelled = shape if self.labelled_positions else (size,)
        targets = torch.randint(self.classes, labelled, generator=generator)
        return Examples(inputs, targets).to(device)


# First width of a CNN, and the parameters it then has: about four times as many with every step.
WIDTHS = {8: 34_930, 16: 138_330, 32: 550_570, 64: 2_196_810, 128: 8_776_330}
NETWORKS: dict[str, Network] = {
    network.name: network
    for network in (
        Network("pixel-28", "paper's CNN, 28x28 pixels", 26_010, pixel_cnn, (1, 28, 28)),
        Network("scattering-28", "paper's CNN, scattering", 33_066, scattering_cnn, (81, 7, 7)),
        Network(
            "scattering-cifar",
            "paper's CNN, CIFAR-10 scattering",
            187_210,
            cifar_scattering_cnn,
            (243, 8, 8),
        ),
        Network("pixel-cifar", "paper's CNN, CIFAR-10 pixels", 550_570, cifar_pixel_cnn, IMAGE),
        Network(
            "lstm-imdb",
            "paper's LSTM, IMDb",
            2_021_202,
            partial(ImdbLstm, activation="relu"),
            (IMDB_LENGTH,),
            2,
            IMDB_WORDS,
        ),
        Network("resnet18", "ResNet-18 with GroupNorm", 11_173_962, resnet18, IMAGE),
        Network(
            "transformer",
            "Transformer encoder, 2 blocks",
            424_194,
            TransformerEncoder,
            (ENCODER_LENGTH,),
            2,
            ENCODER_WORDS,
        ),
        *(
            Network(
                f"cnn-{width}",
                f"CNN of width {width}, 32x32 colour images",
                parameters,
                partial(widened_cnn, width),
                IMAGE,
                series=True,
            )
            for width, parameters in WIDTHS.items()
        ),
    )
}

# Networks that people train, for `bench-networks`.
COMMON: dict[str, Network] = {
    network.name: network
    for network in (
        Network("wrn-16-4", "WRN-16-4 with GroupNorm", 2_748_890, wide_resnet, IMAGE),
        Network(
            "resnet18-64", "ResNet-18 with GroupNorm, 64x64", 11_173_962, resnet18, (3, 64, 64)
        ),
        Network(
            "encoder-192x6",
            "Transformer encoder, 6 blocks of width 192",
            3_656_074,
            TokenClassifier,
            (128,),
            10,
            ENCODER_WORDS,
        ),
        *(
            Network(
                name,
                summary,
                parameters,
                build,
                (GPT_LENGTH,),
                GPT_WORDS,
                GPT_WORDS,
                labelled_positions=True,
                loss=next_word_loss,
            )
            for name, summary, parameters, build in (
                ("gpt2", "GPT-2 shaped, 12 blocks of width 768", 162_447_360, Gpt),
                ("gpt2-tied", "the same with tied embedding", 123_849_984, partial(Gpt, tied=True)),
                ("gpt2-lora", "the same with LoRA of rank 8", 442_368, gpt_lora),
            )
        ),
        Network("mlp", "perceptron of 1.7M parameters", 1_677_412, perceptron, (512,), 100),
        Network(
            "lstm-256",
            "LSTM of width 256, 128 steps",
            1_035_778,
            LstmClassifier,
            (128,),
            2,
            ENCODER_WORDS,
        ),
    )
}


def network_named(name: str) -> Network:
    """Look a network up by name."""
    from reproduction.bench.families import FAMILIES

    every = NETWORKS | COMMON | FAMILIES
    try:
        return every[name]
    except KeyError:
        known = ", ".join(every)
        raise InvalidInputError(f"unknown network {name!r}; choose from {known}") from None
