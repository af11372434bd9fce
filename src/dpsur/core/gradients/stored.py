"""What depends on the data alone is computed once.

The input of the first layer is the same in every trial. Inner products between its patches, or the
norms of its rows, can be stored for a whole data set and looked up for a batch.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from weakref import ref

import torch
from torch import Tensor

from dpsur.core.gradients.budget import GradientBudget

# Numbers of the data set that are worked on at once, beside a batch that fills the memory.
_NUMBERS_AT_ONCE = 2**20

# Tables of a data set, by the identity of its tensor. A table that has no room is None. They go
# when the data goes: with it on another device they are made anew.
_tables: dict[int, tuple["ref[Tensor]", dict[Hashable, Tensor | bool | None]]] = {}


def _tables_of(data: Tensor) -> dict[Hashable, Tensor | bool | None]:
    key = id(data)
    if key not in _tables or _tables[key][0]() is not data:
        _tables[key] = ref(data, lambda _: _tables.pop(key, None)), {}
    return _tables[key][1]


@dataclass(frozen=True)
class KnownInputs:
    """Inputs of a batch that are rows of a data set. The data set must not be changed in place."""

    data: Tensor
    rows: Tensor
    inputs: Tensor
    budget: GradientBudget = field(default_factory=GradientBudget)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_version", self.inputs._version)

    def holds(self, values: Tensor) -> bool:
        """Whether these are the inputs, perhaps flattened, and nothing has overwritten them."""
        version: int = vars(self)["_version"]
        if self.inputs._version != version:
            return False
        return values is self.inputs or (
            values.data_ptr() == self.inputs.data_ptr()
            and values.shape == self.inputs.flatten(1).shape
            and values.is_contiguous()
            and self.inputs.is_contiguous()
        )

    @property
    def finite(self) -> bool:
        """Whether no record holds NaN or infinity."""
        tables = _tables_of(self.data)
        if "finite" not in tables:
            tables["finite"] = all(bool(piece.isfinite().all()) for piece in self._pieces())
        return bool(tables["finite"])

    def look_up(self, name: Hashable, compute: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Result of `compute` for the batch, from a table that is made on the first call.

        None where a table of the whole set has no room. Only the first call waits for the device,
        so that it must come before a capture.
        """
        tables = _tables_of(self.data)
        key = (name, self.budget)
        if key not in tables:
            one = compute(self.data[:1])
            size = one.element_size() * one.numel() * len(self.data)
            tables[key] = None
            if self.budget.has_room(size, self.data.device):
                tables[key] = torch.cat([compute(piece) for piece in self._pieces()])
                if self.data.is_cuda:  # another stream may be the next to read it
                    torch.cuda.current_stream(self.data.device).synchronize()
        table = tables[key]
        return table.index_select(0, self.rows) if isinstance(table, Tensor) else None

    def _pieces(self) -> tuple[Tensor, ...]:
        return torch.split(self.data, max(1, _NUMBERS_AT_ONCE // max(1, self.data[0].numel())))
