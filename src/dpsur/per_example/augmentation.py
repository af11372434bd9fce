"""Several views of a record, whose gradients are averaged inside its one clipped gradient."""

from collections.abc import Callable
from typing import Any

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.functional.tree import TensorTree, map_tensors, row_count, signature

# Of a model's inputs to inputs of the same structure, shapes and types, row by row.
Augment = Callable[[Any], Any]


def repeat_rows(rows: TensorTree, views: int) -> TensorTree:
    """Every row as often as there are views, one after the other."""
    return map_tensors(lambda value: value.repeat_interleave(views, 0), rows)


def check_augmentation(augment: Augment | None, views: int) -> None:
    """Refuse what is no augmentation."""
    checks.at_least_one("views", views)
    if augment is None and views > 1:
        raise InvalidInputError(f"views={views} needs augment=..., which makes them different")
    if augment is not None and not callable(augment):
        raise InvalidInputError("augment must be a function of the model's inputs")


def augmented(augment: Augment, rows: TensorTree) -> TensorTree:
    """The rows of one record after the augmentation, which keeps their structure and shapes.

    It is called in the record level: what it does to a record cannot depend on other records.
    """
    kind, rows_before, before = type(rows), row_count(rows), signature(rows)
    found = augment(rows)
    if type(found) is not kind or row_count(found) != rows_before or signature(found) != before:
        raise InvalidInputError(
            "augment must return what it is given: the same structure, number of rows, shapes and "
            "types"
        )
    return found
