"""The element-wise part of recurrent layers on a GPU: one kernel for a time and none between."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dpsur.per_example.kernels.fused import kernels_for, on_device


def _recurrent(*values: Tensor) -> Any:
    """The kernels, if they can work on these tensors."""
    if kernels_for(*values) is None:
        return None
    from dpsur.per_example.kernels import triton_recurrent

    return triton_recurrent


class _Cells:
    """Tensors of `rules/recurrent.py`, (directions, times, rows, ...), and the sizes of kernels.

    `active` holds the gates, `states` has one time more than `by_time`.
    """

    _BLOCK = 256

    def __init__(self, kernels: Any, active: Tensor, states: Tensor, by_time: Tensor) -> None:
        self._kernels, self._active, self._states, self._by_time = kernels, active, states, by_time
        directions, _, rows, width = by_time.shape
        count = directions * rows * width
        self._sizes = rows, width, active.stride(0), states.stride(0), by_time.stride(0), count
        self._grid = (-(-count // self._BLOCK),)


class LstmCells(_Cells):
    """The element-wise part of an LSTM: gates, cells and squashed cells."""

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
    kernels = _recurrent(active, cells, squashed)
    return None if kernels is None else LstmCells(kernels, active, cells, squashed)


class GruCells(_Cells):
    """The element-wise part of a GRU: gates, states and what is recalled of them."""

    def forward(self, time: int, gates: Tensor, recurrent: Tensor, bias: Tensor) -> None:
        """From gates before activation, given in two parts and a bias, to the next states."""
        with on_device(gates):
            self._kernels.gru_cell[self._grid](
                gates[:, time],
                recurrent,
                bias,
                self._states[:, time],
                self._active[:, time],
                self._by_time[:, time],
                self._states[:, time + 1],
                *self._sizes,
                BLOCK=self._BLOCK,
            )

    def backward(
        self,
        time: int,
        outputs: Tensor,
        recurrent: Tensor | None,
        slope: Tensor,
        gates: Tensor,
        inputs: Tensor,
    ) -> None:
        """Gradients of the gates' hidden and input part; `slope` is overwritten."""
        with on_device(gates):
            self._kernels.gru_cell_backward[self._grid](
                outputs[:, time],
                slope if recurrent is None else recurrent,
                self._active[:, time],
                self._by_time[:, time],
                self._states[:, time],
                slope,
                gates[:, time],
                inputs[:, time],
                *self._sizes,
                LAST=recurrent is None,
                BLOCK=self._BLOCK,
            )


def gru_cells(active: Tensor, states: Tensor, recalled: Tensor) -> GruCells | None:
    """One kernel per time of a GRU, or None."""
    kernels = _recurrent(active, states, recalled)
    return None if kernels is None else GruCells(kernels, active, states, recalled)


@contextmanager
def rounding_of_layers() -> Iterator[None]:
    """Let a recurrence round where PyTorch's own would: it follows the setting of cuDNN."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
