"""What is stored about the data: the same sums, within a budget, and never for other values."""

import gc
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.mechanism.gaussian import padded_batch
from dpsur.mechanism.streams import BATCH, Streams
from dpsur.per_example import clipped_sum, memory_budget
from dpsur.per_example import tape as stored
from tests.per_example.test_gradient_rules import clipped, gradients

SIZE, BOUND = 40, 0.05
PICKED = torch.tensor([3, 0, 3, 39, 17])


def convolution():
    return nn.Sequential(nn.Conv2d(9, 4, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(16, 3))


def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(9 * 3 * 3, 3))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 3)

    def forward(self, words):
        return self.head(self.table(words).mean(1))


def problem_of(build):
    torch.manual_seed(1)
    inputs = torch.randint(0, 6, (SIZE, 7)) if build is Words else torch.randn(SIZE, 9, 3, 3)
    examples = Examples(inputs, torch.randint(0, 3, (SIZE,)))
    return Problem(build().double() if build is not Words else build(), F.cross_entropy, examples)


def doubled(problem):
    if not problem.train.inputs.is_floating_point():
        return problem
    return Problem(
        problem.model,
        problem.loss,
        Examples(problem.train.inputs.double(), problem.train.targets),
    )


def assert_same(ours, expected):
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("build", [convolution, linear, Words])
@pytest.mark.parametrize("room", [memory_budget.PART_FOR_TABLES, 0])
def test_stored_or_not_the_sum_is_the_same(build, room, monkeypatch):
    monkeypatch.setattr(memory_budget, "PART_FOR_TABLES", room)
    problem = doubled(problem_of(build))
    params = problem.initial_params()
    expected = clipped(gradients(problem, params, problem.train.select(PICKED)), BOUND)
    for _ in range(2):  # when a table is made, and when it is there
        total = clipped_sum(problem, params, problem.train, BOUND, rows=PICKED)
        assert_same(total.params, expected)


def test_padded_batches_use_the_tables():
    problem = doubled(problem_of(convolution))
    params = problem.initial_params()
    batch = padded_batch(problem.train, 0.2, Streams(3, problem.device).at(1)[BATCH])
    drawn = batch.examples.select(batch.mask.nonzero()[:, 0])
    expected = clipped(gradients(problem, params, drawn), BOUND)
    total = clipped_sum(problem, params, problem.train, BOUND, mask=batch.mask, rows=batch.rows)
    assert_same(total.params, expected)
    assert len(problem.tables) > 2


def test_a_table_without_room_is_not_made(monkeypatch):
    monkeypatch.setattr(memory_budget, "PART_FOR_TABLES", 1e-12)
    problem = doubled(problem_of(convolution))
    clipped_sum(problem, problem.initial_params(), problem.train, BOUND, rows=PICKED)
    assert not any(isinstance(table, torch.Tensor) for table in problem.tables.values())


def test_tables_go_with_their_problem():
    problem = doubled(problem_of(convolution))
    clipped_sum(problem, problem.initial_params(), problem.train, BOUND, rows=PICKED)
    tables = [ref(table) for table in problem.tables.values() if isinstance(table, torch.Tensor)]
    assert tables
    del problem
    gc.collect()
    assert not any(table() is not None for table in tables)


def largest_contribution(problem):
    """In units of the bound, over the picked records."""
    params = problem.initial_params()
    totals = [
        clipped_sum(problem, params, problem.train, BOUND, rows=row).params
        for row in PICKED.split(1)
    ]
    sizes = [sum(value.square().sum() for value in total.values()).sqrt() for total in totals]
    return float(max(sizes)) / BOUND


def enlarged(tensor, how):
    """Write to the data, so that PyTorch counts it or behind its back."""
    if how == "counted":
        tensor.mul_(1e3)
    else:
        array = tensor.numpy()
        array *= 1e3


@pytest.mark.parametrize("how", ["counted", "behind its back"])
def test_data_that_was_changed_between_two_problems_is_measured_again(how):
    problem = doubled(problem_of(convolution))
    assert largest_contribution(problem) <= 1 + 1e-9
    enlarged(problem.train.inputs, how)
    again = Problem(problem.model, problem.loss, problem.train)
    assert largest_contribution(again) <= 1 + 1e-9


def test_data_that_is_changed_meanwhile_is_measured_again():
    problem = doubled(problem_of(convolution))
    assert largest_contribution(problem) <= 1 + 1e-9
    enlarged(problem.train.inputs, "counted")
    assert largest_contribution(problem) <= 1 + 1e-9


def test_a_stale_input_cache_breaks_clipping():
    """The control: the tables of a problem before its data was changed."""
    problem = doubled(problem_of(convolution))
    largest_contribution(problem)
    enlarged(problem.train.inputs, "behind its back")
    assert largest_contribution(problem) > 2


class InPlace(nn.Module):
    """Overwrites its input, so that what is stored about the data does not apply."""

    def __init__(self):
        super().__init__()
        self.body = convolution()

    def forward(self, x):
        return self.body(x.mul_(100.0))


def test_inputs_that_a_model_overwrites_are_not_looked_up():
    problem = doubled(problem_of(lambda: InPlace()))
    params = problem.initial_params()
    total = clipped_sum(problem, params, problem.train, BOUND, rows=PICKED)
    larger = Examples(100.0 * problem.train.inputs, problem.train.targets)
    plain = Problem(problem.model.body, problem.loss, larger)
    expected = clipped(gradients(plain, plain.initial_params(), larger.select(PICKED)), BOUND)
    assert_same({n.removeprefix("body."): v for n, v in total.params.items()}, expected)


def test_without_the_check_such_inputs_pass_the_clip(monkeypatch):
    """The control: norms of the stored values are far too small."""

    def at_the_same_place(self, values):
        return values.data_ptr() == self.inputs.data_ptr() and values.shape == self.inputs.shape

    monkeypatch.setattr(stored.KnownInputs, "holds", at_the_same_place)
    problem = doubled(problem_of(lambda: InPlace()))
    total = clipped_sum(problem, problem.initial_params(), problem.train, BOUND, rows=PICKED[:1])
    norm = torch.sqrt(sum(value.square().sum() for value in total.params.values()))
    assert norm > 2 * BOUND


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_record_that_is_not_finite_adds_nothing(bad):
    problem = doubled(problem_of(convolution))
    params = problem.initial_params()
    good = clipped(gradients(problem, params, problem.train.select(PICKED[1:2])), BOUND)
    problem.train.inputs[3, 0, 0, 0] = bad
    total = clipped_sum(problem, params, problem.train, BOUND, rows=PICKED[:2])
    assert_same(total.params, good)
