"""What has no rule is never an order of magnitude slower than in Opacus, which uses functorch."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpsur
from dpsur.functional.problem import Objective
from dpsur.per_example.clipping import strategy_for

pytest.importorskip("opacus", reason="needs the extra dev: opacus")
from opacus.grad_sample import GradSampleModule

ROWS, WIDTH = 64, 64


class Equation(nn.Module):
    """A product that no rule knows: one pass, with copies for this operation."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x):
        return torch.einsum("bi,io->bo", x, self.weight)


class Folds(nn.Module):
    """A part of a weight for each half of a record, and operations between weights and records."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        parts = x.view(len(x), 2, -1).transpose(0, 1).flatten(0, 1)
        folded = torch.tanh(F.linear(parts, self.linear.weight[:, : WIDTH // 2]) * self.scale)
        return folded.view(2, len(x), WIDTH).sum(0) + self.linear.bias


def weights_of(model):
    return {name: value.detach() for name, value in model.named_parameters()}


def fastest(function):
    function()
    times = []
    for _ in range(5):
        begun = time.process_time()
        function()
        times.append(time.process_time() - begun)
    return min(times)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [Equation, Folds])
def test_the_fallback_keeps_up_with_functorch(kind):
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, WIDTH), torch.randint(0, 3, (ROWS,))

    def made():
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), nn.ReLU(), nn.Linear(WIDTH, 3))

    model, wrapped = made(), GradSampleModule(made())
    assert strategy_for(Objective(model, F.cross_entropy), weights_of(model), x).copied

    def theirs():
        wrapped.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        norms = [p.grad_sample.flatten(1).norm(dim=1) for p in wrapped.parameters()]
        factors = (1 / torch.stack(norms).norm(dim=0)).clamp(max=1)
        for p in wrapped.parameters():
            torch.einsum("b,b...->...", factors, p.grad_sample)

    ours = fastest(lambda: dpsur.clipped_sum(model, F.cross_entropy, x, y, 1.0))
    assert ours < 10 * fastest(theirs)
