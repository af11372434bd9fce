"""Processes that share a card."""

import torch

from dpsur.experiments.base import Options
from dpsur.runs.prepare import choose_device


def keep_to_share(options: Options) -> None:
    """Limit a process that makes one of N parts of a grid to an Nth of the card's memory.

    Pieces of batches and tables are sized by what is free. Without a limit the first process would
    leave nothing to the others.
    """
    _, parts = options.shard
    if parts == 1:
        return
    device = choose_device(options.device or "auto")
    if device.type == "cuda":
        # by its number: "the current card" is not accepted here
        number = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_per_process_memory_fraction(1 / parts, number)
