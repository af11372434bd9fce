"""Per-example gradients and epsilons beside those of Opacus, an independent implementation."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpsur

opacus = pytest.importorskip("opacus", reason="needs the extra dev: opacus")
from opacus.accountants import PRVAccountant  # noqa: E402
from opacus.grad_sample import GradSampleModule  # noqa: E402
from opacus.layers import DPGRU, DPLSTM, DPRNN  # noqa: E402

ROWS = 5


class Pooled(nn.Module):
    """Tokens, an embedding, a mean and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 6), nn.Linear(6, 3)

    def forward(self, tokens):
        return self.head(self.table(tokens).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind) -> None:
        super().__init__()
        self.lstm, self.head = kind(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, sequences):
        return self.head(self.lstm(sequences)[0][:, -1])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.norm, self.head = nn.GroupNorm(1, 2), nn.Linear(72, 3)

    def forward(self, images):
        return self.head((images + self.second(self.norm(self.first(images)).relu())).flatten(1))


def image(*shape):
    return torch.randn(ROWS, *shape, dtype=torch.float64)


def tokens():
    return torch.randint(0, 20, (ROWS, 7))


ARCHITECTURES = {
    "linear": (lambda: nn.Linear(6, 3), lambda: image(6)),
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), lambda: image(6)),
    "no bias": (lambda: nn.Linear(6, 3, bias=False), lambda: image(6)),
    "sequence": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Flatten(), nn.Linear(20, 3)),
        lambda: image(5, 6),
    ),
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)),
        lambda: image(3, 8),
    ),
    "conv2d": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
        ),
        lambda: image(2, 8, 8),
    ),
    "grouped": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Flatten(), nn.Linear(128, 3)),
        lambda: image(4, 6, 6),
    ),
    "depthwise": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Flatten(), nn.Linear(64, 3)),
        lambda: image(4, 6, 6),
    ),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(2, 3, 2), nn.Flatten(), nn.Linear(24, 3)),
        lambda: image(2, 3, 3, 3),
    ),
    "group norm": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
        ),
        lambda: image(2, 6, 6),
    ),
    "instance norm": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Flatten(), nn.Linear(64, 3)
        ),
        lambda: image(2, 6, 6),
    ),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)),
        lambda: image(6),
    ),
    "embedding": (Pooled, tokens),
    "lstm": (lambda: Recurrent(DPLSTM), lambda: image(6, 4)),
    "gru": (lambda: Recurrent(DPGRU), lambda: image(6, 4)),
    "rnn": (lambda: Recurrent(DPRNN), lambda: image(6, 4)),
    "rms norm": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8), nn.SiLU(), nn.Linear(8, 3)),
        lambda: image(6),
    ),
    "dilated": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, dilation=2), nn.Flatten(), nn.Linear(12, 3)),
        lambda: image(2, 6, 6),
    ),
    "residual": (Residual, lambda: image(2, 6, 6)),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 5, 2, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),
            nn.Conv2d(4, 6, 3, bias=False),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(54, 8),
            nn.Dropout(0.0),
            nn.Linear(8, 3),
        ),
        lambda: image(1, 14, 14),
    ),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_per_example_gradients_are_those_of_opacus(name):
    build, draw = ARCHITECTURES[name]
    torch.manual_seed(0)
    model, inputs, targets = build().double(), draw(), torch.arange(ROWS) % 3
    ours = dpsur.per_example_gradients(model, F.cross_entropy, inputs, targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = GradSampleModule(model, loss_reduction="sum")
        F.cross_entropy(peer(inputs), targets, reduction="sum").backward()
    found = {n.removeprefix("_module."): p.grad_sample for n, p in peer.named_parameters()}
    norm = torch.cat([value.flatten(1) for value in found.values()], 1).norm(dim=1)
    assert found.keys() == ours.keys()
    for parameter, value in found.items():
        gap = (ours[parameter] - value).flatten(1).norm(dim=1)
        assert bool((gap <= 1e-9 * norm).all()), parameter


@pytest.mark.parametrize(
    ("rate", "noise", "steps"), [(0.01, 1.0, 1000), (0.068, 7.5, 600), (0.13, 15.0, 600)]
)
def test_epsilon_is_at_most_that_of_opacus_and_one_percent(rate, noise, steps):
    """PRV accounting of the same steps: both are nearly exact, ours is an upper bound."""
    ledger = dpsur.Account.without_limit(delta=1e-5)
    for _ in range(steps):
        ledger.charge(dpsur.SampledGaussian(rate, noise))
    peer = PRVAccountant()
    peer.history = [(noise, rate, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its choice of orders
        theirs = peer.get_epsilon(delta=1e-5)
    ours = ledger.get_epsilon(1e-5)
    assert 0.98 * theirs <= ours <= 1.01 * theirs
