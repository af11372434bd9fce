"""Checks of the rows of a batch: which were used twice, which targets they have.

Rows that the model is called on twice are found by their place in memory. Targets that a loop
computes from other records of the batch are found out by records that return. The graph of a loss
does not show where its constants come from: `y - y.mean()` is a tensor like any other. But a record
comes again in another batch, among other records. If the loader yields it as before, and the model
is called on the same row, then its target must be the same too.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final

import torch
from torch import Tensor

from dpsur.errors import CouplingError, UnsupportedModelError
from dpsur.functional.call import Arguments
from dpsur.functional.tree import describe_rows, map_tensors, tensors_of

MOST_RECORDS: Final = 4096  # that are remembered
ROWS_PER_BATCH: Final = 16  # of each kind, known and new
EVERY: Final = 20  # batches, after the first
ALWAYS_UNTIL: Final = 50
ROUNDING: Final = {torch.float64: 1e-6, torch.float32: 1e-3}
COARSE: Final = 3e-2
REPEATED_ROWS: Final = 64  # of a call, among which equal ones are looked for
LONG_ROW: Final = 4  # numbers in a row, that are not equal by chance


@dataclass(frozen=True, eq=False)
class Place:
    """Where in memory the rows of an argument begin. The memory is held: it stays theirs."""

    storage: torch.UntypedStorage
    version: int
    start: int
    stride: int
    rows: int

    def overlaps(self, other: "Place") -> bool:
        """Whether some rows are the same, unchanged since."""
        known = (self.storage._cdata, self.version, self.stride)
        if known != (other.storage._cdata, other.version, other.stride):
            return False
        apart = other.start - self.start
        first, last = -other.rows * self.stride, self.rows * self.stride
        return apart % self.stride == 0 and first < apart < last


def places_of(inputs: Arguments) -> list[Place]:
    """Those of all arguments that have a row for each record."""
    return [
        Place(
            value.untyped_storage(),
            value._version,
            value.data_ptr(),
            value.stride(0) * value.itemsize,
            len(value),
        )
        for value in tensors_of(inputs)
        if type(value) is Tensor and value.numel() and value.stride(0)
    ]


def check_not_used(inputs: list[Place], before: list[list[Place]]) -> None:
    """Refuse rows that an earlier call on the same batch was made on."""
    for other in before:
        if inputs and all(any(one.overlaps(two) for two in other) for one in inputs):
            raise CouplingError(
                "the model was called on the same rows of a batch twice, which would count their "
                "records twice; use each record of the batch exactly once"
            )


@dataclass(frozen=True)
class Yielded:
    """A microbatch of the loader, and the numbers of its records in the data set."""

    records: Sequence[int]
    batch: Any
    before: int = 0  # rows of it that were used already


@dataclass(frozen=True)
class _Known:
    given: int
    targets: list[Tensor]


class TargetCheck:
    """Remembers targets of some records, in this process alone, and compares them."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._batches = 0

    def look(self, yielded: Yielded, inputs: Any, targets: Sequence[Tensor], rows: int) -> None:
        """Compare the targets of known records, and remember some new ones.

        Formal guarantee: none. A difference proves that a target does not follow from its record;
        no difference proves nothing.
        """
        self._batches += 1
        if self._batches > ALWAYS_UNTIL and self._batches % EVERY:
            return
        _check_repeated(yielded.batch, inputs)
        records = yielded.records[yielded.before : yielded.before + rows]
        if not targets or len(records) != rows:
            return
        known = [row for row, record in enumerate(records) if record in self._known]
        new = [row for row, record in enumerate(records) if record not in self._known]
        new = new[: min(ROWS_PER_BATCH, max(0, MOST_RECORDS - len(self._known)))]
        chosen = [*known[:ROWS_PER_BATCH], *new]
        if not chosen:
            return
        given = [
            *_rows_of(
                yielded.batch, [yielded.before + row for row in chosen], len(yielded.records)
            ),
            *_rows_of(inputs, chosen, rows),
        ]
        found = [_take(value.detach(), chosen) for value in targets]
        for place, row in enumerate(chosen):
            digest = hash(tuple(value[place].numpy().tobytes() for value in given))
            now = _Known(digest, [value[place] for value in found])
            before = self._known.setdefault(records[row], now)
            if before.given == digest and not _alike(before.targets, now.targets):
                raise CouplingError(
                    "the target of a record in the loss is another one than in an earlier batch, "
                    "for the same record and the same input of the model; a target that is "
                    "computed from other records of the batch (such as y - y.mean()) couples them: "
                    "compute it in the data set, or in make_private(criterion=...); a target that "
                    "changes with the weights, as that of a teacher does, goes to engine.criterion"
                )


class ArgumentCheck:
    """Compares what is no tensor among the arguments of the model with its first call.

    Python code may have computed it from the batch.
    """

    def __init__(self) -> None:
        self._known: str | None = None

    def look(self, given: Arguments) -> None:
        """Refuse another number or text than in the first call."""
        found: list[Any] = []
        map_tensors(lambda _: None, (given.args, given.kwargs), otherwise=found.append)
        plain = repr([one for one in found if isinstance(one, (Real, str, bytes))])
        self._known = plain if self._known is None else self._known
        if plain != self._known:
            raise CouplingError(
                "the model was called with another number or text than in its first call; one that "
                "depends on the batch couples its records: make it constant, or write the loss "
                "as engine.private_step, whose further arguments may change"
            )


def _check_repeated(batch: Any, inputs: Any) -> None:
    """Refuse rows that the model gets more often than the loader has yielded them."""
    for value in tensors_of(inputs):
        if not value.is_floating_point() or value[:1].numel() < LONG_ROW:
            continue
        used = _digests(value[:REPEATED_ROWS])
        if len(used) == used.total():
            continue
        for other in tensors_of(batch):
            if other.dtype != value.dtype or other.shape[1:] != value.shape[1:]:
                continue
            held = _digests(other)
            if any(0 < held[digest] < count for digest, count in used.items()):
                raise CouplingError(
                    "the model was called with a row of the batch repeated, so that its record "
                    "counts more than once; use each record of the batch exactly once"
                )


def _digests(value: Tensor) -> Counter[int]:
    """How often each row occurs, by a digest of its bytes."""
    rows = value.detach().cpu().contiguous().reshape(len(value), -1).view(torch.uint8)
    return Counter(hash(row.tobytes()) for row in rows.numpy())


def _rows_of(tree: Any, rows: list[int], count: int) -> list[Tensor]:
    """Some rows of all tensors that have so many, as bytes on the host."""
    found: list[Tensor] = []

    def note(value: Tensor) -> Tensor:
        if value.dim() and len(value) == count:
            some = _take(value.detach(), rows).contiguous()
            found.append(some.reshape(len(rows), -1).view(torch.uint8))
        return value

    map_tensors(note, tree, otherwise=lambda value: value)
    return found


def _take(value: Tensor, rows: list[int]) -> Tensor:
    return value[torch.tensor(rows, device=value.device)].cpu()


def _alike(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether targets agree, but for rounding."""
    if [value.shape for value in one] != [value.shape for value in other]:
        return True  # another loss, or padded to another length
    for before, now in zip(one, other, strict=True):
        if not before.is_floating_point():
            if not torch.equal(before, now):
                return False
            continue
        tolerance = ROUNDING.get(now.dtype, COARSE)
        finite = before[before.isfinite()].abs()
        scale = float(finite.max()) if finite.numel() else 0.0
        if not torch.allclose(
            before.double(),
            now.double(),
            rtol=0,
            atol=tolerance * (scale + tolerance),
            equal_nan=True,
        ):
            return False
    return True


def row_count_of(inputs: Arguments) -> int:
    """How many rows a call is for; refuses arguments that do not agree."""
    found = tensors_of(inputs)
    if not found:
        raise UnsupportedModelError("the model was called without a tensor; pass it the records")
    if any(value.layout is not torch.strided or value.is_nested for value in found):
        raise UnsupportedModelError(
            "the model was called with a sparse or nested tensor, whose records cannot be told "
            "apart; pass dense tensors, with records padded to one length"
        )
    rows = len(found[0]) if found[0].dim() else 0
    for value in found:
        if not value.dim() or len(value) != rows:
            raise UnsupportedModelError(
                f"the model was called with tensors of {describe_rows(inputs)}, of which one has "
                f"the shape {tuple(value.shape)} and another {rows} rows; every tensor must have a "
                "row per record in its first dimension (batch_first=True)"
            )
    return rows


def rows_with_nan(outputs: Iterable[Tensor], records: int) -> Tensor | None:
    """Records with NaN among their outputs, from which a loss is NaN; None without an output."""
    found = [
        value.reshape(records, -1).amax(1).isnan()
        for value in outputs
        if value.numel() and value.is_floating_point()
    ]
    return torch.stack(found).any(0) if found else None
