"""Models that mix or remember records are found on made-up ones; others are let through."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpsur.core.gradients import check_model, probe
from dpsur.core.types import Examples
from dpsur.errors import UnsupportedModelError
from dpsur.tasks.networks import pixel_cnn, scattering_cnn
from tests.core.test_gradient_rules import DROPOUT, MODELS

# torch says so when it has to copy for "same" padding, or has no fast kernel for a test's layer
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'", "ignore:LSTM with proj")


class Network(nn.Module):
    """Two layers, and something in between that concerns the whole batch."""

    def __init__(self):
        super().__init__()
        self.lift, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.between(torch.tanh(self.lift(x))))

    def between(self, x):
        return x


class Mixup(Network):
    def between(self, x):
        return 0.5 * x + 0.5 * x[torch.randperm(len(x))] if self.training else x


class Experts(Network):
    """Every record goes to one expert, and an expert takes a limited number of records."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def between(self, x):
        chosen = self.router(x).argmax(1)
        capacity = max(4, math.ceil(1.25 * len(x) / len(self.experts)))
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            ours = chosen == number
            taken = ours & (ours.cumsum(0) <= capacity)
            total = total + taken.unsqueeze(1) * torch.tanh(expert(x))
        return total


class NoisyExperts(Experts):
    def between(self, x):
        return F.dropout(super().between(x), 0.1, self.training)


class LargestOfBatch(Network):
    def forward(self, x):
        hidden = torch.relu(self.lift(x))
        return self.head(hidden / hidden.detach().max().clamp(min=5.0))


class Pixels(Network):
    def forward(self, x):
        return super().forward(x / 255 if x.max() > 10 else x)


class SmallPixels(Network):
    def forward(self, x):
        return super().forward(x if x.abs().max() > 1 else 255 * x)


class CentresManyRecords(Network):
    def between(self, x):
        return x - x.mean(0) if len(x) >= 8 else x


class HiddenByZeros(Network):
    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.head.weight)

    def between(self, x):
        return x - x.mean(0)


class ClosedGate(Network):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def between(self, x):
        return x + self.gate * x.mean(0)


class Sometimes(Network):
    def between(self, x):
        return 0.5 * x + 0.5 * x.flip(0) if self.training and torch.rand(()) < 0.3 else x


class Remembers(Network):
    """Neither a buffer nor a parameter."""

    def __init__(self):
        super().__init__()
        self.centre = torch.zeros(8)

    def between(self, x):
        if self.training:
            self.centre = 0.9999 * self.centre + 0.0001 * x.detach().mean(0)
        return x - self.centre


class WritesData(Network):
    """Through `.data`, which counts as no change."""

    def __init__(self):
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(8), requires_grad=False)

    def between(self, x):
        self.seen.data.add_(1e-9 * x.detach().sum(0))
        return x + 0 * self.seen


class Overwrites(Network):
    def forward(self, x):
        return super().forward(x.mul_(2.0))


class OverwritesLargeOnes(Network):
    def forward(self, x):
        return super().forward(x.clamp_(-1e6, 1e6))


class NormalisesData(Network):
    """Through `.data` again, and the second time nothing changes any more."""

    def forward(self, x):
        x.data.div_(x.data.norm(dim=1, keepdim=True)).mul_(100.0)
        return super().forward(x)


COMPANY, MEMORY = "other company in the batch", "after it has seen others"
REFUSED = {
    Mixup: COMPANY,
    Experts: COMPANY,
    NoisyExperts: COMPANY,
    LargestOfBatch: COMPANY,
    Pixels: COMPANY,
    SmallPixels: COMPANY,
    CentresManyRecords: COMPANY,
    HiddenByZeros: COMPANY,
    ClosedGate: COMPANY,
    Sometimes: COMPANY,
    Remembers: MEMORY,
    WritesData: "parameter seen changes during a forward pass",
    Overwrites: "overwrites its inputs",
    OverwritesLargeOnes: "overwrites its inputs",
    NormalisesData: "overwrites its inputs",
}
RECORDS = Examples(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64))


def verdict(kind, seed=0):
    torch.manual_seed(seed)
    try:
        check_model(kind(), RECORDS)
    except UnsupportedModelError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_mix_or_remember_records_are_refused(kind, seed):
    assert REFUSED[kind] in verdict(kind, seed)


def test_the_network_that_they_are_made_of_is_accepted():
    assert verdict(Network) == "accepted"


WEAKER = {
    "few records": ({"_ROWS": 3, "_LEAST_ROWS": 3}, CentresManyRecords),
    "one size": ({"_SIZES": (1.0,)}, Pixels),
    "the weights as they are": ({"_PERTURBATION": 0.0}, ClosedGate),
    "one draw": ({"_DRAWS": 1}, Sometimes),
    "not again": ({"_again": lambda *_: None}, Remembers),
    "inputs that are not compared": ({"same_bits": lambda *_: True}, NormalisesData),
}


@pytest.mark.parametrize("what", WEAKER)
def test_a_weaker_probe_lets_them_through(what, monkeypatch):
    """The controls: each part of the probe finds something that the others miss."""
    changes, kind = WEAKER[what]
    for name, value in changes.items():
        monkeypatch.setattr(probe, name, value)
    assert verdict(kind) == "accepted"


ACCEPTED = MODELS | {f"dropout in {name}": made for name, made in DROPOUT.items()}


@pytest.mark.parametrize("name", ACCEPTED)
def test_models_that_treat_records_alone_are_accepted(name):
    build, inputs = ACCEPTED[name]
    torch.manual_seed(0)
    assert check_model(build(), Examples(inputs[:1], torch.zeros(1))).dim() == 2


@pytest.mark.parametrize(
    ("build", "shape"), [(pixel_cnn, (1, 28, 28)), (scattering_cnn, (81, 7, 7))]
)
def test_the_networks_of_the_paper_are_accepted(build, shape):
    torch.manual_seed(0)
    assert len(check_model(build(), Examples(torch.zeros(1, *shape), torch.zeros(1)))) == 64


class AlwaysDropping(nn.Linear):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.2))


def test_a_model_that_draws_in_evaluation_mode_is_refused():
    with pytest.raises(UnsupportedModelError, match="draws random numbers in evaluation mode"):
        check_model(AlwaysDropping(3, 2), Examples(torch.zeros(1, 3), torch.zeros(1)))


class TimeFirst(nn.Module):
    """As many times as there are records: they must not be taken for records."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return self.head(self.drop(self.layer(x.transpose(0, 1))).mean(0))


@pytest.mark.parametrize("times", [1, 2, 8, 15, 16, 32, 64])
def test_times_are_not_taken_for_records(times):
    check_model(TimeFirst(), Examples(torch.zeros(1, times, 3), torch.zeros(1)))


def test_large_records_are_tried_in_small_numbers():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 2**18, 2))
    outputs = check_model(model, Examples(torch.zeros(1, 3, 2**9, 2**9), torch.zeros(1)))
    assert len(outputs) == 8
