"""Several views of a record, whose gradients are averaged inside its one clipped gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.functional.process_settings import seeded_globally
from dpsur.functional.tree import TensorTree, device_of, map_tensors, row_count, signature
from dpsur.per_example.mixing_check import random_rows, same_bits

# Of a model's inputs to inputs of the same structure, shapes and types, row by row.
Augment = Callable[[Any], Any]
_ROWS = 8


def repeat_rows(rows: TensorTree, views: int) -> TensorTree:
    """Every row as often as there are views, one after the other."""
    return map_tensors(lambda value: value.repeat_interleave(views, 0), rows)


def check_augmentation(augment: Augment | None, views: int, inputs: TensorTree) -> None:
    """Refuse an augmentation that mixes rows or changes their shape, tried on synthetic rows.

    With the same random numbers, a row has to become the same whatever the other rows are.
    """
    checks.at_least_one("views", views)
    if augment is None:
        if views > 1:
            raise InvalidInputError(f"views={views} needs augment=..., which makes them different")
        return
    if not callable(augment):
        raise InvalidInputError("augment must be a function of the model's inputs")
    device = device_of(inputs)
    some, others = (random_rows(inputs, _ROWS, seed) for seed in (0, 1))

    def kept(value: Tensor) -> Tensor:
        return torch.arange(len(value), device=value.device) % 2 == 0

    def replaced(value: Tensor, other: Tensor) -> Tensor:
        return torch.where(kept(value).view(-1, *[1] * (value.dim() - 1)), value, other)

    with torch.no_grad():
        first = _apply(augment, some, device)
        second = _apply(augment, map_tensors(replaced, some, others), device)

    def compare(one: Tensor, other: Tensor) -> None:
        if not same_bits(one[kept(one)], other[kept(other)]):
            raise InvalidInputError(
                "augment changes a record in another way when other records are in the batch (as "
                "mixup does), which no clipping covers; treat each record by itself"
            )

    map_tensors(compare, first, second)


def _apply(augment: Augment, rows: TensorTree, device: torch.device) -> TensorTree:
    with seeded_globally(0, device):
        found = augment(map_tensors(torch.clone, rows))
    if (
        row_count(found) != row_count(rows)
        or signature(found) != signature(rows)
        or type(found) is not type(rows)
    ):
        raise InvalidInputError(
            "augment must return what it is given: the same structure, number of rows, shapes and "
            "types"
        )
    return found
