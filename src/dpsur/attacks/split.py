"""Who knows what: the data in four parts, as in the paper's attacks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpsur.core.types import Examples
from dpsur.errors import InvalidInputError

SHARES = (2, 1, 2, 1)


@dataclass(frozen=True)
class Split:
    """Rows of the pool: what the target and the shadow model are trained and tested on."""

    pool: Examples
    target_train: Tensor
    target_test: Tensor
    shadow_train: Tensor
    shadow_test: Tensor

    def examples(self, rows: Tensor) -> Examples:
        """Records of the pool."""
        return self.pool.select(rows.to(self.pool.inputs.device))


def split_pool(pool: Examples, seed: int) -> Split:
    """Cut a pool at random 2:1:2:1."""
    if len(pool) < sum(SHARES):
        raise InvalidInputError(f"a pool of {len(pool)} records cannot be cut into four parts")
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))
    part = len(pool) / sum(SHARES)
    ends = [round(part * sum(SHARES[: k + 1])) for k in range(4)]
    pieces = [order[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return Split(pool, *pieces)


def join(*sets: Examples) -> Examples:
    """Several sets of records as one pool."""
    return Examples(
        torch.cat([part.inputs for part in sets]), torch.cat([part.targets for part in sets])
    )


def as_many(rows: Tensor, count: int, seed: int) -> Tensor:
    """At most `count` of the rows, drawn at random."""
    if len(rows) <= count:
        return rows
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return rows[order[:count]]
