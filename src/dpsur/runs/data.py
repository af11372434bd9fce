"""Records of a run: tensors, host memory, or data sets that are read as they are needed.

Checks of a loss, of records, labels and tokens before a run, each with a remedy.
"""

import copy
import hashlib
import multiprocessing
import os
import random
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, IterableDataset

from dpsur import checks
from dpsur.errors import InvalidInputError, UnsupportedModelError, from_custom_code
from dpsur.functional.model_loss import split_labels
from dpsur.functional.problem import (
    EVALUATION_ROWS,
    LossFunction,
    call,
    losses_one_by_one,
    mode,
    same_bits,
    weight_by_record,
)
from dpsur.functional.process_settings import seeded_globally
from dpsur.functional.records import SEVERAL_SHAPES, Examples, StreamedExamples, stream
from dpsur.functional.tree import (
    TensorTree,
    concatenate_rows,
    describe_rows,
    device_of,
    flatten,
    map_tensors,
    row_count,
    slice_rows,
    split_rows,
    tensors_of,
)

# Records of a data set that are read again, to see whether it draws them at random.
_READ_AGAIN = 16
# One record of a data set as trees of tensors (inputs, targets).
Convert = Callable[[Any], tuple[TensorTree, TensorTree]]
CLASSIFICATION_LOSSES = (F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss, nn.NLLLoss)


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

            def read(rows: Tensor) -> Examples:
                def some(values: Tensor) -> Tensor:
                    found = values.index_select(0, rows)
                    return found.to(fraction) if found.is_floating_point() else found

                return Examples(map_tensors(some, inputs), map_tensors(some, targets))

            return stream(read, len(examples))
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


class Collated(torch.utils.data.Dataset[Any]):
    """A data set whose records a collate function makes tensors of, each record alone.

    What a function does with several records at once, such as padding to the longest, would let a
    record change others; alone it pads to a length of its own choice.
    """

    def __init__(self, data: Any, collate: Callable[[Any], Any]) -> None:
        self._data, self._collate = data, collate

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, place: int) -> Any:
        return map_tensors(lambda values: values[0], self._collate([self._data[place]]))


def _check_kind(data: Any, name: str) -> None:
    pair = "a pair (inputs, targets)"
    if isinstance(data, type):
        raise InvalidInputError(f"{name} is the class {data.__name__}; pass an instance of it")
    if isinstance(data, DataLoader):
        raise InvalidInputError(
            f"{name} is a DataLoader, but batches are drawn at random for privacy; pass its data "
            "set, loader.dataset, and if it has a function of its own collate=loader.collate_fn"
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
    return hasattr(values, "__array__")  # tensors too


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
    count, convert = len(data), partial(_record, name=name, fraction=fraction)
    if count == 0:
        raise InvalidInputError(f"{name} is empty; there must be at least one record")
    with generators_restored():
        size = count * sum(value.nbytes for value in tensors_of(convert(data[0])))
    some = [place * count // min(count, _READ_AGAIN) for place in range(min(count, _READ_AGAIN))]
    if workers is None and size <= (HELD_BYTES if held_bytes is None else held_bytes):
        records = _read_all(data, name, convert)
        _check_steady(data, {row: records[row] for row in some}, name, convert)
        inputs, targets = zip(*records, strict=True)
        return Examples(_stacked(inputs), _stacked(targets))
    _check_steady(data, {row: convert(data[row]) for row in some}, name, convert)
    if workers is None:
        workers = min(MOST_WORKERS, max(1, len(os.sched_getaffinity(0)) - 1))
    return stream(DataSetReader(data, convert, workers), count)


def _record(item: Any, *, name: str, fraction: torch.dtype) -> tuple[TensorTree, TensorTree]:
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


def _read_all(data: Any, name: str, convert: Convert) -> list[tuple[TensorTree, TensorTree]]:
    records: list[tuple[TensorTree, TensorTree]] = []
    for index in range(len(data)):
        records.append(convert(data[index]))
        one, other = map(_shapes, records[-1])
        first, second = map(_shapes, records[0])
        if (one, other) != (first, second):
            raise InvalidInputError(
                f"the records of {name} have inputs or targets of several shapes; pad or crop them "
                "to one shape",
                private=f"{name}[{index}] has an input of shape {one} and a target of shape "
                f"{other}, the first record {first} and {second}",
            )
    return records


def _shapes(record: TensorTree) -> Any:
    if isinstance(record, Tensor):
        return tuple(record.shape)
    return {path: tuple(value.shape) for path, value in flatten(record).items()}


def _check_steady(
    data: Any, firsts: Mapping[int, tuple[TensorTree, TensorTree]], name: str, convert: Convert
) -> None:
    """Refuse a data set that gives a record differently each time.

    `firsts` are records as they were read before.
    """
    with generators_restored():
        for row in list(firsts) * -(-2 * _READ_AGAIN // len(firsts)):
            again = tensors_of(convert(data[row]))
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
    every = flatten({"inputs": examples.inputs, "targets": examples.targets})
    for part, values in every.items():
        if not values.dtype.is_floating_point or not values.numel():
            continue
        # by the ends, which are found forty times as fast as all that is not finite
        if not bool(torch.stack(torch.aminmax(values)).isfinite().all()):
            bad = (~values.isfinite()).reshape(len(values), -1).any(1).nonzero().flatten()
            raise InvalidInputError(
                f"the {part} of {name} hold NaN or infinity; clean or impute them first",
                private=f"{len(bad)} records of {name}, first number {int(bad[0])}",
                code="not-finite",
            )


def check_alike(test: Examples, train: Examples) -> None:
    """Refuse test records of another shape or type than those that are trained on."""
    for part in ("inputs", "targets"):
        found, wanted = getattr(test, part), getattr(train, part)
        kinds = [  # of targets only whether they are whole numbers: indices come in several sizes
            {
                path: (one.shape[1:], one.is_floating_point() if part == "targets" else one.dtype)
                for path, one in flatten(rows).items()
            }
            for rows in (found, wanted)
        ]
        if kinds[0] == kinds[1]:
            continue
        if not isinstance(found, Tensor) or not isinstance(wanted, Tensor):
            raise InvalidInputError(
                f"the {part} of test_set have the {describe_rows(found)}, those of train_set the "
                f"{describe_rows(wanted)}; prepare both in the same way"
            )
        raise InvalidInputError(
            f"the {part} of a record of test_set have the shape {tuple(found.shape[1:])} and type "
            f"{found.dtype}, those of train_set {tuple(wanted.shape[1:])} and {wanted.dtype}; "
            "prepare both in the same way"
        )


def is_one_of(loss: Any, kinds: tuple[Any, ...]) -> bool:
    if isinstance(loss, partial):
        loss = loss.func
    return loss in kinds or isinstance(loss, tuple(k for k in kinds if isinstance(k, type)))


def is_classification(loss: LossFunction) -> bool:
    return is_one_of(loss, CLASSIFICATION_LOSSES)


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


def keyed_draws(records: Examples, key: bytes) -> Iterator[float]:
    """A number in [0, 1) for every record, by a keyed hash of its values alone."""
    inputs, targets = (
        np.ascontiguousarray(part.detach().cpu().numpy()).reshape(len(records), -1).view(np.uint8)
        for part in (records.inputs, records.targets)
    )
    for row, target in zip(inputs, targets, strict=True):
        digest = hashlib.blake2b(row.data, digest_size=8, key=key)
        digest.update(target.data)
        yield (int.from_bytes(digest.digest(), "little") >> 11) / 2**53


# Data sets up to this size are read once and held.
HELD_BYTES = 2 * 2**30
MOST_WORKERS = 4
# Smaller tensors may well be copied, wherever they are.
LEAST_MAPPED = 2**20
# Records that are checked at a time take about this much.
_BYTES_AT_ONCE = 32 * 2**20
# Records that identify a data set which is too large to be read for that.
IDENTIFYING = 512


def is_mapped(values: Any) -> bool:
    """Whether an array or a tensor lies in a file that is mapped into memory."""
    if isinstance(values, Tensor):
        is_plain = values.device.type == "cpu" and values.layout == torch.strided
        return is_plain and values.nbytes >= LEAST_MAPPED and _in_file(values.data_ptr())
    while isinstance(values, np.ndarray):
        if isinstance(values, np.memmap):
            return True
        values = values.base  # a view of a file is in the file
    return False


def _in_file(address: int) -> bool:
    """Whether memory belongs to a file on disk, according to the operating system (Linux)."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:
        span, _, _, _, inode, *path = line.split(maxsplit=5)
        start, _, end = span.partition("-")
        if int(start, 16) <= address < int(end, 16):
            in_memory = path and path[0].startswith(("/dev/shm", "/memfd", "/dev/zero"))
            return inode != "0" and not in_memory
    return False


class DataSetReader:
    """Reads records of a map-style data set, in this process or in several others."""

    def __init__(self, data: Any, convert: Convert, workers: int) -> None:
        self._data, self._convert, self._workers = data, convert, workers
        self._pool: ProcessPoolExecutor | None = None

    def __call__(self, rows: Tensor) -> Examples:
        if not self._workers:
            return _read(self._data, self._convert, rows.tolist())
        parts = [part.tolist() for part in rows.chunk(self._workers)]
        if self._pool is None:
            context = multiprocessing.get_context()
            source = (self._data, self._convert)
            self._pool = ProcessPoolExecutor(self._workers, context, _start_worker, source)
            weakref.finalize(self, self._pool.shutdown, wait=False)
        with warnings.catch_warnings():
            # of a fork beside other threads; a worker only reads, as those of a DataLoader do
            warnings.simplefilter("ignore", DeprecationWarning)
            futures = [self._pool.submit(_read_in_worker, part) for part in parts]
        try:
            found = [future.result() for future in futures]
        except BrokenProcessPool:
            self._pool = None
            raise InvalidInputError(
                "a worker that reads the data set has died, perhaps for lack of memory; resume "
                "with fewer: performance=dpsur.Performance(workers=1)"
            ) from None
        try:
            inputs, targets = zip(*found, strict=True)
            return Examples(concatenate_rows([*inputs]), concatenate_rows([*targets]))
        except RuntimeError as error:
            raise InvalidInputError(SEVERAL_SHAPES, private=str(error)) from None


# What a worker reads from.
_source: tuple[Any, Convert] | None = None


def _start_worker(data: Any, convert: Convert) -> None:
    global _source
    _source = data, convert
    torch.set_num_threads(1)


def _read_in_worker(rows: list[int]) -> tuple[TensorTree, TensorTree]:
    assert _source is not None
    found = _read(*_source, rows)
    return found.inputs, found.targets


def _read(data: Any, convert: Convert, rows: list[int]) -> Examples:
    items = data.__getitems__(rows) if hasattr(data, "__getitems__") else [data[r] for r in rows]
    inputs, targets = zip(*map(convert, items), strict=True)
    try:
        return Examples(_stacked(inputs), _stacked(targets))
    except RuntimeError as error:
        raise InvalidInputError(SEVERAL_SHAPES, private=str(error)) from None


def _stacked(rows: Sequence[TensorTree]) -> TensorTree:
    return map_tensors(lambda *each: torch.stack(each), *rows)


def _rows_at_once(examples: Examples) -> int:
    return max(1, _BYTES_AT_ONCE // max(1, examples.nbytes // max(1, len(examples))))


def checked_parts(examples: Examples) -> Iterator[Examples]:
    """Records to check: all of those that are held at once, streamed ones some at a time."""
    streamed = isinstance(examples, StreamedExamples)
    yield from examples.parts(_rows_at_once(examples)) if streamed else [examples]


def identifying(examples: Examples) -> dict[str, TensorTree]:
    """What identifies the records: themselves, or a sample of records that are not held."""
    if not isinstance(examples, StreamedExamples):
        return {"inputs": examples.inputs, "targets": examples.targets}
    count = min(len(examples), IDENTIFYING, _rows_at_once(examples))
    rows = torch.linspace(0, len(examples) - 1, count, dtype=torch.float64).long()
    some = examples.to(torch.device("cpu")).select(rows)
    count_held = torch.tensor([len(examples)])
    return {"inputs": some.inputs, "targets": some.targets, "count": count_held}


def check_observers(observers: Any) -> None:
    if not isinstance(observers, (list, tuple)):
        given = checks.shown(observers)
        raise InvalidInputError(f"observers must be a list, got {given}; write [observer]")
    for observer in observers:
        missing = [
            name
            for name in ("started", "trials", "evaluated")
            if not callable(getattr(observer, name, None))
        ]
        if isinstance(observer, type) or missing:
            raise InvalidInputError(
                f"observers must have the methods started, trials and evaluated, got "
                f"{checks.shown(observer)}; pass an instance of a class like dpsur.Observer"
            )


def check_is_loss(loss: Any) -> None:
    example = "a function such as F.cross_entropy or a module such as nn.CrossEntropyLoss()"
    if isinstance(loss, type):
        raise InvalidInputError(
            f"loss is the class {loss.__name__}, not a loss; create an instance: {loss.__name__}()"
        )
    if not callable(loss):
        raise InvalidInputError(f"loss must be {example}, got {checks.shown(loss)}")


def check_module(model: Any) -> None:
    """Refuse what is not a network, or one with uninitialised weights or sparse gradients."""
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise UnsupportedModelError(
            f"the model must be a torch.nn.Module, got {given}; build the network and pass it in"
        )
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if hasattr(value, "device_mesh"):
            raise UnsupportedModelError(
                f"{name} is split over several processes (fully_shard, tensor parallelism), and "
                "fit trains a copy on each; pass the model unsharded, or train the sharded one "
                "with dpsur.PrivacyEngine"
            )
        if is_lazy(value):
            raise UnsupportedModelError(
                f"{name} has no shape yet, as in lazy modules; call the model once on inputs of "
                "the right shape before it is passed in"
            )
        if value.is_meta:
            raise UnsupportedModelError(
                f"{name} is on the device meta and holds no numbers; build the model on the cpu, "
                "or use model.to_empty(device='cpu') and initialise it"
            )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise UnsupportedModelError(
                f"module {name or '(root)'} ({type(module).__name__}) makes sparse gradients, to "
                "which noise cannot be added; build it with sparse=False"
            )


# Targets to try: a loss may be undefined for some of them, such as the logarithm of 0.
_TRIED = ((0.5, 0), (1.0, 1), (0.0, 0))
ROWS_AT_ONCE = 4096


def loss_on(loss: LossFunction, device: torch.device) -> LossFunction:
    """The loss as it is applied to single records, with what it holds on the device."""
    if isinstance(loss, nn.Module):
        loss = copy.deepcopy(loss).to(device)
    return weight_by_record(loss)


def check_loss(loss: LossFunction, outputs: TensorTree, targets: TensorTree) -> None:
    """Refuse a loss that does not give one number with a gradient for one record.

    `outputs` are those for synthetic inputs. Of the targets only shape and type are used. A loss
    passes that works for one of several synthetic targets.
    """
    faults: list[str | Exception] = []
    device = device_of(outputs)
    for values in _TRIED:
        # bound now: a closure in a loop would see the last pair
        def filled(one: Tensor, values: tuple[float, int] = values) -> Tensor:
            value = values[0] if one.dtype.is_floating_point else values[1]
            return torch.full_like(one[:1], value, device=device)

        target = map_tensors(filled, targets)
        fault = _fault(loss, slice_rows(outputs, slice(1)), target)
        if fault is None:
            one = map_tensors(Tensor.detach, slice_rows(outputs, slice(1)))
            with without_memory(loss, one, target):  # of itself, with a gradient
                longer = map_tensors(lambda x: 3 * x + 1 if x.is_floating_point() else x, one)
                _fault(loss, longer, target)
            return
        faults.append(fault)
    if isinstance(faults[0], Exception):
        raise faults[0]
    raise InvalidInputError(faults[0])


def _computed(values: Tensor) -> Tensor:
    return values * 1 if values.is_floating_point() else values  # like an output no leaf


@contextmanager
def without_memory(loss: LossFunction, output: TensorTree, target: TensorTree) -> Iterator[None]:
    """Refuse a loss that gives a record another value after it was applied to others."""

    def value() -> Tensor:
        with torch.no_grad(), seeded_globally(0, device_of(output)):
            return loss(map_tensors(_computed, output), target).detach().clone().nan_to_num()

    before = value()
    yield
    if not torch.equal(value(), before):
        raise InvalidInputError(
            "the loss keeps state: it gives a record another value after it was applied to others; "
            "compute it from the arguments of the call and keep nothing"
        )


def check_targets(loss: LossFunction, outputs: TensorTree, targets: TensorTree, name: str) -> None:
    """Refuse records with a target that the loss cannot take, before one of them is drawn.

    A run that such a record ended would reveal that the record is in the data.
    """
    if not tensors_of(targets):
        return
    device = device_of(outputs)

    def repeated(count: int) -> TensorTree:
        return map_tensors(lambda one: one[:1].detach().expand(count, *one.shape[1:]), outputs)

    for part in split_rows(targets, ROWS_AT_ONCE):
        part = map_tensors(lambda value: value.to(device), part)
        try:
            with torch.no_grad(), without_memory(loss, repeated(1), slice_rows(part, slice(1))):
                losses_one_by_one(loss, repeated(row_count(part)), part)
        except (torch.OutOfMemoryError, InvalidInputError):
            raise  # says nothing of the targets
        except Exception as error:  # a custom loss may raise anything
            raise InvalidInputError(
                f"the loss cannot be computed for some target of {name} ({type(error).__name__}); "
                "change the loss or those targets",
                private="".join(traceback.format_exception(error)),
            ) from None  # its words may quote a target


def _fault(loss: LossFunction, output: TensorTree, target: TensorTree) -> str | Exception | None:
    given = describe_rows(output, 1)
    if isinstance(output, Tensor):
        given = f"shape {tuple(output.shape)}"
    about = f"for one record, with outputs of {given} and targets of {describe_rows(target, 1)}"
    leaf = map_tensors(
        lambda x: x.detach().requires_grad_() if x.is_floating_point() else x, output
    )
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # training gives the same warnings
            found: Any = loss(map_tensors(_computed, leaf), target)
    except Exception as error:
        if from_custom_code(error):
            error.add_note(f"dpsur: raised when the loss was tried on synthetic values {about}")
            return error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"the loss cannot be computed {about}: {reason}; change the loss or the targets"
    if not isinstance(found, Tensor):
        kind = type(found).__name__
        return f"the loss must return a tensor of one number, got {kind} {about}; use torch for it"
    if found.numel() != 1:
        return (
            f"the loss must return one number, got the shape {tuple(found.shape)} {about}; reduce "
            "it with .mean() or .sum()"
        )
    if not found.requires_grad:
        return (
            f"the loss has no gradient {about}: it does not depend on the outputs, or was "
            "detached from them; compute it from the outputs by operations of torch"
        )
    if not bool(found.isfinite()):
        return f"the loss is {found.item()} {about}; use a loss that is finite"
    return None


_TABLES = (nn.Embedding, nn.EmbeddingBag)
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_tokens(model: nn.Module, examples: Examples, name: str) -> None:
    """Refuse records with a number that an embedding of the model has no row for.

    First with synthetic records of the least and largest numbers at each place. Where those do not
    fit, a real record is looked for: a model may combine its inputs before it looks them up.
    """
    inputs, place = examples.inputs, next(model.parameters()).device
    # Tables that are no modules are looked up unwatched, and a bad index breaks the CUDA context.
    looks_up = place.type == "cpu" or any(isinstance(one, _TABLES) for one in model.modules())
    if all(value.dtype not in _WHOLE for value in tensors_of(inputs)) or not looks_up:
        return

    def extremes(values: Tensor) -> Tensor:
        if values.dtype in _WHOLE:
            return torch.stack([values.amin(0), values.amax(0)]).to(place)
        return values[[0, -1]].to(place)

    if _table_fault(model, map_tensors(extremes, inputs)) is None:
        return
    for part in split_rows(inputs, EVALUATION_ROWS):
        fault = _table_fault(model, map_tensors(lambda value: value.to(place), part))
        if fault is not None:
            where, number = fault
            raise InvalidInputError(
                f"the inputs of {name} hold a number that {where}; fix the tokens or enlarge the "
                "table",
                private=number,
            ) from None


class _BeyondTable(Exception):  # noqa: N818
    """The embedding that has no row for a number, and the number."""


def _table_fault(model: nn.Module, inputs: TensorTree) -> tuple[str, str] | None:
    """Which lookup fails, and by which number, which is private.

    Every embedding looks at its numbers before it looks them up.
    """

    def look(name: str, table: Any, given: tuple[Tensor, ...]) -> None:
        if not given or not given[0].numel():
            return
        rows, low, high = table.num_embeddings, int(given[0].min()), int(given[0].max())
        if low < 0 or high >= rows:
            raise _BeyondTable(
                f"the embedding {name or '(root)'} has no row for: it has {rows} rows "
                f"(0 to {rows - 1})",
                f"the number {low if low < 0 else high}",
            )

    with ExitStack() as hooks, torch.no_grad(), mode(model, training=False):
        for name, table in model.named_modules():
            if isinstance(table, _TABLES):
                hook = table.register_forward_pre_hook(partial(look, name))
                hooks.callback(hook.remove)
        try:
            call(model, inputs)
        except _BeyondTable as found:
            where, number = found.args
            return where, number
        except IndexError as found:
            return "the model cannot look up", str(found)
    return None
