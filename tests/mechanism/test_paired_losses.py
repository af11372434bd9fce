"""Both losses of a test in one evaluation: the same losses, and the same verdicts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.mechanism import gate as pairs
from dpsur.mechanism.loop import make_trial, start
from dpsur.mechanism.streams import Streams
from dpsur.methods import Dpsur
from dpsur.privacy.budget import Budget
from tests.conftest import blobs, small_model

CPU = torch.device("cpu")


@pytest.fixture
def stacked(monkeypatch):
    monkeypatch.setattr(pairs, "stacking_pays", lambda *_: True)


def images():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(6, 3),
    )
    examples = Examples(torch.randn(9, 2, 8, 8), torch.randint(0, 3, (9,)))
    return Problem(model, F.cross_entropy, examples)


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0].mean(1))


def sequences():
    torch.manual_seed(0)
    examples = Examples(torch.randn(9, 5, 2), torch.randint(0, 3, (9,)))
    return Problem(Sequence(), F.cross_entropy, examples)


@pytest.mark.parametrize(("make", "stacks"), [(images, True), (sequences, False)])
@pytest.mark.parametrize("rows", [4, 2048])
def test_one_evaluation_gives_what_two_give(stacked, monkeypatch, make, stacks, rows):
    monkeypatch.setattr(pairs, "EVALUATION_ROWS", rows)
    problem = make()
    one = problem.initial_params()
    other = {name: value + 0.1 * torch.randn_like(value) for name, value in one.items()}
    assert pairs.can_be_stacked(problem, one, problem.train.inputs) is stacks
    losses = pairs.paired_losses(problem, one, other, problem.train)
    for found, params in zip(losses, (one, other), strict=True):
        torch.testing.assert_close(found, problem.losses(params, problem.train))


def test_a_model_that_mixes_both_sets_of_weights_is_evaluated_twice(monkeypatch):
    problem = images()
    params = problem.initial_params()
    wrong = problem.outputs(params, problem.train.inputs[:3]) * 1.01
    monkeypatch.setattr(pairs, "stacked_outputs", lambda *_: torch.stack([wrong, wrong]))
    assert not pairs.can_be_stacked(problem, params, problem.train.inputs)


def test_only_layers_whose_weights_stack_for_nothing_are_stacked(monkeypatch):
    plain = Problem(small_model(), F.cross_entropy, blobs(9))
    assert not pairs.stacking_pays(plain, plain.train.inputs)
    monkeypatch.setattr(pairs, "PAYS_ON", ("cpu",))
    assert pairs.stacking_pays(plain, plain.train.inputs)
    for other in (images(), sequences()):
        assert not pairs.stacking_pays(other, other.train.inputs)


def verdicts():
    method = Dpsur(updates=40, noise_multiplier=20.0, batch_size=20, accept_ratio=1.5)
    problem = Problem(small_model(), F.cross_entropy, blobs(200))
    settled, plan = method.settle(200, Budget(3.0, 1e-4), "proven")
    procedure, streams = settled.bind(problem, plan), Streams(4, CPU)
    progress, found = start(procedure), []
    for _ in range(40):
        progress, verdict = make_trial(procedure, plan, streams, progress)
        found.append(bool(verdict.accept))
    return found


def test_the_same_trials_are_accepted(monkeypatch):
    apart = verdicts()
    monkeypatch.setattr(pairs, "PAYS_ON", ("cpu",))
    assert verdicts() == apart
    assert 0 < sum(apart) < 40
