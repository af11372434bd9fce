"""What is said against a model before training, and what needs no check: mixing records."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpsur.errors import UnsupportedModelError
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.networks import pixel_cnn
from dpsur.per_example import check_model, clipped_sum
from reproduction.networks import scattering_cnn
from tests.per_example.test_gradient_rules import (
    DROPOUT,
    MODELS,
    assert_same,
    clipped,
    gradients,
)

# torch says so when it has to copy for "same" padding, or has no fast kernel for a test's layer
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'", "ignore:LSTM with proj")
ACCEPTED = MODELS | {f"dropout in {name}": made for name, made in DROPOUT.items()}


@pytest.mark.parametrize("name", ACCEPTED)
def test_good_models_are_accepted(name):
    build, inputs = ACCEPTED[name]
    torch.manual_seed(0)
    assert check_model(build(), Examples(inputs[:1], torch.zeros(1))).dim() == 2


@pytest.mark.parametrize(
    ("build", "shape"), [(pixel_cnn, (1, 28, 28)), (scattering_cnn, (81, 7, 7))]
)
def test_the_networks_of_the_paper_are_accepted(build, shape):
    torch.manual_seed(0)
    outputs = check_model(build(), Examples(torch.zeros(1, *shape), torch.zeros(1)))
    assert outputs.shape == (2, 10)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.lift(x)))


class Overwrites(Network):
    def forward(self, x):
        return super().forward(x.mul_(2.0))


class NormalisesData(Network):
    """Through `.data` again, and the second time nothing changes any more."""

    def forward(self, x):
        x.data.div_(x.data.norm(dim=1, keepdim=True)).mul_(100.0)
        return super().forward(x)


class AlwaysDropping(Network):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.2))


REFUSED = {
    Overwrites: "overwrites its inputs",
    NormalisesData: "overwrites its inputs",
    AlwaysDropping: "draws random numbers in evaluation mode",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_with_side_effects_are_refused(kind):
    records = Examples(torch.randn(3, 4), torch.zeros(3, dtype=torch.int64))
    check_model(Network(), records)
    with pytest.raises(UnsupportedModelError, match=REFUSED[kind]) as caught:
        check_model(kind(), records)
    assert "\n" not in str(caught.value)


class Text(nn.Module):
    """A model of texts that reads on through their padding, as far as the batch is long."""

    pad = 5

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(40, 8), nn.Linear(8, 2)
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, words):
        return self.head(self.read(words))

    def read(self, words):
        return self.lstm(self.table(words))[0][:, -1]

    def lengths(self, words):
        return (words != self.pad).sum(1)


class Trimmed(Text):
    def read(self, words):
        return super().read(words[:, : int(self.lengths(words).max())])


class TrimmedByALiteral(Trimmed):
    def lengths(self, words):
        return torch.tensor([sum(word != 5 for word in text) for text in words.tolist()])


class TrimmedColumns(Text):
    """As `torch.unique_consecutive` and the like do: columns that say nothing are dropped."""

    def read(self, words):
        return super().read(words[:, (words != self.pad).any(0)])


class AveragedToLongest(Text):
    def read(self, words):
        inside = torch.arange(words.shape[1]) < self.lengths(words).max()
        return (self.table(words) * inside.unsqueeze(1)).sum(1) / inside.sum()


class Packed(Text):
    """The packed texts of a batch are read up to their own ends."""

    def read(self, words):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.table(words), self.lengths(words), batch_first=True, enforce_sorted=False
        )
        return self.lstm(packed)[1][0][-1]


def texts():
    """Of different lengths, filled up with the word 5."""
    words = torch.randint(6, 40, (6, 12), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([12, 3, 5, 1, 8, 12])
    words[torch.arange(12) >= lengths.unsqueeze(1)] = 5
    return Examples(words, torch.arange(6) % 2)


@pytest.mark.parametrize("kind", [Text, Trimmed, TrimmedByALiteral, TrimmedColumns, Packed])
def test_texts_are_read_as_if_each_were_alone(kind):
    """Of many lengths, without a probe: a text cannot see how long others are."""
    torch.manual_seed(0)
    problem = Problem(kind().double(), F.cross_entropy, texts())
    params = problem.initial_params()
    check_model(problem.model, problem.train)
    for bound in (0.05, 1e6):
        ours = clipped_sum(problem, params, problem.train, bound).params
        assert_same(ours, clipped(gradients(problem, params, problem.train), bound), 1e-9)


@pytest.mark.parametrize("kind", [Trimmed, TrimmedColumns, AveragedToLongest])
def test_a_longer_text_moves_the_sum_by_no_more_than_the_bound(kind):
    """It would change what is read of all others: trimmed, they end before their padding."""
    torch.manual_seed(0)
    train = texts()
    short = train.inputs.clone()
    short[:, 5:] = 5
    both = short.clone()
    both[0] = train.inputs[0]
    problem = Problem(kind().double(), F.cross_entropy, train)
    params, bound = problem.initial_params(), 0.02
    more = clipped_sum(problem, params, Examples(both, train.targets), bound).params
    fewer = clipped_sum(problem, params, Examples(short[1:], train.targets[1:]), bound).params
    gap = torch.cat([(more[name] - fewer[name]).flatten() for name in fewer]).norm()
    assert float(gap) <= bound * (1 + 1e-9)
    with torch.no_grad():  # the control: as a batch they do meet
        assert not torch.allclose(problem.model(both)[1:], problem.model(short[1:]), atol=1e-6)
