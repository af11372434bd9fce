"""The networks to measure, each with made-up inputs of the right shape."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from dpsur.bench.architectures import (
    ENCODER_LENGTH,
    ENCODER_WORDS,
    TransformerEncoder,
    resnet18,
    widened_cnn,
)
from dpsur.core.streams import BATCH, INIT, Streams
from dpsur.core.types import Examples
from dpsur.errors import InvalidInputError
from dpsur.tasks.imdb import LENGTH as IMDB_LENGTH
from dpsur.tasks.imdb import VOCABULARY as IMDB_WORDS
from dpsur.tasks.networks import (
    ImdbLstm,
    cifar_pixel_cnn,
    cifar_scattering_cnn,
    pixel_cnn,
    scattering_cnn,
)

IMAGE = (3, 32, 32)


@dataclass(frozen=True)
class Network:
    """A network, the shape of one input, and what the inputs are.

    `words` is the size of the vocabulary where inputs are tokens, None where they are real numbers.
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


def network_named(name: str) -> Network:
    """Look a network up by name."""
    try:
        return NETWORKS[name]
    except KeyError:
        known = ", ".join(NETWORKS)
        raise InvalidInputError(f"unknown network {name!r}; choose from {known}") from None
