"""Readers of records that do not fit in memory: arrays in files, and data sets read by workers.

Nothing is copied at the start. Batches are read while the device computes, the next one ahead of
time, since its records are drawn from random numbers that are known already.
"""

import multiprocessing
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing  # lets tensors travel between processes in shared memory
from torch import Tensor

from dpsur.errors import InvalidInputError
from dpsur.functional.records import SEVERAL_SHAPES, Examples, StreamedExamples
from dpsur.functional.tree import TensorTree, concatenate_rows, map_tensors, tensors_of

# Data sets up to this size are read once and held.
HELD_BYTES = 2 * 2**30
MOST_WORKERS = 4
# Smaller tensors may well be copied, wherever they are.
LEAST_MAPPED = 2**20
# Records that are checked at a time take about this much.
_BYTES_AT_ONCE = 32 * 2**20
# Records that identify a data set which is too large to be read for that.
IDENTIFYING = 512

# One record of a data set as trees of tensors (inputs, targets).
Convert = Callable[[Any], tuple[TensorTree, TensorTree]]


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


class ArrayReader:
    """Reads rows of arrays: trees of tensors that may lie in files."""

    def __init__(self, inputs: TensorTree, targets: TensorTree, fraction: torch.dtype) -> None:
        self._inputs, self._targets, self._fraction = inputs, targets, fraction

    def read(self, rows: Tensor) -> Examples:
        """Copies of some rows; fractions in the type of the model."""
        return Examples(self._rows(self._inputs, rows), self._rows(self._targets, rows))

    def _rows(self, tree: TensorTree, rows: Tensor) -> TensorTree:
        def read(values: Tensor) -> Tensor:
            found = values.index_select(0, rows)
            return found.to(self._fraction) if found.is_floating_point() else found

        return map_tensors(read, tree)


class DataSetReader:
    """Reads records of a map-style data set, in this process or in several others."""

    def __init__(self, data: Any, convert: Convert, workers: int) -> None:
        self._data, self._convert, self._workers = data, convert, workers
        self._pool: ProcessPoolExecutor | None = None

    def read(self, rows: Tensor) -> Examples:
        """Some records, stacked."""
        if not self._workers:
            return _read(self._data, self._convert, rows.tolist())
        parts = [part.tolist() for part in rows.chunk(self._workers)]
        with warnings.catch_warnings():
            # of a fork beside other threads; a worker only reads, as those of a DataLoader do
            warnings.simplefilter("ignore", DeprecationWarning)
            futures = [self._started().submit(_read_in_worker, part) for part in parts]
        try:
            found = [future.result() for future in futures]
        except BrokenProcessPool:
            self._pool = None
            raise InvalidInputError(
                "a worker that reads the data set has died, perhaps for lack of memory; resume "
                "with fewer: performance=dpsur.Performance(workers=1)"
            ) from None
        try:
            return Examples(
                concatenate_rows([inputs for inputs, _ in found]),
                concatenate_rows([targets for _, targets in found]),
            )
        except RuntimeError as error:
            raise InvalidInputError(SEVERAL_SHAPES, private=str(error)) from None

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._workers,
                mp_context=multiprocessing.get_context(),
                initializer=_start_worker,
                initargs=(self._data, self._convert),
            )
            weakref.finalize(self, self._pool.shutdown, wait=False)
        return self._pool


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
        return Examples(stack_records(inputs), stack_records(targets))
    except RuntimeError as error:
        raise InvalidInputError(SEVERAL_SHAPES, private=str(error)) from None


def stack_records(rows: Sequence[TensorTree]) -> TensorTree:
    return map_tensors(lambda *each: torch.stack(each), *rows)


def usual_workers() -> int:
    """How many processes read a data set that is too large to be held."""
    return min(MOST_WORKERS, max(1, len(os.sched_getaffinity(0)) - 1))


def rows_at_once(examples: Examples) -> int:
    """How many records are looked at together where all of them are."""
    return max(1, _BYTES_AT_ONCE // max(1, examples.nbytes // max(1, len(examples))))


def checked_parts(examples: Examples) -> Iterator[Examples]:
    """Records to check: all of those that are held at once, streamed ones some at a time."""
    if not isinstance(examples, StreamedExamples):
        yield examples
        return
    yield from examples.parts(rows_at_once(examples))


def identifying(examples: Examples) -> dict[str, TensorTree]:
    """What identifies the records: themselves, or a sample of records that are not held."""
    if not isinstance(examples, StreamedExamples):
        return {"inputs": examples.inputs, "targets": examples.targets}
    count = min(len(examples), IDENTIFYING, rows_at_once(examples))
    rows = torch.linspace(0, len(examples) - 1, count, dtype=torch.float64).long()
    some = examples.to(torch.device("cpu")).select(rows)
    return {
        "inputs": some.inputs,
        "targets": some.targets,
        "count": torch.tensor([len(examples)]),
    }


def record_bytes(record: tuple[TensorTree, TensorTree]) -> int:
    return sum(value.nbytes for value in tensors_of(record))
