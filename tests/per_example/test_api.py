"""Per-example gradients, clipped sums and the engine report, by their public names."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpsur.errors import UnsupportedModelError
from dpsur.per_example.api import clipped_sum, per_example_gradients
from dpsur.per_example.report import explain


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


X = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
Y = torch.arange(7) % 3


def by_autograd(model, inputs, targets):
    rows = []
    for x, y in zip(inputs, targets, strict=True):
        loss = F.cross_entropy(model(x[None]), y[None])
        rows.append(torch.autograd.grad(loss, list(model.parameters())))
    return {
        name: torch.stack(column)
        for (name, _), column in zip(model.named_parameters(), zip(*rows, strict=True), strict=True)
    }


@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss(reduction="sum")])
def test_gradients_are_those_of_each_record(loss):
    model = network()
    found, expected = per_example_gradients(model, loss, X, Y), by_autograd(model, X, Y)
    assert list(found) == list(expected)
    for name, rows in expected.items():
        torch.testing.assert_close(found[name], rows)
    assert all(value.grad is None for value in model.parameters())


def test_layers_that_are_used_twice_and_frozen_ones():
    model = network()
    model[2].bias.requires_grad_(False)
    shared = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), model[0], model[2])
    shared[0].weight = nn.Parameter(torch.randn(5, 5))
    twice = nn.Sequential(shared[0], nn.Tanh(), shared[0], shared[2], shared[3])
    found = per_example_gradients(twice, F.cross_entropy, X, Y)
    assert set(found) == {n for n, p in twice.named_parameters() if p.requires_grad}
    wanted = []
    for x, y in zip(X, Y, strict=True):
        loss = F.cross_entropy(twice(x[None]), y[None])
        wanted.append(torch.autograd.grad(loss, shared[0].weight)[0])
    torch.testing.assert_close(found["0.weight"], torch.stack(wanted))


def test_the_sum_is_that_of_clipped_gradients_and_says_its_sensitivity():
    model, bound = network(), 0.4
    gradients = per_example_gradients(model, F.cross_entropy, X, Y)
    norms = torch.cat([rows.flatten(1) for rows in gradients.values()], 1).norm(dim=1)
    assert (norms > bound).any()
    total = clipped_sum(model, F.cross_entropy, X, Y, max_grad_norm=bound)
    assert total.sensitivity == bound
    for name, rows in gradients.items():
        factors = (bound / norms).clamp(max=1)
        torch.testing.assert_close(total.params[name], torch.tensordot(factors, rows, 1))


@pytest.mark.parametrize("value", [1e30, float("inf"), float("nan")])
def test_one_record_moves_the_sum_by_at_most_the_sensitivity(value):
    model, bound = network(), 0.4
    without = clipped_sum(model, F.cross_entropy, X, Y, bound)
    odd = torch.cat([X, torch.full((1, 5), value)])
    both = clipped_sum(model, F.cross_entropy, odd, torch.cat([Y, Y[:1]]), bound)
    gaps = [(both.params[name] - without.params[name]).flatten() for name in without.params]
    assert torch.cat(gaps).norm() <= bound * (1 + 1e-5)


def test_an_empty_batch_is_the_zero_sum():
    model = network()
    total = clipped_sum(model, F.cross_entropy, X[:0], Y[:0], 1.0)
    assert all(not value.any() for value in total.params.values())
    rows = per_example_gradients(model, F.cross_entropy, X[:0], Y[:0])
    assert rows["0.weight"].shape == (0, 4, 5)


@pytest.mark.parametrize("call", [per_example_gradients, clipped_sum])
def test_a_layer_that_normalises_over_the_batch_is_refused(call):
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    more = {"max_grad_norm": 1.0} if call is clipped_sum else {}
    with pytest.raises(UnsupportedModelError, match="nn.GroupNorm"):
        call(model, F.cross_entropy, X, Y, **more)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight


class ReadsValues(Scale):
    """Looks at values, which code in the record level cannot do."""

    def forward(self, x):
        return x * self.weight if bool(x.isfinite().any()) else x + self.weight


class Changed(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Equation(nn.Linear):
    def forward(self, x):
        return torch.einsum("oi,bi->bo", self.weight, x) + self.bias


def test_the_report_names_what_takes_memory():
    layers = nn.Linear(5, 4), Scale(), Changed(4, 400), Equation(400, 400), nn.Linear(400, 3)
    report = explain(nn.Sequential(*layers), X)
    assert report.name == "one-pass"
    assert report.reason is None
    assert report.copies == ("3.weight",)
    assert "one-pass" in str(report)
    assert "3.weight is used by an operation without a rule" in str(report)
    assert "\n" not in repr(report)


def test_the_report_says_what_caused_a_slow_engine():
    report = explain(nn.Sequential(nn.Linear(5, 4), ReadsValues(), nn.Linear(4, 3)), X)
    assert report.name == "one-by-one"
    assert report.reason.startswith("module 1 (ReadsValues): ")
    assert "data-dependent control flow" in report.reason
    assert "many times slower" in str(report)


def test_position_embeddings_are_followed():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.start, self.layer = nn.Parameter(torch.randn(1, 5)), nn.Linear(5, 3)

        def forward(self, x):
            return self.layer(x + self.start)

    report = explain(Positions(), X)
    assert report.name == "one-pass"
    assert not report.copies
