"""What a refusal says: what happened, why it matters, and what to write instead."""

import copy
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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


def made(**given):
    """What `make_private` returns for a small program, with its engine in front."""
    model = given.pop("model", None) or nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    data = given.pop("data", None) or TensorDataset(torch.randn(40, 6), torch.arange(40) % 3)
    loader = DataLoader(data, **{"batch_size": 10, **given.pop("loader", {})})
    engine, options = dpsur.PrivacyEngine(), {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    return engine, *engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader,
        **{**options, "epochs": 1, **given},
    )


def of_batch(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"loader": {"batch_size": 100, "drop_last": True}}, "batch_size 100 is above the number"),
        ({"noise_multiplier": torch.ones(2)}, "must be one number"),
        ({"seed": "a"}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"gate": "loss"}, "'loss' is not a gate"),
        ({"model": nn.Sequential(nn.LazyLinear(3))}, "call the module once on a batch of zeros"),
    ],
)
def test_settings_that_cannot_be_used(given, words):
    with pytest.raises(dpsur.InvalidInputError, match=words):
        made(**given)


@pytest.mark.parametrize("function", [3, lambda batch: batch, nn.Linear(2, 2)])
def test_a_private_step_of_something_else(function):
    with pytest.raises(dpsur.InvalidInputError, match=r"a function of \(model, batch\)"):
        dpsur.PrivacyEngine().private_step(function)


def calls_backward(model, batch):
    loss = of_batch(model, batch)
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (calls_backward, "calls backward"),
        (lambda m, b: torch.tensor(of_batch(m, b).item()), "no graph to the model"),
        (lambda m, b: of_batch(m, b) * 1j, "complex64"),
        (lambda m, b: m(b[0]).argmax(1).sum(), "int64"),
    ],
)
def test_a_loss_that_has_no_gradient(function, words):
    engine, _, _, loader = made(seed=0)
    step = engine.private_step(function)
    with pytest.raises(dpsur.InvalidInputError, match=words):
        step(next(iter(loader)))


@pytest.mark.parametrize(
    ("use", "words"),
    [(lambda batch: batch[0], "taken apart"), (len, "size of a private batch")],
)
def test_a_batch_that_is_looked_into(use, words):
    engine, _, _, loader = made(seed=0)
    engine.private_step(of_batch)
    batch = next(iter(loader))
    assert batch
    with pytest.raises(dpsur.InvalidInputError, match=words):
        use(batch)


class Opaque:
    """What no tensor can be found in."""


@pytest.mark.parametrize("form", ["private step", "backward"])
def test_a_collate_function_without_tensors(form):
    engine, _, _, loader = made(loader={"collate_fn": lambda records: Opaque()})
    if form == "private step":
        engine.private_step(of_batch)
    with pytest.raises(dpsur.InvalidInputError, match="no tensor was found in .* a Opaque"):
        next(iter(loader))


def test_what_a_guarantee_is_made_for_cannot_be_set():
    engine, _, optimizer, loader = made()
    for owner, name in (
        (engine, "noise_multiplier"),
        (optimizer, "max_grad_norm"),
        (optimizer, "expected_batch_size"),
        (loader, "sample_rate"),
        (loader.poisson, "sample_rate"),
    ):
        with pytest.raises(dpsur.InvalidInputError, match=f"{name} is fixed by make_private"):
            setattr(owner, name, 0.5)


def test_calls_before_make_private():
    engine = dpsur.PrivacyEngine()
    step = engine.private_step(of_batch)
    for call in (lambda: step((torch.ones(2, 6), torch.ones(2).long())), engine.state_dict):
        with pytest.raises(dpsur.InvalidInputError, match="call make_private first"):
            call()


def test_copies_draw_no_noise_of_their_own():
    """A copy of an engine would draw the noise of its own steps again for other sums."""
    engine, _, optimizer, _ = made()
    assert copy.deepcopy(engine) is engine
    with pytest.raises(dpsur.InvalidInputError, match="cannot be pickled"):
        pickle.dumps(engine)
    with pytest.raises(dpsur.InvalidInputError, match="copy of a private one"):
        copy.deepcopy(optimizer).step()


def test_the_decorator_with_options():
    engine, _, _, loader = made(seed=0)

    @engine.private_step(capture=False)
    def step(model, batch):
        return of_batch(model, batch)

    assert not step.capture
    step(next(iter(loader)))
