"""Networks for your own data, sized by the shape of an input.

Activations by name: those of torch that the paper uses, and the tempered sigmoid.

The paper's networks, with its numbers of parameters.

Every layer has a rule in the gradient engine, and nothing works in place.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.registry import build

Activation = str | Mapping[str, Any]


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


ACTIVATIONS: dict[str, Callable[..., nn.Module]] = {
    "tanh": lambda: nn.Tanh(),
    "relu": lambda: nn.ReLU(),
    "tempered-sigmoid": TemperedSigmoid,
}


def build_activation(description: Activation) -> nn.Module:
    """Build an activation from its name, or from a mapping of its name and parameters."""
    if isinstance(description, str):
        description = {"name": description}
    return build("activation", ACTIVATIONS, description)


LEAST_IMAGE = 8


def linear(inputs: int, classes: int) -> nn.Module:
    """Logistic regression on `inputs` numbers."""
    _check_counts(inputs=inputs, classes=classes)
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))


def linear_head(inputs: int, classes: int) -> nn.Module:
    """Logistic regression without a bias on features of norm 1, from zero weights."""
    _check_counts(inputs=inputs, classes=classes)
    head = nn.Linear(inputs, classes, bias=False)
    nn.init.zeros_(head.weight)
    return nn.Sequential(nn.Flatten(), head)


def linear_features(channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Logistic regression on feature maps."""
    _check_counts(channels=channels, height=height, width=width)
    return linear(channels * height * width, classes)


def mlp(
    inputs: int, hidden: int | Sequence[int], classes: int, activation: Activation = "tanh"
) -> nn.Module:
    """Fully connected layers: `hidden` is the width of the one between, or a list of widths."""
    widths = [hidden] if isinstance(hidden, int) else list(hidden)
    _check_counts(inputs=inputs, classes=classes)
    layers: list[nn.Module] = [nn.Flatten()]
    before = inputs
    for width in widths:
        checks.at_least_one("hidden", width)
        layers += [nn.Linear(before, width), build_activation(activation)]
        before = width
    return nn.Sequential(*layers, nn.Linear(before, classes))


def small_cnn(
    channels: int, height: int, width: int, classes: int, activation: Activation = "tanh"
) -> nn.Module:
    """Two convolutions and two linear layers for images of any size from 8x8."""
    _check_counts(channels=channels, classes=classes)
    for name, size in (("height", height), ("width", width)):
        if size < LEAST_IMAGE:
            raise InvalidInputError(
                f"small-cnn needs images of at least {LEAST_IMAGE}x{LEAST_IMAGE}, got {name} "
                f"{size}; use the network mlp instead"
            )
    # Averages leave 4 to 7 rows and columns of a large image (2 or 3 of the smallest), so that the
    # linear layer does not grow with it.
    quarters = [(size + 3) // 4 for size in (height, width)]
    windows = [max(1, size // 4) for size in quarters]
    rows, columns = (size // window for size, window in zip(quarters, windows, strict=True))
    return nn.Sequential(
        nn.Conv2d(channels, 16, kernel_size=3, stride=2, padding=1),
        build_activation(activation),
        nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1),
        build_activation(activation),
        nn.AvgPool2d((windows[0], windows[1])),
        nn.Flatten(),
        nn.Linear(32 * rows * columns, 32),
        build_activation(activation),
        nn.Linear(32, classes),
    )


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        checks.at_least_one(name, value)


def pixel_cnn(classes: int = 10, activation: Activation = "tanh") -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=8, stride=2, padding=2),
        build_activation(activation),
        nn.MaxPool2d(kernel_size=2, stride=1),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        build_activation(activation),
        nn.MaxPool2d(kernel_size=2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        build_activation(activation),
        _head(32, classes),
    )


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
