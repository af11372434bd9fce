"""Layers applied to all records, in pieces."""

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# Records per call of the layers. On the host, what is made should still be in a cache when it is
# copied to its place.
_RECORDS_PER_THREAD, _RECORDS_ON_A_CARD = 32, 2048


def apply_layers(
    layers: nn.Sequential, inputs: Tensor, *, device: torch.device | None = None
) -> Tensor:
    """What the layers make of all records, computed on `device` and put where the inputs are."""
    device = device or inputs.device
    layers = copy.deepcopy(layers).to(device)
    with torch.no_grad():
        one = layers(torch.zeros(1, *inputs.shape[1:], device=device))
    result = torch.empty(len(inputs), *one.shape[1:], dtype=one.dtype, device=inputs.device)
    step = _RECORDS_ON_A_CARD if device.type == "cuda" else _RECORDS_PER_THREAD

    @torch.no_grad()
    def fill(start: int) -> None:
        piece = slice(start, start + step)
        result[piece] = layers(inputs[piece].to(device))

    starts = range(0, len(inputs), step)
    if device.type == "cuda":
        for start in starts:
            fill(start)
    else:
        with _one_core_each() as threads, ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, starts))
    return result


@contextmanager
def _one_core_each() -> Iterator[int]:
    """Let every operation use one thread; return how many may run side by side.

    Threads with a piece each never wait for one another. Threads that share every operation do, and
    are several times slower than one where other programs keep the cores busy.
    """
    threads = int(torch.get_num_threads())
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)
