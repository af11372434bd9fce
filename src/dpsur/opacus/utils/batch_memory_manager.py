"""`BatchMemoryManager`: a logical batch in microbatches of a bounded size."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from dpsur import checks
from dpsur.engine.loader import PrivateLoader
from dpsur.errors import InvalidInputError


@contextmanager
def BatchMemoryManager(  # noqa: N802  the name in Opacus
    *,
    data_loader: PrivateLoader,
    max_physical_batch_size: int,
    optimizer: Optimizer,  # noqa: ARG001  it knows by itself which microbatch is the last
) -> Iterator[PrivateLoader]:
    """Let a private loader yield at most so many records at once.

    `optimizer.step()` after a microbatch that is not the last of its batch does nothing.
    """
    checks.at_least_one("max_physical_batch_size", max_physical_batch_size)
    if not isinstance(data_loader, PrivateLoader):
        raise InvalidInputError(
            "data_loader must be the loader that make_private returned, got "
            f"{type(data_loader).__name__}"
        )
    before = data_loader.poisson.most
    data_loader.poisson.most = max_physical_batch_size
    try:
        yield data_loader
    finally:
        data_loader.poisson.most = before
