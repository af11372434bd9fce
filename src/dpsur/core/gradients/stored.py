"""What depends on the data alone is computed once.

The input of the first layer is the same in every trial. Inner products between its patches can be
stored for a whole data set and looked up for a batch.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

# Rows of the data set that are worked on at once.
_ROWS_AT_ONCE = 1024


@dataclass
class _Tables:
    """Stored results for one data set, which is not kept alive by them."""

    data: "ref[Tensor]"
    found: dict[Hashable, Tensor]


_tables: WeakKeyDictionary[nn.Module, _Tables] = WeakKeyDictionary()


@dataclass(frozen=True)
class KnownInputs:
    """Inputs of a batch that are rows of a data set. The data set must not be changed in place."""

    model: nn.Module
    data: Tensor
    rows: Tensor
    inputs: Tensor

    def look_up(self, name: Hashable, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Result of `compute` for the batch, from a table that is made on the first call."""
        tables = _tables.get(self.model)
        if tables is None or tables.data() is not self.data:
            tables = _tables[self.model] = _Tables(ref(self.data), {})
        if name not in tables.found:
            pieces = torch.split(self.data, _ROWS_AT_ONCE)
            tables.found[name] = torch.cat([compute(piece) for piece in pieces])
        return tables.found[name].index_select(0, self.rows)
