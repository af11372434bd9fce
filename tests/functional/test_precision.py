"""Layers may round to TF32; norms and clipped sums never do."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpsur.functional.problem import Problem
from dpsur.functional.process_settings import precision
from dpsur.per_example import clipped_norms, clipped_sum, tape
from dpsur.per_example.contributions import Rows
from dpsur.per_example.tape import Tape
from tests.conftest import blobs


def rounding():
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


class Seen(nn.Module):
    """A layer that notes whether products may be rounded."""

    def __init__(self, notes):
        super().__init__()
        self.note, self.layer = notes.append, nn.Linear(2, 3)

    def forward(self, inputs):
        self.note(rounding())
        return self.layer(inputs)


class Odd(Seen):
    """The same, with a weight used in a way that no rule sees."""

    def forward(self, inputs):
        self.note(rounding())
        return F.linear(inputs, self.layer.weight * self.layer.weight.sum())


def spy(monkeypatch, owner, name, notes):
    real = getattr(owner, name)

    def noted(*args, **kwargs):
        notes.append(rounding())
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, noted)


@pytest.mark.parametrize("tf32", [True, False])
def test_norms_and_sums_are_exact_whatever_the_layers_do(tf32, monkeypatch):
    layers, sums = [], []
    for owner, name in ((Tape, "norms"), (Tape, "weighted_sum"), (Tape, "add")):
        spy(monkeypatch, owner, name, sums)
    problem = Problem(Seen(layers), F.cross_entropy, blobs())
    before = rounding()
    with precision(tf32=tf32):
        clipped_sum(problem, problem.initial_params(), blobs(), 0.1)  # makes the plan
        layers.clear()
        sums.clear()
        clipped_sum(problem, problem.initial_params(), blobs(), 0.1)
        assert rounding() == (tf32, tf32)
    assert rounding() == before
    assert set(layers) == {(tf32, tf32)}  # the control: the setting did reach the layers
    assert len(sums) > 2
    assert set(sums) == {(False, False)}


@pytest.mark.parametrize("model", [Seen, Odd])
def test_so_are_norms_alone(model, monkeypatch):
    layers, norms = [], []
    problem = Problem(model(layers), F.cross_entropy, blobs())
    with precision(tf32=True):
        clipped_norms(problem, problem.initial_params(), blobs(), 0.1)
        layers.clear()
        spy(monkeypatch, tape, "whole_norms", norms)
        clipped_norms(problem, problem.initial_params(), blobs(), 0.1)
    assert set(layers) == {(True, True)}
    assert norms
    assert set(norms) == {(False, False)}


def test_so_they_are_without_a_rule(monkeypatch):
    layers, sums = [], []
    problem = Problem(Odd(layers), F.cross_entropy, blobs())
    with precision(tf32=True):
        clipped_sum(problem, problem.initial_params(), blobs(), 0.1)
        layers.clear()
        for name in ("measure", "weighted_sum"):
            spy(monkeypatch, Rows, name, sums)
        clipped_sum(problem, problem.initial_params(), blobs(), 0.1)
    assert set(layers) == {(True, True)}
    assert sums
    assert set(sums) == {(False, False)}
