"""Records: inputs and targets of a data set, on a device or on the host."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpsur.errors import InvalidInputError
from dpsur.functional.tree import (
    TensorTree,
    check_rows,
    describe_rows,
    device_of,
    map_tensors,
    row_count,
    slice_rows,
    tensors_of,
)


@dataclass(frozen=True, repr=False)
class Examples:
    """Records: inputs and targets with one row per record.

    Each is a tensor or a tree of tensors (tuples, lists, dicts, dataclasses; see
    `functional/tree.py`). Targets without any tensor, such as None, are for a loss that needs none.
    """

    inputs: TensorTree
    targets: TensorTree

    def __post_init__(self) -> None:
        if isinstance(self.inputs, Tensor) and isinstance(self.targets, Tensor):
            inputs, targets = len(self.inputs), len(self.targets)
        else:
            found = check_rows(self.inputs, "inputs")
            if found is None:
                raise InvalidInputError("inputs hold no tensor; there must be one row per record")
            inputs, wanted = found, check_rows(self.targets, "targets")
            targets = inputs if wanted is None else wanted
        if inputs != targets:
            raise InvalidInputError(
                f"{inputs} inputs but {targets} targets: there must be one target per input"
            )

    def __len__(self) -> int:
        return row_count(self.inputs)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} records, inputs of {describe_rows(self.inputs)}, "
            f"targets of {describe_rows(self.targets)})"
        )

    @property
    def record_shape(self) -> tuple[int, ...]:
        """The shape of one record's inputs; () where they are several tensors."""
        return tuple(self.inputs.shape[1:]) if isinstance(self.inputs, Tensor) else ()

    @property
    def nbytes(self) -> int:
        """The memory that the records take."""
        return sum(value.nbytes for value in tensors_of((self.inputs, self.targets)))

    def select(self, rows: Tensor) -> "Examples":
        """Return the named rows: their indices, or a truth value for each."""
        if rows.dtype == torch.bool:
            rows = rows.nonzero()[:, 0]
        # on a CPU several times as fast as indexing: whole rows are copied
        return Examples(
            map_tensors(lambda value: value.index_select(0, rows), self.inputs),
            map_tensors(lambda value: value.index_select(0, rows), self.targets),
        )

    def part(self, some: slice) -> "Examples":
        """Return neighbouring rows."""
        return Examples(slice_rows(self.inputs, some), slice_rows(self.targets, some))

    def parts(self, rows: int) -> "Iterator[Examples]":
        """Return all rows in order, some at a time."""
        for start in range(0, len(self), rows):
            yield self.part(slice(start, start + rows))

    def to(self, device: torch.device) -> "Examples":
        """Move all tensors to a device."""
        return Examples(
            map_tensors(lambda value: value.to(device), self.inputs),
            map_tensors(lambda value: value.to(device), self.targets),
        )


# The part of a GPU's free memory that records may take; the rest is for training on them.
_PART_FOR_RECORDS = 0.5

Prefetched = tuple[Tensor, "Future[Examples]"]


@dataclass(frozen=True, repr=False)
class HostExamples(Examples):
    """Records on the host that hand out rows on `device`."""

    device: torch.device
    _ahead: dict[str, Prefetched] = field(default_factory=dict, repr=False, compare=False)
    _worker: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1), repr=False, compare=False
    )

    def select(self, rows: Tensor) -> Examples:
        """Return the named rows, on the device."""
        return self._send(self._gather(rows.cpu()))

    def part(self, some: slice) -> Examples:
        """Return neighbouring rows, on the device."""
        return self._send(Examples(slice_rows(self.inputs, some), slice_rows(self.targets, some)))

    def fetch(self, rows: Tensor, following: Tensor, source: str) -> "HostExamples":
        """Gather rows on the host, then begin with those that `source` is to draw next."""
        wanted, expected = rows.cpu(), following.cpu()
        ahead = self._ahead.pop(source, None)
        found = None
        if ahead is not None:
            foreseen, prefetched = ahead
            found = prefetched.result() if torch.equal(foreseen, wanted) else None
        found = self._gather(wanted) if found is None else found
        self._ahead[source] = expected, self._worker.submit(self._gather, expected)
        return HostExamples(found.inputs, found.targets, self.device, _worker=self._worker)

    def _gather(self, rows: Tensor) -> Examples:
        return Examples(
            map_tensors(lambda values: self._rows_of(values, rows), self.inputs),
            map_tensors(lambda values: self._rows_of(values, rows), self.targets),
        )

    def _rows_of(self, values: Tensor, rows: Tensor) -> Tensor:
        # A GPU fetches pinned memory by itself; only batches are pinned, not the whole set.
        place = torch.empty(
            (len(rows), *values.shape[1:]),
            dtype=values.dtype,
            pin_memory=self.device.type == "cuda",
        )
        return torch.index_select(values, 0, rows, out=place)

    def _send(self, examples: Examples) -> Examples:
        return Examples(
            map_tensors(lambda value: value.to(self.device, non_blocking=True), examples.inputs),
            map_tensors(lambda value: value.to(self.device, non_blocking=True), examples.targets),
        )


def place(examples: Examples, device: torch.device, limit: int | None) -> Examples:
    """Records on the device, or on the host where they take more than `limit` bytes of it.

    Without a limit a GPU gives half of its free memory, and a CPU whatever there is.
    """
    if limit is None:
        there = device_of(examples.inputs).type == device.type
        if there or device.type != "cuda":
            return examples.to(device)
        limit = int(_PART_FOR_RECORDS * torch.cuda.mem_get_info(device)[0])
    if examples.nbytes <= limit:
        return examples.to(device)
    host = examples.to(torch.device("cpu"))
    return HostExamples(host.inputs, host.targets, device)
