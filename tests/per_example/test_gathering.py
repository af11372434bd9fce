"""Inputs that are gathered with their channels innermost give the same sums."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.mechanism.sampling import padded_batch
from dpsur.mechanism.streams import BATCH, Streams
from dpsur.per_example import GradientBudget, clipped_sum
from dpsur.per_example import input_cache as gathering
from dpsur.per_example.engine_choice import plan_for
from dpsur.per_example.input_cache import channels_last_pays, gather
from tests.per_example.test_gradient_rules import clipped, gradients

SIZE, CHANNELS, SIDE, BOUND = 40, 64, 5, 0.05
PICKED = torch.tensor([3, 0, 3, 39, 17])


def network(width=4, **options):
    first = nn.Conv2d(CHANNELS, width, 3, padding=1, **{"stride": 2, **options})
    return nn.Sequential(first, nn.Tanh(), nn.Conv2d(width, 3, 3), nn.Flatten(), nn.LazyLinear(3))


class Viewing(nn.Module):
    """Views its inputs in another shape, which those with the channels innermost do not allow."""

    def __init__(self):
        super().__init__()
        self.body, self.head = network(), nn.Linear(CHANNELS * SIDE * SIDE, 3)

    def forward(self, x):
        return self.body(x) + self.head(x.view(len(x), -1))


def problem_of(model, dtype=torch.float32):
    torch.manual_seed(1)
    inputs = torch.randn(SIZE, CHANNELS, SIDE, SIDE, dtype=dtype)
    examples = Examples(inputs, torch.randint(0, 3, (SIZE,)))
    model = model.to(dtype)
    model(inputs[:1])
    return Problem(model, F.cross_entropy, examples)


def is_channels_last(problem):
    plan = plan_for(problem, problem.initial_params(), problem.train.inputs, GradientBudget())
    return plan.channels_last


def assert_same(ours, expected):
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6)


def picked_sum(problem, **options):
    params = problem.initial_params()
    return clipped_sum(problem, params, problem.train, BOUND, rows=PICKED, **options).params


def expected_sum(problem, rows=PICKED):
    params = problem.initial_params()
    return clipped(gradients(problem, params, problem.train.select(rows)), BOUND)


def test_the_sum_is_the_same_when_the_table_is_made_and_when_it_is_there():
    problem = problem_of(network())
    assert is_channels_last(problem)
    expected = expected_sum(problem)
    for _ in range(2):
        assert_same(picked_sum(problem), expected)
    assert problem.places["inputs"].shape[1:] == (SIDE, SIDE, CHANNELS)


def test_without_room_for_a_table_rows_are_gathered_as_they_are():
    problem = problem_of(network())
    tight = GradientBudget(bytes=100)
    assert_same(picked_sum(problem, budget=tight), expected_sum(problem))
    assert problem.places["inputs"].shape[1:] == (CHANNELS, SIDE, SIDE)


def test_gathered_rows_are_the_rows():
    problem = problem_of(network())
    for channels_last in (True, False, True):
        batch = gather(
            problem, problem.train, PICKED, GradientBudget(), channels_last=channels_last
        )
        assert torch.equal(batch.inputs, problem.train.inputs[PICKED])
        assert torch.equal(batch.targets, problem.train.targets[PICKED])
        assert batch.inputs.is_contiguous() is not channels_last


@pytest.mark.parametrize("bad", [0.0, float("nan")])
def test_padded_batches_are_channels_last_too(bad):
    problem = problem_of(network())
    batch = padded_batch(problem.train, 0.2, Streams(3, problem.device).at(1)[BATCH])
    drawn = batch.rows[batch.mask]
    left_out = next(row for row in range(SIZE) if row not in drawn)
    problem.train.inputs[left_out, 0, 0, 0] = bad
    params = problem.initial_params()
    total = clipped_sum(problem, params, problem.train, BOUND, mask=batch.mask, rows=batch.rows)
    assert_same(total.params, expected_sum(problem, drawn))


def test_data_that_is_written_to_is_channels_last_again():
    problem = problem_of(network())
    picked_sum(problem)
    problem.train.inputs.mul_(-2.0)
    assert_same(picked_sum(problem), expected_sum(problem))


def test_later_layers_see_what_they_always_see():
    seen = []
    model = network()
    model[1].register_forward_hook(lambda _, args, __: seen.append(args[0].is_contiguous()))
    problem = problem_of(model)
    assert is_channels_last(problem)
    seen.clear()
    picked_sum(problem)
    assert seen == [True]


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        (Viewing(), torch.float32),
        (network(), torch.float64),
        (network(2 * CHANNELS, stride=1), torch.float32),
        (network(groups=2), torch.float32),
        (nn.Sequential(nn.ReLU(), network()), torch.float32),
        (nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), torch.float32),
    ],
    ids=["views its inputs", "double", "larger outputs", "groups", "not first", "linear"],
)
def test_models_that_do_not_gain_or_cannot_do_with_it_are_given_rows_as_they_are(model, dtype):
    problem = problem_of(model, dtype)
    assert not is_channels_last(problem)
    assert_same(picked_sum(problem), expected_sum(problem))


def test_few_channels_are_left_alone(monkeypatch):
    problem = problem_of(network())
    inputs = problem.train.inputs[:2]
    assert channels_last_pays(problem, problem.initial_params(), inputs)
    monkeypatch.setattr(gathering, "_LEAST_CHANNELS", CHANNELS + 1)
    assert not channels_last_pays(problem, problem.initial_params(), inputs)
