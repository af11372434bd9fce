"""Caches per-record values that depend on the inputs alone.

The input of the first layer is the same in every trial. Inner products between the patches that a
convolution sees of it can be stored for a whole data set and looked up for a batch. Norms that come
of other values would let records pass the clip. So tables belong to one problem: another one, over
the same memory too, makes its own. They are made anew when the data is known to have been written
to; writing to it behind PyTorch's back, through an array of NumPy, while a run is under way is not
noticed.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpsur.per_example.memory_budget import GradientBudget

# Numbers of the data set that are worked on at once, beside a batch that fills the memory. Few, for
# what they take on the way is part of the peak of a small step.
_NUMBERS_AT_ONCE = 2**18

# By name and budget. A table that has no room is None.
Tables = dict[Hashable, Tensor | int | None]


@dataclass(frozen=True)
class KnownInputs:
    """Inputs of a batch that are rows of a data set, and the tables of the problem it is for."""

    data: Tensor
    rows: Tensor
    inputs: Tensor
    tables: Tables
    budget: GradientBudget = field(default_factory=GradientBudget)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_version", self.inputs._version)

    def holds(self, values: Tensor) -> bool:
        """Whether these are the inputs, perhaps flattened, and nothing has overwritten them."""
        version: int = vars(self)["_version"]
        if self.inputs._version != version:
            return False
        if values.data_ptr() != self.inputs.data_ptr():
            return False
        if values.shape == self.inputs.shape:
            return values.stride() == self.inputs.stride()
        return (
            values.shape == self.inputs.flatten(1).shape
            and values.is_contiguous()
            and self.inputs.is_contiguous()
        )

    @property
    def finite(self) -> bool:
        """Whether no record holds NaN or infinity."""
        tables = _current(self.tables, self.data)
        if "finite" not in tables:
            tables["finite"] = all(bool(part.isfinite().all()) for part in _parts(self.data))
        return bool(tables["finite"])

    def look_up(self, name: Hashable, compute: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Result of `compute` for the batch, from a table that is made on the first call.

        None where a table of the whole set has no room. Only the first call waits for the device,
        so that it must come before a capture.
        """
        tables, data, key = _current(self.tables, self.data), self.data, (name, self.budget)
        if key not in tables:
            one = compute(data[:1])
            size = one.element_size() * one.numel() * len(data)
            room = self.budget.has_room(size, data.device)
            tables[key] = _fill(data, one, compute) if room else None
        table = tables[key]
        return table.index_select(0, self.rows) if isinstance(table, Tensor) else None


def _fill(data: Tensor, one: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """A table, some rows of the data after the other."""
    table = one.new_empty(len(data), *one.shape[1:])
    start = 0
    for part in _parts(data):
        table[start : start + len(part)] = compute(part)
        start += len(part)
    if data.is_cuda:  # another stream may be the next to read it
        torch.cuda.current_stream(data.device).synchronize()
    return table


def _current(tables: Tables, data: Tensor) -> Tables:
    """The tables, emptied first if the data was written to since they were made."""
    if tables.get("version") != data._version:
        tables.clear()
        tables["version"] = data._version
    return tables


def _parts(data: Tensor) -> tuple[Tensor, ...]:
    return torch.split(data, max(1, _NUMBERS_AT_ONCE // max(1, data[0].numel())))
