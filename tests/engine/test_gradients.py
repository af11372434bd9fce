"""The gradient that the optimizer gets: the clipped sum of `dpsur.clipped_sum`, plus noise."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpsur
from dpsur.engine.weights import Gradients
from dpsur.functional import tree
from dpsur.mechanism import gaussian
from tests.engine.helpers import private, records, without_noise
from tests.per_example.test_against_opacus import ARCHITECTURES

CLIP = 0.3


class Scale(nn.Module):
    """A parameter used directly, in the root."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x * self.scale)


class Unbatchable(nn.Module):
    """Control flow on values: PyTorch cannot batch it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        rows = [row * (self.scale if row.sum() > 0 else 2 * self.scale) for row in x]
        return self.head(torch.stack(rows))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.RNN(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.rnn(x.view(-1, 2, 3))[0][:, -1])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.head(self.b(self.a(x).tanh()))


def partly_frozen():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


class Adversarial(nn.Module):
    """Moves its inputs along a gradient that it takes in its forward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        with torch.enable_grad():
            moved = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.head(self.first(moved).tanh()).sum(), moved)
        return self.head(self.first(x + 0.1 * slope.sign()).tanh())


MODELS = {
    "one layer": lambda: nn.Linear(6, 3),
    "mlp": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
    "root parameter": Scale,
    "one by one": Unbatchable,
    "rnn": Recurrent,
    "tied": Tied,
    "frozen": partly_frozen,
    "adversarial": Adversarial,
}


def gradient_of_a_step(model, data, criterion, monkeypatch, **options):
    """The gradient that one step of a loop hands to the optimizer, and the batch."""
    without_noise(monkeypatch)
    _, model, optimizer, loader = private(model, data, max_grad_norm=CLIP, seed=3, **options)
    x, y = next(iter(loader))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    criterion(model(x), y).backward()
    optimizer.step()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(before[name])
    return gradients, (x, y), loader.sample_rate * len(data)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_has_the_clipped_sum(name, reduction, monkeypatch):
    torch.manual_seed(1)
    model, data = MODELS[name]().double(), records(dtype=torch.float64)
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    found, (x, y), expected_size = gradient_of_a_step(
        model, data, criterion, monkeypatch, loss_reduction=reduction
    )
    plain = copy.deepcopy(model)
    expected = dpsur.clipped_sum(plain, F.cross_entropy, x, y, CLIP).params
    assert found.keys() == expected.keys()
    for parameter, value in expected.items():
        torch.testing.assert_close(found[parameter], value / expected_size, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_step_has_the_gradient_of_opacus(name, monkeypatch):
    """20 architectures; the peer clips each record's gradient by itself."""
    from opacus.grad_sample import GradSampleModule

    build, draw = ARCHITECTURES[name]
    torch.manual_seed(0)
    model, inputs = build().double(), draw()
    data = torch.utils.data.TensorDataset(inputs, torch.arange(len(inputs)) % 3)
    found, (x, y), expected_size = gradient_of_a_step(
        model, data, F.cross_entropy, monkeypatch, batch_size=len(data)
    )
    assert len(x) == len(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = GradSampleModule(build().double(), loss_reduction="sum")
        peer.load_state_dict({f"_module.{k}": v for k, v in model.state_dict().items()})
        F.cross_entropy(peer(x), y, reduction="sum").backward()
    rows = {n.removeprefix("_module."): p.grad_sample for n, p in peer.named_parameters()}
    norms = torch.cat([value.flatten(1) for value in rows.values()], 1).norm(dim=1)
    factors = (CLIP / norms).clamp(max=1)
    whole = torch.cat([torch.tensordot(factors, rows[n], 1).flatten() for n in found])
    ours = torch.cat([expected_size * found[n].flatten() for n in found])
    assert float((ours - whole).norm()) <= 1e-9 * float(whole.norm())


@pytest.mark.parametrize("rows", [7, 32, 33])
def test_records_whose_outputs_are_nan_contribute_zero(rows, monkeypatch):
    """Backward passes make a number of some NaN, another one at the end of a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3), nn.Hardtanh())
    model[0].weight.requires_grad_(False)
    x, y = records(rows).tensors
    nan = torch.arange(rows) % 3 != 0
    data = torch.utils.data.TensorDataset(torch.where(nan[:, None], torch.nan, x), y)
    found, (x, y), expected_size = gradient_of_a_step(
        model, data, lambda out, _: out.sum(1).mean(), monkeypatch, batch_size=rows
    )
    kept, plain = ~x.isnan().any(1), copy.deepcopy(model)
    total = dpsur.clipped_sum(plain, lambda out, _: out.sum(), x[kept], y[kept], CLIP).params
    torch.testing.assert_close(found["0.bias"], total["0.bias"] / expected_size)


class Words(nn.Module):
    """An embedding that no rule covers, so that it runs one record at a time."""

    def __init__(self, padding):
        super().__init__()
        self.table = nn.Embedding(9, 4, padding_idx=padding, scale_grad_by_freq=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.table(x).mean(1))


class Inserted(Words):
    """PyTorch batches `select_scatter` wrongly if both of its arguments are batched."""

    def __init__(self):
        super().__init__(None)
        self.inserted = nn.Parameter(torch.ones(4))

    def forward(self, x):
        rows = self.table(x)
        return self.head(torch.select_scatter(rows, self.inserted.expand(len(x), 4), 1, 1).mean(1))


@pytest.mark.parametrize("build", [lambda: Words(0), lambda: Words(3), lambda: Words(-2), Inserted])
def test_what_cannot_be_batched_is_done_for_each_record_alone(build, monkeypatch):
    """Among other things, the row for padding is not trained, wherever a record stands."""
    torch.manual_seed(1)
    model = build()
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 9, (20, 6), generator=generator)
    data = torch.utils.data.TensorDataset(tokens, torch.arange(20) % 3)
    found, (x, y), expected_size = gradient_of_a_step(
        model, data, F.cross_entropy, monkeypatch, batch_size=20
    )
    plain = copy.deepcopy(model)
    total = {name: torch.zeros_like(value) for name, value in plain.named_parameters()}
    for row in range(len(x)):
        loss = F.cross_entropy(plain(x[row : row + 1]), y[row : row + 1])
        alone = torch.autograd.grad(loss, list(plain.parameters()))
        norm = torch.cat([value.flatten() for value in alone]).norm()
        for value, gradient in zip(total.values(), alone, strict=True):
            value += gradient * min(1.0, CLIP / float(norm))
    for name, value in total.items():
        torch.testing.assert_close(found[name] * expected_size, value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", ["loop", "step"])
def test_no_gradient_shares_memory_with_sums(form, monkeypatch):
    """Memory for sums is used again, and a program may keep what stood in `.grad`."""
    monkeypatch.setattr(tree, "_LARGE", 0)
    real, taken = gaussian.add_noise, []

    def spy(total, *others):
        taken.append(places_of(total.params.values()))
        return real(total, *others)

    monkeypatch.setattr(gaussian, "add_noise", spy)
    engine, model, optimizer, loader = private(steps=3)
    if form == "step":
        step = engine.private_step(lambda model, one: F.cross_entropy(model(one[0]), one[1]))
    kept = []
    for batch in loader:
        if form == "step":
            step(batch)
        else:
            F.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()
        grads = [value.grad for value in model.parameters()]
        assert not taken[-1] & places_of(grads)
        kept.append([grad.clone() for grad in grads])
    assert taken[1] == taken[2]
    assert not torch.equal(kept[0][0], kept[1][0])


@pytest.mark.parametrize("form", ["loop", "step"])
def test_no_gradient_lies_beside_activations_of_a_gpu(form, monkeypatch):
    """As in plain PyTorch, and with the same weights as where memory is kept."""
    during = []

    def trained():
        engine, model, optimizer, loader = private(steps=3, seed=1)
        held = engine._watcher.gradients

        def loss(model, one):
            scores = model(one[0])
            grads = [value.grad is None for value in model.parameters()]
            during.append(not held._grads and all(grads))
            return F.cross_entropy(scores, one[1])

        step = engine.private_step(loss) if form == "step" else None
        for batch in loader:
            if step is not None:
                step(batch)
            else:
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
            assert all(value.grad is not None for value in model.parameters())
        return list(model.parameters())

    kept = trained()
    assert not all(during)
    during.clear()
    monkeypatch.setattr(Gradients, "KEPT_ON", ())
    assert all(map(torch.equal, kept, trained()))
    assert all(during)


def places_of(tensors):
    return {value.untyped_storage().data_ptr() for value in tensors}
