"""Fused Triton kernels, where PyTorch needs several kernels and copies between them.

Per-example gradients of convolutions on tensor cores, sums of weighted rows, the sums that the
scale and shift of a normalisation need, and one kernel for a time of an LSTM. Every function
returns None where it has no kernel for a device, a type or a shape: then the caller computes the
same in PyTorch.
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
_SMALL: Tile = (16, 16, 64, 1, 3)
_FLAT: Tile = (16, 64, 64, 2, 3)
_NARROW: Tile = (64, 64, 32, 4, 3)
_WIDE: Tile = (128, 128, 32, 8, 3)
_MOST_PROGRAMS = 2**31 - 1
# Of a kernel that sees one channel: its entries times the places that are worked on at once.
_DEPTHWISE_TILE, _MOST_ENTRIES = 4096, 1024
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


# What kernels for products and sums read. They compute in float32 whatever they read.
READABLE = (torch.float32, torch.bfloat16)


def kernels_for(*values: Tensor, types: tuple[torch.dtype, ...] = (torch.float32,)) -> Any:
    """The kernels, if they can work on these tensors."""
    if any(value.dtype not in types for value in values):
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


def has_kernels(values: Tensor) -> bool:
    return (
        values.dtype in READABLE
        and 0 < values.numel() < 2**31
        and _available(values.device) is not None
    )


def rounded_gradients(
    inputs: Tensor, outputs: Tensor, window: "Window", groups: int = 1
) -> tuple[Tensor, Tensor] | None:
    """Gradient of a kernel for every example, of rounded factors, and its squared norm.

    Factors are rounded to TF32 or, where the outputs are in bfloat16, to that; then gradients are
    stored in bfloat16 too. They have the shape (examples, out, in, *kernel). Norms are those of
    what is stored, and sums are made of it, so that rounding cannot carry a record past the bound.
    """
    if not inputs.numel() or inputs.dim() != 4:
        return None
    outputs = outputs.contiguous()
    inputs = inputs.contiguous()
    kernels = kernels_for(inputs, outputs, types=READABLE)
    if kernels is None:
        return None
    examples, kept = len(inputs), outputs.dtype
    # A group of channels is convolved by itself, as if it were an example of its own.
    count, channels, sides = examples * groups, inputs.shape[1] // groups, inputs.shape[2:]
    height, maps = outputs.shape[1] // groups, outputs.shape[2:]
    width, places = channels * prod(window.sizes), prod(maps)
    tile = _NARROW if height <= _NARROW[0] else _WIDE
    if height <= _SMALL[0]:  # of few output channels, such as one in a group
        tile = _SMALL if width <= _SMALL[1] else _FLAT
    out, across, step, warps, stages = tile
    step = step if kept == torch.float32 else 2 * step
    tiles = -(-height // out) * -(-width // across)
    if count * tiles > _MOST_PROGRAMS or count * height * width >= 2**62:
        return None
    padded = [side + 2 * margin for side, margin in zip(sides, window.margins, strict=True)]
    seen = inputs.new_empty(count, channels, *padded, dtype=kept)
    rows = outputs.new_empty(examples, groups * height, channels, *window.sizes)
    squares = inputs.new_empty(count, tiles, dtype=torch.float32)
    with on_device(inputs):
        kernels.pad_and_round[(count * channels, -(-prod(padded) // _PADDING_BLOCK))](
            inputs, seen, *sides, *window.margins, *padded, BLOCK=_PADDING_BLOCK
        )
        kernels.convolution_rows[(count * tiles,)](
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
    return rows, squares.view(examples, -1).sum(1)


def depthwise_gradients(
    inputs: Tensor, outputs: Tensor, window: "Window"
) -> tuple[Tensor, Tensor] | None:
    """Gradient of a kernel that sees one channel for every example, and its squared norm.

    Gradients have the shape (examples, out, 1, *kernel).
    """
    if inputs.dim() != 4:
        return None
    inputs, outputs = inputs.contiguous(), outputs.contiguous()
    kernels = kernels_for(inputs, outputs, types=READABLE)
    (examples, channels, *sides), (height, *maps) = inputs.shape, outputs.shape[1:]
    entries = max(16, 1 << (prod(window.sizes) - 1).bit_length())
    if kernels is None or examples * height > _MOST_PROGRAMS or entries > _MOST_ENTRIES:
        return None
    rows = inputs.new_empty(examples, height, 1, *window.sizes, dtype=torch.float32)
    squares = inputs.new_empty(examples, height, dtype=torch.float32)
    places = prod(maps)
    bits = (places - 1).bit_length()  # powers of four: fewer kernels to compile
    step = min(_DEPTHWISE_TILE // entries, max(16, 1 << (bits + bits % 2)))
    with on_device(inputs):
        kernels.depthwise_rows[(examples * height,)](
            inputs,
            outputs,
            rows,
            squares,
            height // channels,
            *sides,
            places,
            maps[1],
            *window.sizes,
            *window.strides,
            *window.dilations,
            *window.margins,
            ENTRIES=entries,
            STEP=step,
            num_warps=4 if entries * step >= _DEPTHWISE_TILE else 1,
        )
    return rows, squares.sum(1)


def round_to_tf32(values: Tensor) -> Tensor | None:
    values = values.contiguous()
    kernels = kernels_for(values, types=READABLE)
    if kernels is None:
        return None
    found = torch.empty_like(values, dtype=torch.float32)
    size = values[0].numel()
    with on_device(values):
        kernels.pad_and_round[(len(values), -(-size // _PADDING_BLOCK))](
            values, found, 1, size, 0, 0, 1, size, BLOCK=_PADDING_BLOCK
        )
    return found


def split_matrix(
    values: Tensor,
    parts: tuple[bool, ...],
    factors: Tensor | None = None,
    *,
    length: int,
    first: int = 0,
    positions: int = 1,
    scaled: bool = False,
    transposed: bool = False,
    dtype: torch.dtype = torch.float32,
    room: int = 0,
) -> Tensor | None:
    """A matrix for products on tensor cores: what rounding leaves of it, and the rest.

    Numbers are rounded to TF32, or to bfloat16 if that is the `dtype` of the result.

    A row of the result has the numbers of a row of the matrix, or of a column if it is
    `transposed`, filled up to `length` with zeros, once for each of the `parts`: the rounded rest
    (True), or the rounded numbers (False). With `factors` a row of the matrix is multiplied by its
    factor first (`scaled`), or only replaced by zeros if that is 0. So many `positions` share a
    factor; the matrix begins with position `first` of all. There is `room` for so many rows at
    least. What the rows beyond those of the matrix hold is undefined.
    """
    kernels = _available(values.device)
    if kernels is None or values.dtype not in READABLE or values.stride(1) != 1:
        return None
    rows, width = values.shape
    high = max(room, width if transposed else rows)
    found = values.new_empty(high, len(parts) * length, dtype=dtype)
    down, along = (64, 32) if transposed else (32, 64)
    high, wide = (length, width) if transposed else (rows, length)
    with on_device(values):
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
            TRANSPOSED=transposed,
            PARTS=len(parts),
            SMALL=sum(1 << place for place, rest in enumerate(parts) if rest),
            DOWN=down,
            ALONG=along,
        )
    return found


def weighted_rows(rows: Tensor, factors: Tensor) -> Tensor | None:
    """Sum of rows (examples, width), each times its factor; one with the factor 0 adds nothing."""
    kernels = kernels_for(rows, types=READABLE)
    if kernels is None or factors.dtype != torch.float32 or not factors.is_contiguous():
        return None
    count, width = rows.shape
    together, block = 8, 256
    columns = -(-width // block)
    parts = max(1, min(count // together, _FEWEST_PROGRAMS // columns))
    each = -(-count // (parts * together)) * together
    found = rows.new_empty(parts, width, dtype=torch.float32)
    with on_device(rows):
        kernels.weighted_rows[(columns, parts)](
            rows, factors, found, count, width, each, TOGETHER=together, BLOCK=block
        )
    return found.sum(0) if parts > 1 else found[0]


# Tiles of pairs of positions, entries at once, and entries that tensor cores add up by themselves.
_SIDE, _ENTRIES, _CHUNK = 64, 64, 1024
# Matrices of inner products take more time than their factors, but for very wide ones and for
# factors in bfloat16. Where there are many positions they take too much memory.
_WIDEST, _MANY_POSITIONS = 2**14, 1024
# Where a product may have this relative error, numbers may be split into two of bfloat16: what is
# left out then is at most 3 * 2^-18 of it.
_ERROR_OF_HALVES = 3e-5


def product_norms(
    inputs: Tensor, outputs: Tensor, lost: float, rounding: float
) -> tuple[Tensor, Tensor] | None:
    """Squares and errors of `norms.InnerNorms`, from factors (examples, positions, width)."""
    inputs, outputs = inputs.contiguous(), outputs.contiguous()
    kernels = kernels_for(inputs, outputs, types=READABLE)
    if kernels is None or inputs.dtype != outputs.dtype:
        return None
    examples, positions, width = inputs.shape
    wide = max(width, outputs.shape[2]) > _WIDEST or inputs.dtype == torch.bfloat16
    if wide and positions < _MANY_POSITIONS:
        return None
    tiles = -(-positions // _SIDE)
    seen, slopes = (
        torch.linalg.vector_norm(value, dim=2, dtype=torch.float32) for value in (inputs, outputs)
    )
    squares, errors = seen.new_zeros(2, examples, tiles * tiles)
    with on_device(inputs):
        kernels.product_norms[(examples, tiles, tiles)](
            inputs,
            outputs,
            seen,
            slopes,
            squares,
            errors,
            positions,
            width,
            outputs.shape[2],
            SIDE=_SIDE,
            STEP=_ENTRIES,
            CHUNK=_CHUNK,
            HALVES=inputs.dtype == torch.float32 and rounding >= _ERROR_OF_HALVES,
            num_warps=4,
            num_stages=3,
        )
    whole = squares.sum(1) + lost * (seen.square() + slopes.square()).sum(1)
    return whole, rounding * errors.sum(1)


def channel_sums(
    inputs: Tensor, means: Tensor, rates: Tensor, slopes: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Sums over the map of every channel: of `slopes` times normalised inputs, and of `slopes`.

    `means` and `rates`, inverse deviations, are those of groups of channels, (examples, groups).
    """
    slopes = slopes.contiguous()
    kernels = kernels_for(inputs, slopes, means, rates)
    if kernels is None:
        return None
    examples, channels = inputs.shape[:2]
    places = prod(inputs.shape[2:])
    block = min(256, max(32, 1 << (places - 1).bit_length()))
    together = max(1, 1024 // block)
    scale, shift = inputs.new_empty(2, examples, channels)
    with on_device(inputs):
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
    inputs: Tensor, means: Tensor, rates: Tensor, slopes: Tensor
) -> tuple[Tensor, Tensor] | None:
    """The same for layer norms: tensors of shape (examples, positions, width), sums over positions.

    `means` and `rates` have one entry per position.
    """
    slopes = slopes.reshape(inputs.shape).contiguous()
    kernels = kernels_for(inputs, slopes, means, rates)
    if kernels is None:
        return None
    examples, positions, width = inputs.shape
    scale, shift = inputs.new_empty(2, examples, width)
    block = 64
    with on_device(inputs):
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


def on_device(values: Tensor) -> Any:
    return torch.device("cpu") if values.device.type == "cpu" else torch.cuda.device(values.device)


class LstmCells:
    """The element-wise part of an LSTM, on tensors of `rules/recurrent.py`, if it is `there`.

    Gates, cells and squashed cells have the shape (directions, times, rows, ...); cells have one
    time more.
    """

    _BLOCK = 256

    def __init__(self, active: Tensor, cells: Tensor, squashed: Tensor) -> None:
        self._kernels = kernels_for(active, cells, squashed)
        self._active, self._states, self._by_time = active, cells, squashed
        self.there = self._kernels is not None
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
