"""What a refusal says: what happened, why it matters, and what to write instead."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpsur
from tests.conftest import blobs
from tests.engine.helpers import private

STEP = r"@engine\.private_step\n.*def step\(model, batch\):\n(.|\n)*step\(batch\)"


def said(loss, model=None, **options):
    """The refusal of a loop in the form of Opacus."""
    _, model, optimizer, loader = private(model, **options)

    def epoch():
        for x, y in loader:
            optimizer.zero_grad()
            loss(model, x, y).backward()
            optimizer.step()

    with pytest.raises(dpsur.InvalidInputError) as caught:
        epoch()
    return str(caught.value)


def rooted(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none").logsumexp(0)


def test_an_operation_has_the_name_that_torch_gives_it():
    found = said(rooted)
    assert "operation `logsumexp`" in found
    assert "Backward" not in found


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (rooted, "clipping might not bound"),
        (lambda m, x, y: F.mse_loss(m(x), m(x + 1)), "several calls of the model .a siamese"),
        (
            lambda m, x, y: F.cross_entropy(m[0](x), y),
            "A part of the model that is called by itself",
        ),
        (
            lambda m, x, y: F.cross_entropy(m(x), y) + (m[0].weight ** 2).sum(),
            "past the clipped sum",
        ),
        (
            lambda m, x, y: F.cross_entropy(m(x), y, weight=torch.ones(3)),
            r"engine\.criterion\(outputs, targets\), or",
        ),
        (
            lambda m, x, y: F.binary_cross_entropy_with_logits(
                m(x), F.one_hot(y, 3).float(), pos_weight=torch.ones(3)
            ),
            "a pos_weight, which may have been computed from the batch",
        ),
    ],
)
def test_the_private_step_is_shown(loss, words):
    model = nn.Sequential(nn.Linear(6, 3))
    assert re.search(f"{words}(.|\n)*{STEP}", said(loss, model))


class Squeezes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x).squeeze(0)


def test_a_squeeze_that_drops_the_records_is_named():
    found = said(lambda m, x, y: F.cross_entropy(m(x), y), Squeezes())
    assert "squeeze(-1)" in found


class Draws(nn.Module):
    """A variational autoencoder as it is usually written."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x):
        found = self.layer(x)
        return found + 0.1 * torch.randn_like(found)


def test_a_model_that_draws_is_refused_behind_a_gate_alone():
    budget = dpsur.Budget(epsilon=5.0, delta=1e-3)
    options = {"budget": budget, "max_updates": 2, "seed": 0}
    dpsur.fit(Draws(), blobs(), method=dpsur.Dpsgd(), **options)
    with pytest.raises(dpsur.UnsupportedModelError, match=r"the gate, .*Dpsgd\(gate=\"none\"\)"):
        dpsur.fit(Draws(), blobs(), method=dpsur.Dpsur(), **options)
    inputs, targets = torch.randn(4, 2), torch.zeros(4, dtype=torch.int64)
    rows = dpsur.per_example_gradients(Draws(), F.cross_entropy, inputs, targets)
    assert rows["layer.weight"].shape == (4, 3, 2)
    assert dpsur.check(Draws(), (inputs, targets))
