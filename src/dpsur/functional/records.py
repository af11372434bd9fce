"""Records: inputs and targets of a data set, on a device or on the host."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

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
        return tuple(self.inputs.shape[1:]) if isinstance(self.inputs, Tensor) else ()

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in tensors_of((self.inputs, self.targets)))

    def select(self, rows: Tensor) -> "Examples":
        if rows.dtype == torch.bool:
            rows = rows.nonzero()[:, 0]
        # on a CPU several times as fast as indexing: whole rows are copied
        return self.map(lambda value: value.index_select(0, rows))

    def map(self, change: Callable[[Tensor], Tensor]) -> "Examples":
        return Examples(map_tensors(change, self.inputs), map_tensors(change, self.targets))

    def part(self, some: slice) -> "Examples":
        return self.map(lambda value: value[some])

    def parts(self, rows: int) -> "Iterator[Examples]":
        for start in range(0, len(self), rows):
            yield self.part(slice(start, start + rows))

    def to(self, device: torch.device) -> "Examples":
        return self.map(lambda value: value.to(device))


SEVERAL_SHAPES = (
    "the records of the data set have inputs or targets of several shapes; pad or crop them to one "
    "shape"
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
        return self._send(self._gather(rows.cpu()))

    def part(self, some: slice) -> Examples:
        return self._send(super().part(some))

    def fetch(self, rows: Tensor, following: Tensor | None, source: str) -> "HostExamples":
        """Gather rows on the host, then begin with those that `source` is to draw next."""
        wanted = rows.cpu()
        ahead = self._ahead.pop(source, None)
        found = None
        if ahead is not None:
            foreseen, prefetched = ahead
            found = prefetched.result() if torch.equal(foreseen, wanted) else None
        found = self._gather(wanted) if found is None else found
        if following is not None:
            expected = following.cpu()
            self._ahead[source] = expected, self._worker.submit(self._gather, expected)
        return HostExamples(found.inputs, found.targets, self.device, _worker=self._worker)

    def resolve(self) -> None:
        """Wait for what was begun: another thread must not call CUDA during a capture."""
        self._worker.submit(lambda: None).result()

    def forget(self) -> None:
        for _, begun in self._ahead.values():
            begun.cancel()
        self._ahead.clear()

    def _gather(self, rows: Tensor) -> Examples:
        def select(values: Tensor) -> Tensor:
            # A GPU fetches pinned memory by itself; only batches are pinned, not the whole set.
            place = torch.empty(
                (len(rows), *values.shape[1:]),
                dtype=values.dtype,
                device="cpu",
                pin_memory=self.device.type == "cuda",
            )
            return torch.index_select(values, 0, rows, out=place)

        return self.map(select)

    def _send(self, examples: Examples) -> Examples:
        return examples.map(lambda value: value.to(self.device, non_blocking=True))


# Reads records by their numbers, from a file or a data set, into memory of the host.
RecordReader = Callable[[Tensor], Examples]


@dataclass(frozen=True, repr=False)
class StreamedExamples(HostExamples):
    """Records that are read when they are needed and never held: batches, or some after the other.

    `inputs` and `targets` tell structure, shapes and types. They hold no values: NaN and zeros, in
    memory of a single record.
    """

    reader: RecordReader = field(kw_only=True, repr=False, compare=False)

    def part(self, some: slice) -> Examples:
        return self.select(torch.arange(*some.indices(len(self)), device="cpu"))

    def parts(self, rows: int) -> Iterator[Examples]:
        ahead: Future[Examples] | None = None
        for start in range(0, len(self), rows):
            found = self._span(start, rows) if ahead is None else ahead.result()
            ahead = self._worker.submit(self._span, start + rows, rows)
            yield self._send(found)

    def to(self, device: torch.device) -> "StreamedExamples":
        return replace(self, device=device, _ahead={})

    def with_targets(self, convert: Callable[[Tensor], Tensor]) -> "StreamedExamples":
        targets = map_tensors(lambda value: blank_rows(convert(value[:1]), len(self)), self.targets)

        def read(rows: Tensor) -> Examples:
            found = self.reader(rows)
            return Examples(found.inputs, map_tensors(convert, found.targets))

        return replace(self, targets=targets, reader=read, _ahead={})

    def _span(self, start: int, rows: int) -> Examples:
        return self._gather(
            torch.arange(min(start, len(self)), min(start + rows, len(self)), device="cpu")
        )

    def _gather(self, rows: Tensor) -> Examples:
        if not len(rows):
            return self.map(lambda value: value[:0])
        found = self.reader(rows)
        return found if self.device.type != "cuda" else found.map(Tensor.pin_memory)


def blank_rows(record: Tensor, count: int) -> Tensor:
    filler = float("nan") if record.is_floating_point() else 0
    return torch.full_like(record[:1], filler).expand(count, *record.shape[1:])


def stream(reader: RecordReader, count: int) -> StreamedExamples:
    """Records that a reader reads, of the shapes and types of its first one."""
    first = reader(torch.zeros(1, dtype=torch.int64, device="cpu"))
    blank = first.map(lambda value: blank_rows(value, count))
    return StreamedExamples(blank.inputs, blank.targets, torch.device("cpu"), reader=reader)


def place(examples: Examples, device: torch.device, limit: int | None) -> Examples:
    """Records on the device, or on the host where they take more than `limit` bytes of it.

    Without a limit a GPU gives half of its free memory, and a CPU whatever there is.
    """
    if isinstance(examples, StreamedExamples):
        return examples.to(device)
    if limit is None:
        there = device_of(examples.inputs).type == device.type
        if there or device.type != "cuda":
            return examples.to(device)
        limit = int(_PART_FOR_RECORDS * torch.cuda.mem_get_info(device)[0])
    if examples.nbytes <= limit:
        return examples.to(device)
    host = examples.to(torch.device("cpu"))
    return HostExamples(host.inputs, host.targets, device)
