"""The element-wise part of an LSTM on a GPU: one kernel for a time and none between."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dpsur.per_example.kernels.fused import kernels_for, on_device


class LstmCells:
    """The element-wise part of an LSTM, on tensors of `rules/recurrent.py`.

    Gates, cells and squashed cells have the shape (directions, times, rows, ...); cells have one
    time more.
    """

    _BLOCK = 256

    def __init__(self, kernels: Any, active: Tensor, cells: Tensor, squashed: Tensor) -> None:
        self._kernels, self._active, self._states, self._by_time = kernels, active, cells, squashed
        directions, _, rows, width = squashed.shape
        count = directions * rows * width
        self._sizes = rows, width, active.stride(0), cells.stride(0), squashed.stride(0), count
        self._grid = (-(-count // self._BLOCK),)

    def forward(self, time: int, gates: Tensor, recurrent: Tensor, states: Tensor) -> None:
        """From gates before activation, given in two parts, to the next states."""
        with on_device(gates):
            self._kernels.lstm_cell[self._grid](
                gates[:, time],
                recurrent,
                self._states[:, time],
                self._active[:, time],
                self._states[:, time + 1],
                self._by_time[:, time],
                states[:, time + 1],
                *self._sizes,
                BLOCK=self._BLOCK,
            )

    def backward(
        self, time: int, outputs: Tensor, recurrent: Tensor | None, slope: Tensor, gates: Tensor
    ) -> None:
        """Gradients of the gates; `recurrent` comes from the next time, `slope` is overwritten."""
        with on_device(gates):
            self._kernels.lstm_cell_backward[self._grid](
                outputs[:, time],
                slope if recurrent is None else recurrent,
                self._active[:, time],
                self._states[:, time],
                self._by_time[:, time],
                slope,
                gates[:, time],
                *self._sizes,
                LAST=recurrent is None,
                BLOCK=self._BLOCK,
            )


def lstm_cells(active: Tensor, cells: Tensor, squashed: Tensor) -> LstmCells | None:
    """One kernel per time of an LSTM, or None."""
    if kernels_for(active, cells, squashed) is None:
        return None
    from dpsur.per_example.kernels import triton_recurrent

    return LstmCells(triton_recurrent, active, cells, squashed)


@contextmanager
def rounding_of_layers() -> Iterator[None]:
    """Let a recurrence round where PyTorch's own would: it follows the setting of cuDNN."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
