"""`fit` with several inputs, outputs and targets per record."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpsur
from dpsur.errors import InvalidInputError
from dpsur.runs.data import as_examples, check_alike
from dpsur.runs.fit import _count

SIZE, WIDTH, WORDS = 60, 4, 9
GENERATOR = torch.Generator().manual_seed(0)
WORD_ROWS = torch.randint(0, WORDS, (SIZE, 6), generator=GENERATOR)
NUMBERS = torch.randn(SIZE, WIDTH, generator=GENERATOR)
CLASSES = (NUMBERS[:, 0] > 0).long()
BUDGET = dpsur.Budget(epsilon=8.0, delta=1e-3)


@dataclass
class Outputs:
    logits: torch.Tensor
    size: torch.Tensor


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, words, numbers):
        found = self.layer(torch.tanh(self.table(words).mean(1) + numbers))
        return Outputs(found[:, :2], found[:, 2])


def loss(outputs, targets):
    return F.cross_entropy(outputs.logits, targets["class"]) + F.mse_loss(
        outputs.size, targets["size"]
    )


INPUTS = {"words": WORD_ROWS, "numbers": NUMBERS}
TARGETS = {"class": CLASSES, "size": NUMBERS[:, 1]}


class Records:
    """A map-style data set of pairs of dicts, with plain numbers in them."""

    def __len__(self):
        return SIZE

    def __getitem__(self, row):
        inputs = {"words": WORD_ROWS[row].tolist(), "numbers": NUMBERS[row].numpy()}
        return inputs, {"class": int(CLASSES[row]), "size": NUMBERS[row, 1]}


SETS = {
    "pair of dicts": (INPUTS, TARGETS),
    "arrays": (
        {"words": WORD_ROWS.numpy(), "numbers": NUMBERS.numpy().astype(np.float64)},
        TARGETS,
    ),
    "data set": Records(),
    "positional": ((WORD_ROWS, NUMBERS), TARGETS),
}
METHODS = {
    "dpsur": dpsur.Dpsur(batch_size=20, updates=3),
    "dpsgd": dpsur.Dpsgd(batch_size=20, updates=3),
    "nonprivate": dpsur.Nonprivate(batch_size=20, updates=3),
}


def fit(data, method, **options):
    torch.manual_seed(0)
    return dpsur.fit(
        Mixed(), data, loss=loss, budget=BUDGET, method=method, seed=3, device="cpu", **options
    )


@pytest.mark.parametrize("method", METHODS)
def test_every_form_of_the_same_records_gives_the_same_weights(method):
    runs = {
        name: fit(data, METHODS[method], test_set=data).model.state_dict()
        for name, data in SETS.items()
    }
    torch.manual_seed(0)
    start = Mixed().state_dict()
    first = runs.pop("pair of dicts")
    assert any(not torch.equal(first[name], start[name]) for name in start)
    for name, weights in runs.items():
        assert all(torch.equal(weights[key], first[key]) for key in first), name


def test_a_loss_that_needs_one_tensor_is_told_apart():
    with pytest.raises(InvalidInputError, match="the model returns Outputs.*write a loss"):
        dpsur.fit(
            Mixed(), (INPUTS, CLASSES), loss=F.cross_entropy, budget=BUDGET, method=METHODS["dpsgd"]
        )


def test_a_word_without_a_row_in_the_table_is_refused():
    wrong = {"words": WORD_ROWS + WORDS, "numbers": NUMBERS}
    with pytest.raises(InvalidInputError, match="embedding table has no row"):
        fit((wrong, TARGETS), METHODS["dpsgd"])


def test_rows_that_do_not_match_are_refused():
    with pytest.raises(InvalidInputError, match=r"inputs\[numbers\] has 59 rows"):
        fit(({"words": WORD_ROWS, "numbers": NUMBERS[1:]}, TARGETS), METHODS["dpsgd"])
    with pytest.raises(InvalidInputError, match="inputs/numbers of train_set hold NaN"):
        fit(({"words": WORD_ROWS, "numbers": NUMBERS / 0}, TARGETS), METHODS["dpsgd"])


def test_test_records_of_another_structure_are_refused():
    train = as_examples((INPUTS, TARGETS), "train_set")
    check_alike(train, train)
    for other in ({"words": WORD_ROWS}, NUMBERS, {"words": WORD_ROWS, "numbers": NUMBERS.double()}):
        with pytest.raises(InvalidInputError, match="prepare both in the same way"):
            check_alike(as_examples((other, TARGETS), "test_set"), train)


def test_pairs_of_numbers_are_still_records():
    two = as_examples([((1.0, 2.0), 0), ((3.0, 4.0), 1)], "train_set")
    assert two.inputs.tolist() == [[1, 2], [3, 4]]
    assert two.targets.tolist() == [0, 1]
    tensors = [(torch.ones(3), torch.tensor(1)), (torch.zeros(3), torch.tensor(0))]
    for form in (tensors, tuple(tensors)):
        assert as_examples(form, "train_set").inputs.shape == (2, 3)


def test_columns_of_a_mapping_are_not_counted_as_records():
    columns = {"input_ids": torch.zeros(7, 3), "labels": torch.zeros(7)}
    assert _count(columns) == _count((columns, torch.zeros(7))) == 7
    assert _count(({"a": torch.zeros(7)}, {"b": torch.zeros(7)})) == 7
    assert _count(iter([])) is None
