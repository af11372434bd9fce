"""Losses and networks that compute something else are told apart, equal ones are not."""

import functools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpsur.runs.checkpoint import loss_identity, model_identity

SCALE = 1.0


def scaled_by(scale):
    return lambda output, target: scale * F.mse_loss(output, target)


def by_a_global(output, target):
    return SCALE * F.mse_loss(output, target)


def through(output, target):
    return by_a_global(output, target)


class Loss:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, output, target):
        return self.scale * F.mse_loss(output, target)

    def method(self, output, target):
        return self(output, target)


class Scaled(nn.Module):
    """The scale does not show in the representation."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.layer, self.scale = nn.Linear(2, 2), scale

    def forward(self, inputs):
        return self.scale * self.layer(inputs)


class Squared(Scaled):
    def forward(self, inputs):
        return self.layer(inputs) ** 2


Scaled.__qualname__ = Squared.__qualname__ = "Same"
Squared.__name__ = Scaled.__name__

LOSSES = [
    lambda: F.cross_entropy,
    lambda: F.mse_loss,
    lambda: scaled_by(1.0),
    lambda: scaled_by(2.0),
    lambda: lambda output, target: F.mse_loss(output, target),
    lambda: lambda output, target: F.l1_loss(output, target),
    lambda: lambda output, target: F.mse_loss(output, target) if "a" in {"a", "b", "c"} else 0,
    lambda: functools.partial(F.cross_entropy, label_smoothing=0.1),
    lambda: functools.partial(F.cross_entropy, label_smoothing=0.2),
    lambda: nn.CrossEntropyLoss(),
    lambda: nn.CrossEntropyLoss(ignore_index=1),
    lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])),
    lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])),
    lambda: Loss(1.0),
    lambda: Loss(2.0),
    lambda: Loss(1.0).method,
    lambda: Loss(2.0).method,
    lambda: through,
]
NETWORKS = [
    lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh()),
    lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
    lambda: nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU(0.1)),
    lambda: nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU(0.2)),
    lambda: Scaled(1.0),
    lambda: Scaled(2.0),
    lambda: Squared(),
    lambda: nn.LSTM(2, 2),
]


@pytest.mark.parametrize(
    ("kinds", "identity"), [(LOSSES, loss_identity), (NETWORKS, model_identity)]
)
def test_each_is_told_from_every_other_and_known_again(kinds, identity):
    found = [identity(make()) for make in kinds]
    assert len(set(found)) == len(kinds)
    assert found == [identity(make()) for make in kinds]  # other weights, other addresses


def test_a_number_that_a_loss_refers_to_counts(monkeypatch):
    before = loss_identity(through)
    monkeypatch.setattr(f"{__name__}.SCALE", 3.0)
    assert loss_identity(through) != before


def test_another_process_finds_the_same():
    code = (
        "from tests.runs.test_identity import *\n"
        "print(*[loss_identity(m()) for m in LOSSES], *[model_identity(m()) for m in NETWORKS])"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
    own = [loss_identity(m()) for m in LOSSES] + [model_identity(m()) for m in NETWORKS]
    assert found == (" ".join(own) + "\n").encode()
