"""Who knows what, and networks that standardise their own inputs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpsur.errors import InvalidInputError
from dpsur.functional.records import Examples

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
        return self.pool.select(rows.to(self.pool.inputs.device))


def split_pool(pool: Examples, seed: int) -> Split:
    if len(pool) < sum(SHARES):
        raise InvalidInputError(f"a pool of {len(pool)} records cannot be cut into four parts")
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))
    part = len(pool) / sum(SHARES)
    ends = [round(part * sum(SHARES[: k + 1])) for k in range(4)]
    parts = [order[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return Split(pool, *parts)


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


# Of a number that hardly ever differs from record to record, such as a corner of an image.
SMALLEST_DEVIATION = 1e-3


class StandardisedRecords(nn.Module):
    """A network behind a fixed shift and scale of its inputs."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, network: nn.Module, mean: Tensor, deviation: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.network((inputs - self.mean) / self.deviation)
        return result


def standardised(make: Callable[[], nn.Module], inputs: Tensor) -> Callable[[], nn.Module]:
    """Make networks that see each number of such inputs with mean 0 and deviation 1.

    Whole numbers are words, not quantities, and stay as they are.
    """
    if not inputs.is_floating_point():
        return make
    deviation, mean = (part.cpu() for part in torch.std_mean(inputs, dim=0, correction=0))
    deviation = deviation.clamp(min=SMALLEST_DEVIATION)
    return lambda: StandardisedRecords(make(), mean, deviation)
