"""The paper's networks, with its numbers of parameters, beside `pixel_cnn` of the library.

Importing `reproduction` registers them by name, so that runs and releases find them in a checkout.
"""

import torch
from torch import Tensor, nn

from dpsur import checks
from dpsur.networks import ACTIVATIONS, NETWORKS, Activation, build_activation


class TemperedSigmoid(nn.Module):
    """`scale * sigmoid(temperature * x) - offset`, bounded so that gradients stay small.

    Papernot et al., "Tempered sigmoid activations for deep learning with differential privacy"
    (2021). The default (2, 2, 1) is tanh.
    """

    def __init__(self, scale: float = 2.0, temperature: float = 2.0, offset: float = 1.0) -> None:
        super().__init__()
        checks.positive("scale", scale)
        checks.positive("temperature", temperature)
        checks.finite("offset", offset)
        self.scale, self.temperature, self.offset = scale, temperature, offset

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale * torch.sigmoid(self.temperature * inputs) - self.offset

    def extra_repr(self) -> str:
        return f"scale={self.scale}, temperature={self.temperature}, offset={self.offset}"


def cifar_pixel_cnn(classes: int = 10, activation: Activation = "tanh") -> nn.Module:
    """For 32x32 colour images: 550,570 parameters."""
    layers: list[nn.Module] = []
    before = 3
    for width in (32, 64, 128):
        for channels in (before, width):
            layers.append(nn.Conv2d(channels, width, kernel_size=3, padding=1))
            layers.append(build_activation(activation))
        layers.append(nn.MaxPool2d(2))
        before = width
    return nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Linear(128 * 4 * 4, 128),
        build_activation(activation),
        _head(128, classes),
    )


def scattering_cnn(classes: int = 10, activation: Activation = "tanh") -> nn.Module:
    """For scattering features of 28x28 images, 81 channels of 7x7: 33,066 parameters."""
    return nn.Sequential(
        nn.Conv2d(81, 16, kernel_size=3, stride=2, padding=1),
        build_activation(activation),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        build_activation(activation),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        build_activation(activation),
        _head(32, classes),
    )


def cifar_scattering_cnn(classes: int = 10, activation: Activation = "tanh") -> nn.Module:
    """For scattering features of 32x32 colour images, 243 channels of 8x8: 187,210 parameters."""
    return nn.Sequential(
        nn.Conv2d(243, 64, kernel_size=3, padding=1),
        build_activation(activation),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, kernel_size=3, padding=1),
        build_activation(activation),
        nn.Flatten(),
        _head(64 * 4 * 4, classes),
    )


class ImdbLstm(nn.Module):
    """For reviews of 80 tokens: embedding, bidirectional LSTM, mean over all positions.

    2,021,202 parameters. The paper lists layers and no activations; the code released with it has
    one before the LSTM too, which `activation_before_lstm` adds.
    """

    def __init__(
        self,
        classes: int = 2,
        activation: Activation = "tanh",
        words: int = 20_000,
        activation_before_lstm: bool = False,
    ) -> None:
        super().__init__()
        checks.at_least_one("words", words)
        self.embedding = nn.Embedding(words, 100)
        self.narrow = nn.Linear(100, 32)
        self.before_lstm = build_activation(activation) if activation_before_lstm else None
        self.lstm = nn.LSTM(32, 32, batch_first=True, bidirectional=True)
        self.hidden = nn.Linear(64, 16)
        self.activation = build_activation(activation)
        self.output = _head(16, classes)

    def forward(self, words: Tensor) -> Tensor:
        narrow = self.narrow(self.embedding(words))
        states, _ = self.lstm(narrow if self.before_lstm is None else self.before_lstm(narrow))
        scores: Tensor = self.output(self.activation(self.hidden(states.mean(1))))
        return scores


def _head(width: int, classes: int) -> nn.Module:
    checks.at_least_one("classes", classes)
    return nn.Linear(width, classes)


ACTIVATIONS["tempered-sigmoid"] = TemperedSigmoid
NETWORKS |= {
    "cifar-pixel-cnn": cifar_pixel_cnn,
    "scattering-cnn": scattering_cnn,
    "cifar-scattering-cnn": cifar_scattering_cnn,
    "imdb-lstm": ImdbLstm,
}
