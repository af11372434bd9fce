"""Random numbers of a function: none that a record draws depends on the records before it."""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from dpsur.errors import CouplingError
from dpsur.functional.process_settings import seeded_globally
from dpsur.per_example.record_function import RecordFunction, Way
from tests.mutants import Mutant, law_tests

CPU = torch.device("cpu")


def gradients(function, records):
    """Each record's gradient, and the way in which they were found."""
    model = nn.Linear(3, 1)
    torch.manual_seed(0)
    nn.init.normal_(model.weight)
    found = RecordFunction((model,), dict(model.named_parameters()))
    tape, *_ = found.tape(
        lambda one: function(model, one),
        records[:, None],
        len(records),
        randomness=lambda: seeded_globally(5, CPU),
    )
    (way,) = found.ways.values()
    return tape.per_example("weight").flatten(1), way


def seeded_by_a_record(model, x):
    """Draws, then leaves its generators as the record says."""
    drawn = torch.rand(3) + torch.tensor(np.random.rand(3) + random.random()).float()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(int(x.abs().sum() * 100))
    return (model(x) * drawn.sum()).mean()


def records_do_not_seed_each_other():
    one, other = torch.ones(2, 3), torch.ones(2, 3)
    other[0] *= 2
    try:
        first, way = gradients(seeded_by_a_record, one)
    except CouplingError as error:  # the first record has another loss after the others
        raise AssertionError from error
    second, _ = gradients(seeded_by_a_record, other)
    assert way is Way.ALONE
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first[1], second[1])


def generators_are_shared(monkeypatch):
    monkeypatch.setattr(
        "dpsur.per_example.record_function._own_draws",
        lambda _, records: [nullcontext] * records,
    )


test_laws, test_mutants = law_tests([Mutant(records_do_not_seed_each_other, generators_are_shared)])


@pytest.mark.parametrize("drawn", [lambda: torch.rand([]), lambda: torch.rand(()).item()])
def test_layers_may_be_left_out_by_one_random_number(drawn):
    """As models of transformers do it; the number is one for the batch."""

    def function(model, x):
        return model(x).mean() if drawn() < 0.5 else 2 * model(x).mean()

    found, way = gradients(function, torch.ones(4, 3))
    assert way is Way.LEVEL
    assert torch.equal(found, found[:1].expand(4, 3))


def test_generators_of_the_program_go_on_as_they_were():
    np.random.seed(1)
    random.seed(1)
    wanted = np.random.rand(), random.random(), torch.initial_seed()
    np.random.seed(1)
    random.seed(1)
    with seeded_globally(3, CPU):
        inside = np.random.rand(), random.random()
    assert wanted == (np.random.rand(), random.random(), torch.initial_seed())
    with seeded_globally(3, CPU):
        assert inside == (np.random.rand(), random.random())
