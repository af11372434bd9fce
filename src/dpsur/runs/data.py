"""From what a user has to checked tensors."""

import functools
import random
import warnings
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from dpsur.errors import InvalidInputError
from dpsur.functional.model_loss import split_labels
from dpsur.functional.problem import LossFunction, same_bits
from dpsur.functional.records import Examples, StreamedExamples, stream
from dpsur.functional.tree import (
    TensorTree,
    describe_rows,
    flatten,
    map_tensors,
    tensors_of,
)
from dpsur.runs.streaming import (
    HELD_BYTES,
    ArrayReader,
    DataSetReader,
    is_mapped,
    record_bytes,
    stack_records,
    usual_workers,
)

# Records of a data set that are read again, to see whether it draws them at random.
_READ_AGAIN = 16
CLASSIFICATION_LOSSES = (F.cross_entropy, F.nll_loss)
CLASSIFICATION_LOSS_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)


def as_examples(
    data: Any,
    name: str,
    fraction: torch.dtype = torch.float32,
    *,
    workers: int | None = None,
    held_bytes: int | None = None,
) -> Examples:
    """Take a pair of tensors or arrays, a map-style data set or ready examples.

    Inputs and targets may be several tensors each, in tuples, dicts or dataclasses. A dict with
    labels, as Hugging Face data sets have it, is split into both. Fractions in numpy arrays, which
    are double by default, become numbers of the type `fraction`. Arrays in files that are mapped
    into memory are streamed, and so are data sets that take more than `held_bytes` or are given
    `workers`. Values are for `check_values` to check.
    """
    if isinstance(data, Mapping):
        data = split_labels(data) or data
    _check_kind(data, name)
    if isinstance(data, Examples):
        examples = data
    elif _is_pair_of_columns(data):
        mapped = any(map(is_mapped, _arrays(data)))
        inputs, targets = (_tree(part, name, None if mapped else fraction) for part in data)
        for part in tensors_of((inputs, targets)):
            if not part.dim():
                raise InvalidInputError(f"{name} must have a row per record, got a single number")
        examples = Examples(inputs, targets)
        if mapped and len(examples):
            return stream(ArrayReader(inputs, targets, fraction), len(examples))
    elif hasattr(data, "__getitem__") and isinstance(data, Sized):
        examples = _read_data_set(data, name, fraction, workers, held_bytes)
    else:
        raise InvalidInputError(
            f"{name} must be a pair of tensors or a map-style data set with a length, "
            f"got {type(data).__name__}"
        )
    if len(examples) == 0:
        raise InvalidInputError(f"{name} is empty; there must be at least one record")
    return examples


def _check_kind(data: Any, name: str) -> None:
    """Refuse what people pass by mistake, and say what to pass instead."""
    pair = "a pair (inputs, targets)"
    if isinstance(data, type):
        raise InvalidInputError(f"{name} is the class {data.__name__}; pass an instance of it")
    if isinstance(data, DataLoader):
        raise InvalidInputError(
            f"{name} is a DataLoader, but batches are drawn at random for privacy; pass its data "
            "set: loader.dataset"
        )
    if isinstance(data, (str, bytes, Mapping, IterableDataset)) or data is None:
        raise InvalidInputError(
            f"{name} must be {pair} of tensors, a dict of tensors with labels, or a map-style data "
            f"set with a length, got {type(data).__name__}"
        )
    if _is_array(data):
        if hasattr(data, "columns"):
            raise InvalidInputError(
                f"{name} is a data frame, whose columns must be declared; pass "
                f"schema=dpsur.Schema(...), or {pair} of arrays"
            )
        kind = "tensor" if isinstance(data, Tensor) else "array"
        raise InvalidInputError(f"{name} is one {kind}; pass {pair} of them")
    if isinstance(data, tuple) and len(data) != 2 and data and all(map(_is_array, data)):
        raise InvalidInputError(f"{name} has {len(data)} parts; pass {pair}")


def _is_array(values: Any) -> bool:
    return isinstance(values, (Tensor, np.ndarray)) or hasattr(values, "__array__")


def _is_column(values: Any) -> bool:
    """Whether this holds a value for every record: an array, or a list that is not a record."""
    if not isinstance(values, list):
        return _is_array(values)
    nested = [isinstance(value, list) or _is_array(value) for value in values[:2]]
    return len(values) != 2 or nested[0] == nested[1]


def _is_pair_of_columns(data: Any) -> bool:
    """Whether this is a pair (inputs, targets) with a row per record in each of their tensors."""
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        return False
    if all(map(_is_column, data)):
        return True
    if isinstance(data, list) or not any(map(_is_structure, data)):
        return False
    if any(isinstance(part, Mapping) for part in data):
        return True
    lengths = {len(value) if np.ndim(value) else None for value in _arrays(data)}
    return len(lengths) == 1 and None not in lengths  # otherwise two records


def _is_structure(values: Any) -> bool:
    """Whether this is a tree of several arrays, not a vector that is written as a tuple."""
    if isinstance(values, Mapping) or (is_dataclass(values) and not isinstance(values, type)):
        return True
    return isinstance(values, tuple) and any(
        isinstance(value, (Tensor, np.ndarray)) or _is_structure(value) for value in values
    )


def _arrays(values: Any) -> list[Any]:
    if isinstance(values, (tuple, list)):
        return [one for value in values for one in _arrays(value)]
    if _is_structure(values):
        held = values if isinstance(values, Mapping) else vars(values)
        return [one for value in held.values() for one in _arrays(value)]
    return [values]


def _tree(values: Any, name: str, fraction: torch.dtype | None) -> TensorTree:
    """A tree of tensors of a tree of arrays; None stays. Without `fraction` nothing is copied."""
    if values is None:
        return None
    if not _is_structure(values):
        return _tensor(values, name, fraction)
    if isinstance(values, Mapping) and not is_dataclass(values):
        return {str(key): _tree(value, name, fraction) for key, value in values.items()}
    if isinstance(values, tuple):
        parts = [_tree(value, name, fraction) for value in values]
        return type(values)(*parts) if hasattr(values, "_fields") else tuple(parts)
    held = {field.name: getattr(values, field.name) for field in fields(values) if field.init}
    return replace(values, **{key: _tree(value, name, fraction) for key, value in held.items()})


def _tensor(values: Any, name: str, fraction: torch.dtype | None) -> Tensor:
    try:
        if fraction is None and isinstance(values, np.ndarray):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of an array that cannot be written to, nor is
                return torch.from_numpy(values)
        if isinstance(values, list):
            tensor = torch.tensor(values)
            return tensor.to(fraction) if tensor.is_floating_point() else tensor
        if not isinstance(values, Tensor) and hasattr(values, "__array__"):
            values = np.asarray(values)
            tensor = torch.from_numpy(values if values.flags.writeable else values.copy())
            return tensor.to(fraction) if tensor.is_floating_point() else tensor
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(
            f"{name} holds what cannot be made a tensor ({type(error).__name__}); convert it to "
            "numbers first",
            private=str(error),
        ) from None  # its words may quote a record


def _read_data_set(
    data: Any, name: str, fraction: torch.dtype, workers: int | None, held_bytes: int | None
) -> Examples:
    """The records of a data set: held, or streamed by workers."""
    count = len(data)
    if count == 0:
        raise InvalidInputError(f"{name} is empty; there must be at least one record")
    convert = partial(_record, name=name, fraction=fraction)
    with generators_restored():
        size = count * record_bytes(convert(data[0]))
    if workers is None and size <= (HELD_BYTES if held_bytes is None else held_bytes):
        return _stack(data, name, fraction)
    _check_steady(data, {row: convert(data[row]) for row in _some_rows(count)}, name, fraction)
    workers = usual_workers() if workers is None else workers
    return stream(DataSetReader(data, convert, workers), count)


def _record(item: Any, *, name: str, fraction: torch.dtype | None) -> tuple[TensorTree, TensorTree]:
    """A record of a data set as trees of tensors."""
    if isinstance(item, Mapping):
        item = split_labels(item) or item
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise InvalidInputError(
            f"a record of {name} is not a pair (input, target) or a dict with labels; return a "
            "pair for every record",
            private=f"it is of type {type(item).__name__}",
        )
    one, other = (_tree(part, name, fraction) for part in item)
    return one, other


def _stack(data: Any, name: str, fraction: torch.dtype | None) -> Examples:
    inputs, targets = [], []
    for index in range(len(data)):
        one, other = _record(data[index], name=name, fraction=fraction)
        inputs.append(one)
        targets.append(other)
        if _shapes(one) != _shapes(inputs[0]) or _shapes(other) != _shapes(targets[0]):
            raise InvalidInputError(
                f"the records of {name} have inputs or targets of several shapes; pad or crop them "
                "to one shape",
                private=f"{name}[{index}] has an input of shape {_shapes(one)} and a "
                f"target of shape {_shapes(other)}, the first record "
                f"{_shapes(inputs[0])} and {_shapes(targets[0])}",
            )
    firsts = {row: (inputs[row], targets[row]) for row in _some_rows(len(inputs))}
    _check_steady(data, firsts, name, fraction)
    return Examples(stack_records(inputs), stack_records(targets))


def _shapes(record: TensorTree) -> Any:
    if isinstance(record, Tensor):
        return tuple(record.shape)
    return {path: tuple(value.shape) for path, value in flatten(record).items()}


def _some_rows(length: int) -> list[int]:
    count = min(length, _READ_AGAIN)
    return [place * length // count for place in range(count)]


def _check_steady(
    data: Any,
    firsts: Mapping[int, tuple[TensorTree, TensorTree]],
    name: str,
    fraction: torch.dtype | None,
) -> None:
    """Refuse a data set that gives a record differently each time.

    `firsts` are records as they were read before.
    """
    with generators_restored():
        for row in list(firsts) * -(-2 * _READ_AGAIN // len(firsts)):
            again = tensors_of(_record(data[row], name=name, fraction=fraction))
            for value, first in zip(again, tensors_of(firsts[row]), strict=True):
                if value.shape != first.shape or not same_bits(value, first):
                    raise InvalidInputError(
                        f"{name} gives another record {row} when it is read twice, as random "
                        "augmentation does: records are read once, so that it would have no "
                        "effect; take the random transform out of the data set"
                    )


@contextmanager
def generators_restored() -> Iterator[None]:
    """Put the generators that a data set may draw from back to where they were."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def check_values(examples: Examples, name: str) -> None:
    """Refuse records with numbers that are not finite."""
    every = flatten({"inputs": examples.inputs, "targets": examples.targets})
    for part, values in every.items():
        if values.dtype.is_floating_point and not _all_finite(values):
            bad = (~values.isfinite()).reshape(len(values), -1).any(1).nonzero().flatten()
            raise InvalidInputError(
                f"the {part} of {name} hold NaN or infinity; clean or impute them first",
                private=f"{len(bad)} records of {name}, first number {int(bad[0])}",
                code="not-finite",
            )


def _all_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite: by the ends, which are found forty times as fast."""
    return not values.numel() or bool(torch.stack(torch.aminmax(values)).isfinite().all())


def check_alike(test: Examples, train: Examples) -> None:
    """Refuse test records of another shape or type than those that are trained on."""
    for part in ("inputs", "targets"):
        found, wanted = getattr(test, part), getattr(train, part)
        if not isinstance(found, Tensor) or not isinstance(wanted, Tensor):
            if _kinds(found, part) != _kinds(wanted, part):
                raise InvalidInputError(
                    f"the {part} of test_set have the {describe_rows(found)}, those of train_set "
                    f"the {describe_rows(wanted)}; prepare both in the same way"
                )
            continue
        same_type = found.dtype == wanted.dtype
        if part == "targets":  # class indices come in several sizes
            same_type = found.dtype.is_floating_point == wanted.dtype.is_floating_point
        if found.shape[1:] != wanted.shape[1:] or not same_type:
            raise InvalidInputError(
                f"the {part} of a record of test_set have the shape {tuple(found.shape[1:])} and "
                f"type {found.dtype}, those of train_set {tuple(wanted.shape[1:])} and "
                f"{wanted.dtype}; prepare both in the same way"
            )


def _kinds(rows: TensorTree, part: str) -> dict[str, Any]:
    """Shapes and types by path; of targets only whether they are whole numbers."""
    return {
        path: (value.shape[1:], value.dtype.is_floating_point if part == "targets" else value.dtype)
        for path, value in flatten(rows).items()
    }


def is_classification(loss: LossFunction) -> bool:
    """Whether the loss takes class indices."""
    if isinstance(loss, functools.partial):
        loss = loss.func
    return loss in CLASSIFICATION_LOSSES or isinstance(loss, CLASSIFICATION_LOSS_MODULES)


def with_indices(examples: Examples, loss: LossFunction) -> Examples:
    """The same records with whole numbers as targets in the type that losses of torch take."""

    def convert(targets: Tensor) -> Tensor:
        kind = targets.dtype
        counts = not (kind.is_floating_point or kind.is_complex)
        if not counts or (kind == torch.bool and not is_classification(loss)):
            return targets
        return targets.long()

    if isinstance(examples, StreamedExamples):
        return examples.with_targets(convert)
    return Examples(examples.inputs, map_tensors(convert, examples.targets))


def check_labels(examples: Examples, outputs: TensorTree, loss: LossFunction, name: str) -> None:
    """Refuse labels that do not fit a classification loss, or that the model has no output for."""
    targets = examples.targets
    if not is_classification(loss):
        return
    for what, values in (("the model returns", outputs), (f"the targets of {name} are", targets)):
        if not isinstance(values, Tensor):
            raise InvalidInputError(
                f"{what} {type(values).__name__}, but a classification loss takes one tensor; "
                "write a loss that picks it, such as lambda outputs, targets: "
                "F.cross_entropy(outputs['logits'], targets)"
            )
    if outputs.dim() < 2:
        raise InvalidInputError(
            f"the model returns outputs of shape {tuple(outputs.shape)}; a classification loss "
            "needs one score per class"
        )
    if outputs.shape[1] == 1:
        raise InvalidInputError(
            "the model has one output, and the cross entropy of a single class is always 0; pass "
            "loss=F.mse_loss for regression or loss=F.binary_cross_entropy_with_logits, or give "
            "the model one output per class"
        )
    if targets.dtype.is_floating_point and targets.shape[1:] == outputs.shape[1:]:
        return  # probabilities of the classes
    if targets.dtype.is_floating_point:
        raise InvalidInputError(
            f"the labels of {name} are of type {targets.dtype}; a classification loss needs class "
            "indices: convert them with .long()"
        )
    if targets.shape[1:] != outputs.shape[2:]:
        raise InvalidInputError(
            f"a label of {name} has the shape {tuple(targets.shape[1:])}; for outputs of shape "
            f"{tuple(outputs.shape[1:])} a classification loss needs the shape "
            f"{tuple(outputs.shape[2:])}: reshape the labels, such as with .squeeze(1)"
        )
    classes = outputs.shape[1]
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= classes:
        raise InvalidInputError(
            f"{name} holds a label that the model has no output for: it has {classes} outputs, for "
            f"the labels 0 to {classes - 1}; fix the labels or widen the model",
            private=f"the labels of {name} run from {low} to {high}",
        )
