"""What is done in one kernel on a GPU, where PyTorch needs several and copies between them.

Per-example gradients of convolutions on tensor cores, sums of weighted rows, and the sums that the
scale and shift of a normalisation need. Every function returns None where it has no kernel for a
device, a type or a shape: then the caller computes the same in PyTorch.
"""

from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpsur.per_example.kernels.nvrtc import warn_slower

if TYPE_CHECKING:
    from dpsur.per_example.rules.patches import Window

# The kind of device that the kernels are for, and the oldest that has TF32.
DEVICE = "cuda"
_LEAST_CAPABILITY = (8, 0)
# A tile of gradients: output channels, entries of the kernel, places at once; warps and stages.
Tile = tuple[int, int, int, int, int]
_NARROW: Tile = (64, 64, 32, 4, 3)
_WIDE: Tile = (128, 128, 32, 8, 3)
_MOST_PROGRAMS = 2**31 - 1
_FEWEST_PROGRAMS = 1024
_PADDING_BLOCK = 1024


@cache
def _source() -> Any:
    """The module of kernels, or None where Triton is missing."""
    try:
        from dpsur.per_example.kernels import triton_source
    except Exception as error:  # not installed, or not for this system
        warn_slower(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        return None
    return triton_source


def _kernels(*values: Tensor) -> Any:
    """The kernels, if they can work on these tensors."""
    if any(value.dtype != torch.float32 for value in values):
        return None
    if not all(value.is_contiguous() and 0 < value.numel() < 2**31 for value in values):
        return None
    return _available(values[0].device)


def _available(device: torch.device) -> Any:
    """The kernels, if there are any for a device."""
    if device.type != DEVICE:
        return None
    if DEVICE == "cuda" and (
        torch.version.hip or torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY
    ):
        return None
    return _source()


def rounded_gradients(
    inputs: Tensor, outputs: Tensor, window: "Window", tile: Tile | None = None
) -> tuple[Tensor, Tensor] | None:
    """Gradient of a kernel for every example, of factors rounded to TF32, and squared norms.

    Gradients are in the shape (examples, out, in, *kernel). Whoever uses them measures and adds up
    the same numbers, so that rounding cannot carry a record past the bound.
    """
    if inputs.dim() != 4 or not inputs.numel():
        return None
    outputs = outputs.contiguous()
    inputs = inputs.contiguous()
    kernels = _kernels(inputs, outputs)
    if kernels is None:
        return None
    (examples, channels, *sides), (height, *maps) = inputs.shape, outputs.shape[1:]
    width, places = channels * prod(window.sizes), prod(maps)
    if tile is None:
        tile = _NARROW if height <= _NARROW[0] else _WIDE
    out, across, step, warps, stages = tile
    tiles = -(-height // out) * -(-width // across)
    if examples * tiles > _MOST_PROGRAMS or examples * height * width >= 2**62:
        return None
    padded = [side + 2 * margin for side, margin in zip(sides, window.margins, strict=True)]
    seen = inputs.new_empty(examples, channels, *padded)
    rows = inputs.new_empty(examples, height, channels, *window.sizes)
    squares = inputs.new_empty(examples, tiles)
    with _on(inputs):
        kernels.pad_and_round[(examples * channels, -(-prod(padded) // _PADDING_BLOCK))](
            inputs, seen, *sides, *window.margins, *padded, BLOCK=_PADDING_BLOCK
        )
        kernels.convolution_rows[(examples * tiles,)](
            seen,
            outputs,
            rows,
            squares,
            channels,
            prod(padded),
            padded[1],
            height,
            places,
            maps[1],
            tiles,
            *window.sizes,
            *window.strides,
            *window.dilations,
            OUT=out,
            IN=across,
            STEP=step,
            num_warps=warps,
            num_stages=stages,
        )
    return rows, squares.sum(1)


def split_matrix(
    values: Tensor,
    parts: tuple[bool, ...],
    factors: Tensor | None = None,
    *,
    length: int,
    first: int = 0,
    positions: int = 1,
    scaled: bool = False,
    turned: bool = False,
) -> Tensor | None:
    """A matrix for products on tensor cores: what rounding to TF32 leaves of it, and the rest.

    A row of the result has the numbers of a row of the matrix, or of a column where it is `turned`,
    filled up to `length` with zeros, once for each of the `parts`: the rounded rest (True), or the
    rounded numbers (False). With `factors` a row of the matrix is multiplied by its factor first
    (`scaled`), or only replaced by zeros where that is 0. So many `positions` share a factor; the
    matrix begins with position `first` of all.
    """
    kernels = _available(values.device)
    if kernels is None or values.dtype != torch.float32 or values.stride(1) != 1:
        return None
    rows, width = values.shape
    found = values.new_empty(width if turned else rows, len(parts) * length)
    down, along = (64, 32) if turned else (32, 64)
    high, wide = (length, width) if turned else (rows, length)
    with _on(values):
        kernels.split_matrix[(-(-high // down), -(-wide // along))](
            values,
            values if factors is None else factors,
            found,
            rows,
            width,
            values.stride(0),
            first,
            positions,
            length,
            FACTORED=factors is not None,
            SCALED=factors is not None and scaled,
            TURNED=turned,
            PARTS=len(parts),
            SMALL=sum(1 << place for place, rest in enumerate(parts) if rest),
            DOWN=down,
            ALONG=along,
        )
    return found


def weighted_rows(rows: Tensor, factors: Tensor) -> Tensor | None:
    """Sum of rows (examples, width), each times its factor; one with the factor 0 adds nothing."""
    kernels = _kernels(rows, factors)
    if kernels is None:
        return None
    count, width = rows.shape
    together, block = 8, 256
    columns = -(-width // block)
    parts = max(1, min(count // together, _FEWEST_PROGRAMS // columns))
    each = -(-count // (parts * together)) * together
    found = rows.new_empty(parts, width)
    with _on(rows):
        kernels.weighted_rows[(columns, parts)](
            rows, factors, found, count, width, each, TOGETHER=together, BLOCK=block
        )
    return found.sum(0) if parts > 1 else found[0]


def inner_norms(
    inner: Tensor, outer: Tensor, lost: float, rounding: float
) -> tuple[Tensor, Tensor] | None:
    """Squares and errors of `norms.InnerNorms`, from matrices of inner products.

    `lost` times the diagonals is added to the squares; `rounding` is the error of one product.
    """
    inner, outer = inner.contiguous(), outer.contiguous()
    kernels = _kernels(inner, outer)
    if kernels is None:
        return None
    examples, positions = inner.shape[:2]
    down, along = 16, 64
    parts = -(-positions // down)
    if positions**2 >= 2**31:
        return None
    squares, errors = inner.new_empty(2, examples, parts)
    with _on(inner):
        kernels.inner_norms[(examples, parts)](
            inner, outer, squares, errors, positions, lost, rounding, DOWN=down, ALONG=along
        )
    return squares.sum(1), errors.sum(1)


def channel_sums(
    inputs: Tensor, slopes: Tensor, means: Tensor, rates: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Sums over the map of every channel: of `slopes` times normalised inputs, and of `slopes`.

    `means` and `rates`, inverse deviations, are those of groups of channels, (examples, groups).
    """
    slopes = slopes.contiguous()
    kernels = _kernels(inputs, slopes, means, rates)
    if kernels is None:
        return None
    examples, channels = inputs.shape[:2]
    places = prod(inputs.shape[2:])
    block = min(256, max(32, 1 << (places - 1).bit_length()))
    together = max(1, 1024 // block)
    scale, shift = inputs.new_empty(2, examples, channels)
    with _on(inputs):
        kernels.channel_sums[(-(-examples * channels // together),)](
            inputs,
            slopes,
            means,
            rates,
            scale,
            shift,
            examples * channels,
            places,
            channels // means.shape[1],
            TOGETHER=together,
            BLOCK=block,
        )
    return scale, shift


def position_sums(
    inputs: Tensor, slopes: Tensor, means: Tensor, rates: Tensor
) -> tuple[Tensor, Tensor] | None:
    """The same for layer norms: tensors of shape (examples, positions, width), sums over positions.

    `means` and `rates` have one entry per position.
    """
    slopes = slopes.contiguous()
    kernels = _kernels(inputs, slopes, means, rates)
    if kernels is None:
        return None
    examples, positions, width = inputs.shape
    scale, shift = inputs.new_empty(2, examples, width)
    block = 64
    with _on(inputs):
        kernels.position_sums[(examples, -(-width // block))](
            inputs,
            slopes,
            means,
            rates,
            scale,
            shift,
            positions,
            width,
            TOGETHER=16,
            BLOCK=block,
        )
    return scale, shift


def _on(values: Tensor) -> Any:
    return torch.device("cpu") if values.device.type == "cpu" else torch.cuda.device(values.device)


class LstmCells:
    """The element-wise part of an LSTM, one kernel for a time and none between.

    Tensors are those of `rules/recurrent.py`, (directions, times, rows, ...).
    """

    _BLOCK = 256

    def __init__(self, kernels: Any, active: Tensor, cells: Tensor, squashed: Tensor) -> None:
        self._kernels, self._active, self._cells, self._squashed = kernels, active, cells, squashed
        directions, _, rows, width = squashed.shape
        count = directions * rows * width
        self._sizes = rows, width, active.stride(0), cells.stride(0), squashed.stride(0), count
        self._grid = (-(-count // self._BLOCK),)

    def forward(self, time: int, gates: Tensor, recurrent: Tensor, states: Tensor) -> None:
        """From gates before activation, given in two parts, to the next states."""
        with _on(gates):
            self._kernels.lstm_cell[self._grid](
                gates[:, time],
                recurrent,
                self._cells[:, time],
                self._active[:, time],
                self._cells[:, time + 1],
                self._squashed[:, time],
                states[:, time + 1],
                *self._sizes,
                BLOCK=self._BLOCK,
            )

    def backward(
        self, time: int, outputs: Tensor, recurrent: Tensor | None, slope: Tensor, gates: Tensor
    ) -> None:
        """Gradients of the gates; `recurrent` comes from the next time, `slope` is overwritten."""
        with _on(gates):
            self._kernels.lstm_cell_backward[self._grid](
                outputs[:, time],
                slope if recurrent is None else recurrent,
                self._active[:, time],
                self._cells[:, time],
                self._squashed[:, time],
                slope,
                gates[:, time],
                *self._sizes,
                LAST=recurrent is None,
                BLOCK=self._BLOCK,
            )


def lstm_cells(active: Tensor, cells: Tensor, squashed: Tensor) -> LstmCells | None:
    """One kernel per time of an LSTM, or None."""
    kernels = _kernels(active, cells, squashed)
    return None if kernels is None else LstmCells(kernels, active, cells, squashed)
