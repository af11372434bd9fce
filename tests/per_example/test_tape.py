"""A tape of a forward pass, a loss and a backward pass that the caller makes."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpsur.functional.problem import Objective
from dpsur.per_example.api import per_example_gradients
from dpsur.per_example.clipping import strategy_for
from dpsur.per_example.contributions import clip_factors
from dpsur.per_example.record_function import RecordFunction, Way
from dpsur.per_example.tape import Tape


def test_a_plan_keeps_nothing_of_what_it_was_checked_with():
    """A graph whose saved tensors hold it is never given back, and with it a copy of the model."""
    model = nn.Sequential(nn.Linear(5, 41), nn.Tanh(), nn.Linear(41, 3))
    params = dict(model.named_parameters())
    strategy_for(Objective(model, F.cross_entropy), params, torch.randn(6, 5))
    gc.collect()
    alive = [
        value
        for value in gc.get_objects()
        if type(value) is torch.Tensor and tuple(value.shape) == (41, 5)
    ]
    assert not alive


def test_a_callers_own_backward_pass_gives_norms_and_sums():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    x, y = torch.randn(6, 5), torch.arange(6) % 3
    records = RecordFunction((model,), dict(model.named_parameters()))
    tape, outputs = records.run(model, x.unsqueeze(1), len(x))
    F.cross_entropy(outputs.flatten(0, 1), y, reduction="sum").backward()
    assert all(value.grad is None for value in model.parameters())
    gradients = per_example_gradients(model, F.cross_entropy, x, y)
    norms = torch.cat([rows.flatten(1) for rows in gradients.values()], 1).norm(dim=1)
    torch.testing.assert_close(tape.norms(), norms)
    factors = clip_factors(tape.norms(), 0.5, None)
    for name, rows in gradients.items():
        wanted = torch.tensordot((0.5 / norms).clamp(max=1), rows, 1)
        torch.testing.assert_close(tape.weighted_sum(name, factors), wanted)
        torch.testing.assert_close(tape.per_example(name), rows)
    assert all(isinstance(value, nn.Parameter) for value in model.parameters())


@pytest.mark.parametrize("once", [True, False])
def test_what_a_layer_kept_is_given_back_when_it_was_used(once):
    """A graph keeps its hooks as long as it lives, and with them inputs of layers."""
    value = torch.ones(3, requires_grad=True)
    tape = Tape({"value": value}, 3, once=once)
    kept = torch.zeros(3)
    alive, calls = weakref.ref(kept), []

    def record(gradient, kept=kept):
        calls.append(gradient + kept)
        return []

    output = tape.watch(value * 2, record)
    del kept, record
    total = output.sum()
    for _ in range(2):
        torch.autograd.grad(total, value, retain_graph=True)
    assert len(calls) == (1 if once else 2)
    assert (alive() is None) == once


@pytest.mark.filterwarnings("ignore:LSTM with proj")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn", "projected", "attention", "linear"])
def test_as_many_records_as_steps_are_not_confused_with_them(kind, batch_first):
    """A rule that looks for records where the steps are would find as many rows as it expects."""
    torch.manual_seed(0)
    layer = {
        "lstm": lambda: nn.LSTM(4, 3, 2, bidirectional=True, batch_first=batch_first),
        "gru": lambda: nn.GRU(4, 3, batch_first=batch_first),
        "rnn": lambda: nn.RNN(4, 3, batch_first=batch_first),
        "projected": lambda: nn.LSTM(4, 5, 2, proj_size=3, batch_first=batch_first),
        "attention": lambda: nn.MultiheadAttention(4, 2, batch_first=batch_first),
        "linear": lambda: nn.Linear(4, 3),
    }[kind]().double()
    x = torch.randn(5, 1, 5, 4).double()

    def loss(one):
        one = one if batch_first else one.transpose(0, 1)
        found = layer(one, one, one) if kind == "attention" else layer(one)
        return (found if kind == "linear" else found[0]).square().sum()

    records = RecordFunction((layer,), dict(layer.named_parameters()))
    tape, _, _ = records.tape(loss, x, len(x))
    assert set(records.ways.values()) == {Way.LEVEL}
    wanted = []
    for one in x:
        gradients = torch.autograd.grad(loss(one), list(layer.parameters()))
        wanted.append(torch.cat([value.flatten() for value in gradients]).norm())
    torch.testing.assert_close(tape.norms(), torch.stack(wanted))
