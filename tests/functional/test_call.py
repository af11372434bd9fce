"""A model is called with other weights and gets its own back."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from dpsur.functional.problem import Problem, every_module, use_weights
from dpsur.functional.records import Examples
from dpsur.per_example import check_model, clipped_sum
from dpsur.per_example.clipping import strategy_for
from dpsur.per_example.record_function import Way


class Tied(nn.Module):
    """One weight under two names, one module in two places, a hole and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), self.first)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.nothing = None
        self.register_module("empty", None)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x):
        return self.scale * self.second(self.inner(self.first(x))) + self.shift


def weights_for(model, factor):
    return {name: factor * value.detach() for name, value in model.named_parameters()}


def test_modules_are_walked_as_pytorch_walks_them():
    model = Tied()
    expected = [(name, module) for name, module in model.named_modules()]
    assert [(name, module) for module, name in every_module(model).items()] == expected


def test_it_is_what_functional_call_computes():
    torch.manual_seed(0)
    model, inputs = Tied(), torch.randn(4, 3)
    own = dict(model.named_parameters(remove_duplicate=False))
    weights, asked = weights_for(model, 1.5), []

    def weight(name, value):
        asked.append(name)
        assert value is own[name]
        return weights[name]

    with use_weights(model, weight) as called:
        outputs = called(inputs)
    assert asked == list(weights)  # each once, by its first name
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(own)
    assert all(after[name] is value for name, value in own.items())
    assert not torch.equal(outputs, model(inputs))
    assert torch.equal(outputs, functional_call(copy.deepcopy(model), weights, (inputs,)))


def test_weights_come_back_if_the_model_fails():
    model = Tied()
    own = dict(model.named_parameters(remove_duplicate=False))
    weights = weights_for(model, 2.0)
    swapped = use_weights(model, lambda name, _: weights[name])
    with pytest.raises(RuntimeError), swapped as called:
        called(torch.randn(4, 5))
    assert all(value is own[name] for name, value in model.named_parameters(remove_duplicate=False))


def one_by_one(problem, params):
    records = strategy_for(problem, params, problem.train.inputs).records
    records.ways.update(dict.fromkeys(records.ways, Way.ALONE))
    clipped_sum(problem, params, problem.train, 0.1)


def engine(problem, params):
    return {
        "outputs": lambda: problem.outputs(params, problem.train.inputs),
        "one by one": lambda: one_by_one(problem, params),
        "planned": lambda: clipped_sum(problem, params, problem.train, 0.1),
        "checked": lambda: check_model(problem.model, problem.train),
    }


@pytest.mark.parametrize("way", engine(None, None))
def test_a_module_in_two_places_that_shares_its_weight_gets_it_back(way):
    torch.manual_seed(0)
    problem = Problem(Tied(), F.cross_entropy, Examples(torch.randn(4, 3), torch.arange(4) % 3))
    own = dict(problem.model.named_parameters(remove_duplicate=False))
    values = {name: value.detach().clone() for name, value in own.items()}
    trained = {name: value + 1 for name, value in problem.initial_params().items()}
    engine(problem, trained)[way]()
    after = dict(problem.model.named_parameters(remove_duplicate=False))
    assert all(after[name] is value for name, value in own.items())
    assert all(torch.equal(after[name], value) for name, value in values.items())


def test_modules_of_special_kinds_are_called_by_functional_call():
    model = nn.DataParallel(nn.Linear(2, 2))
    swapped = use_weights(model, lambda _, value: value.detach())
    with pytest.raises(RuntimeError, match="DataParallel"), swapped as called:
        called(torch.randn(1, 2))
