"""Models that mix or remember records are found on made-up ones; others are let through."""

import math
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpsur.errors import UnsupportedModelError
from dpsur.functional.records import Examples
from dpsur.networks import pixel_cnn, scattering_cnn
from dpsur.per_example import check_model
from dpsur.per_example import mixing_check as probe
from tests.per_example.test_gradient_rules import DROPOUT, MODELS

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
    """In a place that nobody looks at: an attribute would be found by its name."""

    def __init__(self):
        super().__init__()
        self.held = threading.local()

    def between(self, x):
        centre = getattr(self.held, "centre", torch.zeros(8))
        if self.training:
            self.held.centre = 0.9999 * centre + 0.0001 * x.detach().mean(0)
        return x - centre

    def __deepcopy__(self, memo):
        return type(self)()


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


OTHERS, MEMORY = "when other examples are in the batch", "after it has seen others"
REFUSED = {
    Mixup: OTHERS,
    Experts: OTHERS,
    NoisyExperts: OTHERS,
    LargestOfBatch: OTHERS,
    Pixels: OTHERS,
    SmallPixels: OTHERS,
    CentresManyRecords: OTHERS,
    HiddenByZeros: OTHERS,
    ClosedGate: OTHERS,
    Sometimes: OTHERS,
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


PAD = 11


class Text(nn.Module):
    """A model of texts that is fine: every text is as long as the others."""

    pad = 5

    def __init__(self, words=40):
        super().__init__()
        self.table, self.drop = nn.Embedding(words, 8), nn.Dropout(0.1)
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, words):
        return self.head(self.read(words))

    def read(self, words):
        return self.drop(self.lstm(self.table(words))[0][:, -1])

    def lengths(self, words):
        return (words != self.pad).sum(1)


class Trimmed(Text):
    """Cuts the batch to its longest text and reads on through the padding of the others."""

    def read(self, words):
        return super().read(words[:, : int(self.lengths(words).max())])


class TrimmedByAGlobal(Trimmed):
    def lengths(self, words):
        return (words != PAD).sum(1)


class TrimmedByALiteral(Trimmed):
    def lengths(self, words):
        return torch.tensor([sum(word != 17 for word in text) for text in words.tolist()])


class TrimmedByTheLastWord(Trimmed):
    def lengths(self, words):
        return (words != self.table.num_embeddings - 1).sum(1)


class TrimmedByATensor(Trimmed):
    def __init__(self):
        super().__init__()
        self.register_buffer("empty", torch.tensor([23]))

    def lengths(self, words):
        return (~torch.isin(words, self.empty)).sum(1)


class TrimmedFromTheLeft(Trimmed):
    def read(self, words):
        return Text.read(self, words[:, -int(self.lengths(words).max()) :])


class TrimmedInTraining(Trimmed):
    def read(self, words):
        return super().read(words) if self.training else Text.read(self, words)


class TrimmedColumns(Trimmed):
    """As `torch.unique_consecutive` and the like do: columns that say nothing are dropped."""

    def read(self, words):
        return Text.read(self, words[:, (words != self.pad).any(0)])


class AveragedToLongest(Text):
    """The mean over the longest text of the batch."""

    def read(self, words):
        longest = int(self.lengths(words).max())
        return self.table(words)[:, :longest].mean(1)


class OfWhatRepeats(Trimmed):
    """Takes the last word of a text for its padding."""

    def lengths(self, words):
        return (words != words[:, -1:]).sum(1) + 1


class Masked(Text):
    """The remedy: every text is read up to its own end."""

    def read(self, words):
        ends = self.lengths(words).clamp(min=1) - 1
        states = self.lstm(self.table(words))[0]
        return self.drop(states[torch.arange(len(words)), ends])


class Packed(Text):
    """Another: the packed texts of a batch are read up to their own ends."""

    def read(self, words):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.table(words), self.lengths(words), batch_first=True, enforce_sorted=False
        )
        return self.drop(self.lstm(packed)[1][0][-1])


TEXTS = Examples(torch.zeros(1, 12, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(
    "kind",
    [
        Trimmed,
        TrimmedByAGlobal,
        TrimmedByALiteral,
        TrimmedByTheLastWord,
        TrimmedByATensor,
        TrimmedFromTheLeft,
        TrimmedInTraining,
        TrimmedColumns,
        AveragedToLongest,
        OfWhatRepeats,
    ],
)
def test_a_model_that_trims_to_the_longest_text_is_refused(kind):
    with pytest.raises(UnsupportedModelError, match=OTHERS) as caught:
        check_model(kind(), TEXTS)
    assert "\n" not in str(caught.value)
    assert "own end" in str(caught.value) or kind is OfWhatRepeats


@pytest.mark.parametrize("kind", [Text, Masked, Packed])
def test_a_model_that_reads_every_text_to_its_own_end_is_accepted(kind):
    assert check_model(kind(), TEXTS).shape == (64, 2)


class TrimmedSeries(nn.Module):
    """The same for series of numbers that are filled up with zeros."""

    filling = 0.0

    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x):
        lengths = (x != self.filling).any(2).sum(1)
        return self.head(self.gru(x[:, : int(lengths.max())])[0][:, -1])


class TrimmedAtMinusOne(TrimmedSeries):
    filling = -1.0


@pytest.mark.parametrize("kind", [TrimmedSeries, TrimmedAtMinusOne])
def test_a_model_that_trims_series_of_numbers_is_refused(kind):
    with pytest.raises(UnsupportedModelError, match=OTHERS):
        check_model(kind(), Examples(torch.zeros(1, 9, 3), torch.zeros(1)))


def test_padding_is_not_tried_beyond_the_table():
    """On a GPU a number without a row ends the process."""
    model = Trimmed(words=4)
    model.pad = 7
    check_model(model, TEXTS)
