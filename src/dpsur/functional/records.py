"""Records: inputs and targets of a data set, on a device or on the host."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpsur.errors import InvalidInputError


@dataclass(frozen=True, repr=False)
class Examples:
    """Records as two tensors with one row per record."""

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise InvalidInputError(
                f"{len(self.inputs)} inputs but {len(self.targets)} targets: "
                "there must be one target per input"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def __repr__(self) -> str:
        inputs, targets = self.inputs, self.targets
        return (
            f"{type(self).__name__}({len(self)} records, inputs {tuple(inputs.shape[1:])} of "
            f"{inputs.dtype}, targets {tuple(targets.shape[1:])} of {targets.dtype})"
        )

    def select(self, rows: Tensor) -> "Examples":
        """Return the named rows: their indices, or a truth value for each."""
        if rows.dtype == torch.bool:
            rows = rows.nonzero()[:, 0]
        # on a CPU several times as fast as indexing: whole rows are copied
        return Examples(self.inputs.index_select(0, rows), self.targets.index_select(0, rows))

    def part(self, some: slice) -> "Examples":
        """Return neighbouring rows."""
        return Examples(self.inputs[some], self.targets[some])

    def to(self, device: torch.device) -> "Examples":
        """Move both tensors to a device."""
        return Examples(self.inputs.to(device), self.targets.to(device))


# The part of a card's free memory that records may take; the rest is for training on them.
_PART_FOR_RECORDS = 0.5

Gathered = tuple[Tensor, "Future[Examples]"]


@dataclass(frozen=True, repr=False)
class HostExamples(Examples):
    """Records on the host that hand out rows on `device`."""

    device: torch.device
    _ahead: dict[str, Gathered] = field(default_factory=dict, repr=False, compare=False)
    _worker: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1), repr=False, compare=False
    )

    def select(self, rows: Tensor) -> Examples:
        """Return the named rows, on the device."""
        return self._sent(self._gather(rows.cpu()))

    def part(self, some: slice) -> Examples:
        """Return neighbouring rows, on the device."""
        return self._sent(Examples(self.inputs[some], self.targets[some]))

    def fetch(self, rows: Tensor, following: Tensor, source: str) -> "HostExamples":
        """Gather rows on the host, then begin with those that `source` is to draw next."""
        wanted, expected = rows.cpu(), following.cpu()
        ahead = self._ahead.pop(source, None)
        found = None
        if ahead is not None:
            foreseen, gathered = ahead
            found = gathered.result() if torch.equal(foreseen, wanted) else None
        found = self._gather(wanted) if found is None else found
        self._ahead[source] = expected, self._worker.submit(self._gather, expected)
        return HostExamples(found.inputs, found.targets, self.device, _worker=self._worker)

    def _gather(self, rows: Tensor) -> Examples:
        return Examples(self._rows_of(self.inputs, rows), self._rows_of(self.targets, rows))

    def _rows_of(self, values: Tensor, rows: Tensor) -> Tensor:
        # A card fetches pinned memory by itself; only batches are pinned, not the whole set.
        place = torch.empty(
            (len(rows), *values.shape[1:]),
            dtype=values.dtype,
            pin_memory=self.device.type == "cuda",
        )
        return torch.index_select(values, 0, rows, out=place)

    def _sent(self, examples: Examples) -> Examples:
        return Examples(
            examples.inputs.to(self.device, non_blocking=True),
            examples.targets.to(self.device, non_blocking=True),
        )


def placed(examples: Examples, device: torch.device, limit: int | None) -> Examples:
    """Records on the device, or on the host where they take more than `limit` bytes of it.

    Without a limit a card gives half of its free memory, and a CPU whatever there is.
    """
    size = examples.inputs.nbytes + examples.targets.nbytes
    if limit is None:
        there = examples.inputs.device.type == device.type
        if there or device.type != "cuda":
            return examples.to(device)
        limit = int(_PART_FOR_RECORDS * torch.cuda.mem_get_info(device)[0])
    if size <= limit:
        return examples.to(device)
    return HostExamples(examples.inputs.cpu(), examples.targets.cpu(), device)
