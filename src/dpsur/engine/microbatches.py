"""Batches that do not fit into memory: several microbatches for one step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from dpsur import checks
from dpsur.engine.loader import PrivateLoader
from dpsur.errors import InvalidInputError


@contextmanager
def BatchMemoryManager(  # noqa: N802
    *, data_loader: Any, max_physical_batch_size: int, optimizer: Optimizer
) -> Iterator[PrivateLoader]:
    """Let a private loader yield each batch in microbatches of at most so many records.

    Inside, call `zero_grad`, `backward` and `step` for every microbatch, as for a batch. `step`
    and `scheduler.step` act on the last microbatch of a batch and do nothing on the others: each
    batch gets one draw of noise and is charged once.
    """
    checks.at_least_one("max_physical_batch_size", max_physical_batch_size)
    if not isinstance(data_loader, PrivateLoader):
        raise InvalidInputError(
            "data_loader must be the loader that make_private returned, got "
            f"{type(data_loader).__name__}"
        )
    if getattr(optimizer, "engine", None) is not data_loader.owner:
        raise InvalidInputError("optimizer and data_loader must come from one make_private")
    before = data_loader.poisson.most
    data_loader.poisson.most = max_physical_batch_size
    try:
        yield data_loader
    finally:
        data_loader.poisson.most = before
