"""The faster way to the largest values computes what PyTorch's own does."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.per_example import clipped_sum
from dpsur.per_example.rules import pooling
from dpsur.per_example.rules.pooling import max_pool
from tests.per_example.test_gradient_rules import assert_same, clipped, gradients, norm

LAYERS = {
    "usual": nn.MaxPool2d(2),
    "overlapping": nn.MaxPool2d(2, stride=1),
    "padded": nn.MaxPool2d(3, stride=2, padding=1),
    "uneven": nn.MaxPool2d((3, 2), stride=(1, 2), padding=(1, 0), dilation=(2, 1)),
    "ceiling": nn.MaxPool2d(2, stride=2, ceil_mode=True),
}


@pytest.fixture(autouse=True)
def small_maps(monkeypatch):
    monkeypatch.setattr("dpsur.per_example.rules.pooling._LEAST_NUMBERS", 0)
    monkeypatch.setattr("dpsur.per_example.rules.patches._NUMBERS_ON_CPU", 1000)


def maps(dtype=torch.float64):
    """With ties: of equal values the first one gets the gradient."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-4, 5, (11, 5, 7, 9), generator=generator).to(dtype)


def both(layer, values):
    """Outputs and gradients, by PyTorch and by us."""
    found = []
    for pool in (layer, lambda x: max_pool(layer, None, x)):
        leaf = values.clone().requires_grad_()
        output = pool(leaf)
        weights = torch.arange(output.numel(), dtype=values.dtype).view_as(output)
        found.append((output, *torch.autograd.grad((output * weights).nansum(), leaf)))
    return found


def differ(one, other):
    pairs = zip(one, other, strict=True)
    return any(not torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients_are_pytorchs(name, dtype):
    assert not differ(*both(LAYERS[name], maps(dtype)))


def test_values_that_are_not_finite_are_treated_alike():
    values = maps()
    values[3, 1, 2, 2], values[4, 0, 1, 1], values[5, 2, 3, 3] = torch.nan, torch.inf, -torch.inf
    assert not differ(*both(LAYERS["overlapping"], values))


def test_another_choice_among_equals_is_noticed(monkeypatch):
    expected, _ = both(LAYERS["usual"], maps())
    monkeypatch.setattr(
        pooling._MaxPool,
        "apply",
        lambda input, _: -F.max_pool2d(-input.flip(3), 2, ceil_mode=True).flip(3)[..., :4],
    )
    _, wrong = both(LAYERS["usual"], maps())
    assert differ(expected, wrong)


@pytest.mark.parametrize(
    "values",
    [maps()[0], maps().half(), maps()[:, :3], maps().contiguous(memory_format=torch.channels_last)],
    ids=["one map", "half precision", "few channels", "turned already"],
)
def test_what_is_not_covered_is_left_to_pytorch(values, monkeypatch):
    monkeypatch.setattr(pooling._MaxPool, "apply", None)
    layer = LAYERS["usual"]
    assert torch.equal(max_pool(layer, None, values), layer(values))


def test_indices_are_returned_where_they_are_asked_for():
    layer = nn.MaxPool2d(2, return_indices=True)
    for ours, theirs in zip(max_pool(layer, None, maps()), layer(maps()), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("frozen", [False, True])
def test_clipped_sums_of_a_network_with_such_layers(frozen, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.Sequential(nn.Tanh(), nn.MaxPool2d(2, stride=1)),
        nn.Conv2d(4, 6, 2),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(6 * 2 * 2, 3),
    ).double()
    model[0].requires_grad_(not frozen)
    calls = []
    real = pooling._MaxPool.apply
    monkeypatch.setattr(pooling._MaxPool, "apply", lambda *args: calls.append(1) or real(*args))
    data = Examples(torch.randn(6, 1, 8, 8, dtype=torch.float64), torch.arange(6) % 3)
    problem = Problem(model, F.cross_entropy, data)
    params = problem.initial_params()
    rows = gradients(problem, params, data)
    bound = sorted(map(norm, rows))[3]
    assert_same(clipped_sum(problem, params, data, bound).params, clipped(rows, bound), 1e-9)
    assert calls
    assert all("forward" not in vars(module) for module in model.modules())
