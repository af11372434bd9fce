"""The networks: sizes, the gradient engine's fast path, descriptions, activations."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpsur.errors import InvalidInputError
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.networks import NETWORKS, build_activation, build_network
from dpsur.per_example import check_model
from dpsur.per_example.clipping import strategy_for
from reproduction.networks import TemperedSigmoid

TEMPERED = {"name": "tempered-sigmoid", "scale": 1.5, "temperature": 3.0, "offset": 0.5}
# name -> parameters, shape of an input, classes
PAPER = {
    "pixel-cnn": (26_010, (1, 28, 28), 10),
    "cifar-pixel-cnn": (550_570, (3, 32, 32), 10),
    "scattering-cnn": (33_066, (81, 7, 7), 10),
    "cifar-scattering-cnn": (187_210, (243, 8, 8), 10),
    "imdb-lstm": (2_021_202, (80,), 2),
}
SCATTERING = {"name": "scattering", "height": 8, "width": 12}
GROUPS = {"name": "group-norm", "groups": 27, "channels": 81}
ON_FEATURES = {"name": "linear-features", "channels": 81, "height": 2, "width": 3, "classes": 4}
GENERAL = [
    ({"name": "linear", "inputs": 6, "classes": 4}, (6,)),
    ({"name": "linear-head", "inputs": 6, "classes": 4}, (6,)),
    (ON_FEATURES, (81, 2, 3)),
    ({"name": "mlp", "inputs": 6, "hidden": 5, "classes": 4}, (6,)),
    ({"name": "mlp", "inputs": 6, "hidden": [5, 3], "classes": 4, "activation": "relu"}, (6,)),
    ({"name": "small-cnn", "channels": 2, "height": 8, "width": 31, "classes": 4}, (2, 8, 31)),
    (
        {"name": "with-features", "features": [SCATTERING, GROUPS], "network": ON_FEATURES},
        (1, 8, 12),
    ),
]
DESCRIBED = [
    *(({"name": name, "activation": TEMPERED}, shape) for name, (_, shape, _) in PAPER.items()),
    ({"name": "imdb-lstm", "activation": "relu", "activation_before_lstm": True}, (80,)),
    *GENERAL,
]


def inputs_for(name, shape, rows=3):
    if name == "imdb-lstm":
        return torch.randint(20_000, (rows, *shape))
    return torch.randn(rows, *shape)


@pytest.mark.parametrize("name", PAPER)
def test_the_paper_s_networks_have_its_numbers_of_parameters(name):
    parameters, shape, classes = PAPER[name]
    network = build_network({"name": name})
    assert sum(value.numel() for value in network.parameters()) == parameters
    assert network(inputs_for(name, shape)).shape == (3, classes)
    assert build_network({"name": name, "classes": 7})(inputs_for(name, shape)).shape == (3, 7)


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize(
    ("activation", "kind"), [("tanh", nn.Tanh), ("relu", nn.ReLU), (TEMPERED, TemperedSigmoid)]
)
def test_every_network_of_the_paper_takes_an_activation(name, activation, kind):
    network = build_network({"name": name, "activation": activation})
    kinds = {type(module) for module in network.modules()}
    assert kinds & {nn.Tanh, nn.ReLU, TemperedSigmoid} == {kind}
    default = build_network({"name": name})
    assert list(network.state_dict()) == list(default.state_dict())
    assert nn.Tanh in {type(module) for module in default.modules()}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, of the features
@pytest.mark.parametrize(("description", "shape"), DESCRIBED)
def test_every_network_takes_the_fast_path(description, shape):
    inputs = inputs_for(description["name"], shape)
    network = build_network(json.loads(json.dumps(description)))
    problem = Problem(network, F.cross_entropy, Examples(inputs, torch.zeros(3, dtype=torch.long)))
    check_model(network, problem.train)
    plan = strategy_for(problem, problem.initial_params(), inputs)
    assert plan.reason is None


def test_every_network_was_tried():
    assert {description["name"] for description, _ in DESCRIBED} == set(NETWORKS)


@pytest.mark.parametrize("height", [8, 9, 15, 16, 28, 33, 224])
def test_the_small_cnn_takes_any_size(height):
    size = {"channels": 3, "height": height, "width": 11}
    network = build_network({"name": "small-cnn", **size, "classes": 5})
    assert network(torch.zeros(2, 3, height, 11)).shape == (2, 5)
    assert sum(value.numel() for value in network.parameters()) < 60_000


@pytest.mark.parametrize(
    ("description", "words"),
    [
        ({"name": "resnet"}, "unknown network 'resnet'; choose one of pixel-cnn"),
        ({}, "unknown network None"),
        ({"name": ["mlp"]}, "unknown network"),
        ({"name": "pixel-cnn", "clases": 3}, "pixel-cnn.*clases.*it takes classes, activation"),
        ({"name": "pixel-cnn", "classes": 0}, "classes must be a whole number"),
        ({"name": "imdb-lstm", "words": 0}, "words must be a whole number"),
        ({"name": "linear", "inputs": 3}, "linear.*classes"),
        ({"name": "linear", "inputs": 0, "classes": 3}, "inputs"),
        ({"name": "mlp", "inputs": 3, "hidden": [4, 0], "classes": 3}, "hidden"),
        (
            {"name": "small-cnn", "channels": 1, "height": 28, "width": 7, "classes": 3},
            "at least 8x8, got width 7",
        ),
        ({"name": "pixel-cnn", "activation": "gelu"}, "unknown activation 'gelu'"),
        ({"name": "pixel-cnn", "activation": {"name": "tanh", "scale": 1}}, "tanh.*no arguments"),
        (
            {"name": "pixel-cnn", "activation": {"name": "tempered-sigmoid", "temperature": 0}},
            "temperature",
        ),
    ],
)
def test_descriptions_that_cannot_be_are_refused(description, words):
    with pytest.raises(InvalidInputError, match=words):
        build_network(description)


def test_the_default_tempered_sigmoid_is_tanh():
    numbers = torch.linspace(-20, 20, 401, dtype=torch.float64, requires_grad=True)
    ours, tanh = build_activation("tempered-sigmoid")(numbers), torch.tanh(numbers)
    torch.testing.assert_close(ours, tanh, atol=1e-14, rtol=0)
    slopes = [torch.autograd.grad(values.sum(), numbers)[0] for values in (ours, tanh)]
    torch.testing.assert_close(*slopes, atol=1e-14, rtol=0)
    assert (TemperedSigmoid(2, 2, 0.99)(numbers) - tanh).abs().min() > 1e-3


def test_a_tempered_sigmoid_is_what_its_parameters_say():
    numbers = torch.tensor([-1.0, 0.0, 2.0])
    expected = 1.5 / (1 + torch.exp(-3.0 * numbers)) - 0.5
    torch.testing.assert_close(build_activation(TEMPERED)(numbers), expected)
