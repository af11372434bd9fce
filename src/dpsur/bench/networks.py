"""The networks to measure, each with made-up inputs of the right shape."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from dpsur.bench.architectures import (
    ENCODER_LENGTH,
    ENCODER_WORDS,
    IMDB_LENGTH,
    IMDB_WORDS,
    ImdbLstm,
    TransformerEncoder,
    cifar_pixel_cnn,
    cifar_scattering_cnn,
    resnet18,
    scattering_cnn,
)
from dpsur.core.streams import BATCH, INIT, Streams
from dpsur.core.types import Examples
from dpsur.errors import InvalidInputError
from dpsur.tasks.networks import pixel_cnn


@dataclass(frozen=True)
class Network:
    """A network, the shape of one input, and what the inputs are.

    `words` is the size of the vocabulary where inputs are tokens, None where they are real numbers.
    """

    name: str
    summary: str
    parameters: int
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    classes: int = 10
    words: int | None = None

    def model(self, device: torch.device, seed: int = 0) -> nn.Module:
        """A freshly initialised network: the same seed gives every arm the same weights."""
        with Streams(seed, torch.device("cpu")).global_randomness(INIT):
            return self.build().to(device)

    def batch(self, size: int, device: torch.device, seed: int = 0) -> Examples:
        """Made-up records. Speed does not depend on their values, shapes and types are real."""
        generator = Streams(seed, torch.device("cpu"))[BATCH]
        shape = (size, *self.input_shape)
        if self.words is None:
            inputs = torch.randn(shape, generator=generator)
        else:
            inputs = torch.randint(self.words, shape, generator=generator)
        targets = torch.randint(self.classes, (size,), generator=generator)
        return Examples(inputs, targets).to(device)


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
        Network(
            "pixel-cifar", "paper's CNN, CIFAR-10 pixels", 550_570, cifar_pixel_cnn, (3, 32, 32)
        ),
        Network(
            "lstm-imdb", "paper's LSTM, IMDb", 2_021_202, ImdbLstm, (IMDB_LENGTH,), 2, IMDB_WORDS
        ),
        Network("resnet18", "ResNet-18 with GroupNorm", 11_173_962, resnet18, (3, 32, 32)),
        Network(
            "transformer",
            "Transformer encoder, 2 blocks",
            424_194,
            TransformerEncoder,
            (ENCODER_LENGTH,),
            2,
            ENCODER_WORDS,
        ),
    )
}


def network_named(name: str) -> Network:
    """Look a network up by name."""
    try:
        return NETWORKS[name]
    except KeyError:
        known = ", ".join(NETWORKS)
        raise InvalidInputError(f"unknown network {name!r}; choose from {known}") from None
