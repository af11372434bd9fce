"""Products of float32 matrices on tensor cores.

A number of float32 is, to 22 bits, the sum of two numbers of TF32: what it is rounded to, and the
rounded rest. A product of matrices is then the sum of three in TF32, of all but the two rests. They
are made as one, of matrices three times as long, the small terms first: tensor cores cut off what
they add up, the more the larger it has become. Products over many numbers are made in chunks and
added up in float32. The error is a few millionths of the result, several times that of float32 and
about a hundredth of that of TF32 (`tests/per_example/test_products.py` bounds it). GPUs for data
centres are faster this way. Everywhere else, and where TF32 is forbidden, PyTorch's product is
used.

Numbers of bfloat16 are multiplied as they are and added up in float32. Where such a matrix is
scaled first, it becomes the sum of two in bfloat16, to 16 bits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from dpsur.functional.process_settings import precision, tf32_is_forbidden, widen
from dpsur.per_example.kernels.fused import READABLE, split_matrix

DEVICE = "cuda"  # of which there are tensor cores
# Where TF32 is at least five times as fast as float32: A100, H100 and H200, B200.
CAPABILITIES = ((8, 0), (9, 0), (10, 0), (10, 3))
# Splitting a matrix moves numbers: products must be this large in all directions for it to pay.
_LEAST_SIZE = 200
# Multiplications from which on it pays to make a dozen launches of one, where the host makes them
# anew every time: about a millisecond in float32.
_LEAST_EAGER_WORK = 3e10
# Numbers that are added up by tensor cores alone.
_LONGEST = 2048
# Rows of matrices begin at multiples of so many numbers, so that tensor cores can read them.
_ALIGNED = 4
# Numbers of both factors that are split at once, which take 12 bytes each: this part of the inputs
# and outputs of a layer, so that it stays small beside them, but so many at least and most.
_PART_AT_ONCE, _AT_ONCE, _MOST_AT_ONCE = 1 / 4, 2**21, 2**24
# Rows and columns of a product that are computed at once: fewer would leave a GPU half idle. Rather
# fewer numbers are added up at once, but not below this.
_SIDE, _SHORTEST = 2048, 256
# What the two factors hold side by side: the rest of each meets the rounded numbers of the other.
_LEFT, _RIGHT = (True, False, False), (False, True, False)
# Where one factor has been rounded before it has no rest.
_SPLIT, _WHOLE = (True, False), (False, False)


def batched_product(one: Tensor, other: Tensor) -> Tensor:
    if one.dtype == other.dtype == torch.bfloat16 and one.is_cuda:
        found: Tensor = torch.bmm(one, other, out_dtype=torch.float32)
        return found
    return torch.bmm(widen(one), widen(other))


# Whether launches cost nothing, since they are made once, for a CUDA graph. For the whole process:
# backward passes run in threads of their own.
_captured = False


@contextmanager
def launches_are_captured() -> Iterator[None]:
    """Work for a CUDA graph: a product may then be made of many launches."""
    global _captured
    before, _captured = _captured, True
    try:
        yield
    finally:
        _captured = before


def pays(rows: int, inner: int, columns: int, *factors: Tensor) -> bool:
    """Whether a product of two matrices of these sizes is faster on tensor cores."""
    for value in factors:
        if type(value) not in (Tensor, nn.Parameter) or value.device.type != DEVICE:
            return False
        if value.dtype not in READABLE:
            return False
    if not min(rows, inner, columns) or 1 / rows + 1 / inner + 1 / columns > 1 / _LEAST_SIZE:
        return False
    if not _captured and rows * inner * columns < _LEAST_EAGER_WORK:
        return False
    if torch.version.hip or tf32_is_forbidden() or torch.backends.cuda.matmul.allow_tf32:
        return False
    return torch.cuda.get_device_capability(factors[0].device) in CAPABILITIES


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found = fast_linear(x, weight, bias)
    return F.linear(x, weight, bias) if found is None else found


def fast_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """`F.linear` on tensor cores; None where that does not pay, or weights need a gradient."""
    if any(value is not None and value.requires_grad for value in (weight, bias)):
        return None
    if torch.is_autocast_enabled(x.device.type) or is_functorch_wrapped_tensor(x):
        return None
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        return None
    height, width = weight.shape
    if not pays(x.numel() // max(1, width), width, height, x, weight):
        return None
    found: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return product(_flat(x), weight.mT, bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        found = product(_flat(gradients[0]), weight)
        return found.view(*gradients[0].shape[:-1], weight.shape[1]), None, None


def product(one: Tensor, other: Tensor, bias: Tensor | None = None) -> Tensor:
    """`one @ other + bias`."""
    found = one.new_empty(len(one), other.shape[1])

    def left(rows: slice, chunk: slice, length: int, room: int) -> Tensor | None:
        return _split(one[rows, chunk], _LEFT, length, room=room)

    def right(columns: slice, chunk: slice, length: int, room: int) -> Tensor | None:
        return _split(other.mT[columns, chunk], _RIGHT, length, room=room)

    if _multiply(left, right, one.shape[1], found, len(one), bias):
        return found
    return torch.mm(one, other) if bias is None else torch.addmm(bias, one, other)


@torch.no_grad()
def weighted_product(
    outputs: Tensor,
    inputs: Tensor,
    factors: Tensor,
    found: Tensor,
    *,
    add: bool = False,
) -> bool:
    """Write the sum over rows i of factor_i outputs_i^T inputs_i; factor 0: row i is not read.

    Neighbouring rows share a factor where there are more rows than factors. With `add` the sum is
    added to what is in `found`. False where it would not pay; nothing is written then.
    """
    (count, height), width = outputs.shape, inputs.shape[1]
    if not pays(height, count, width, outputs, inputs, factors):
        return False
    # factors go to the smaller matrix; what has no factor must not be read in either
    wide, positions = height >= width, count // len(factors)
    kind = (outputs if wide else inputs).dtype  # of the one that is not scaled
    first, second = (_LEFT, _RIGHT) if kind == torch.float32 else (_SPLIT, _WHOLE)

    def split(
        matrix: Tensor, some: slice, chunk: slice, length: int, room: int, *, scaled: bool
    ) -> Tensor | None:
        return _split(
            matrix.mT[some, chunk],
            first if scaled else second,
            length,
            factors,
            first=chunk.start,
            positions=positions,
            scaled=scaled,
            dtype=kind,
            room=room,
        )

    left, right = partial(split, outputs, scaled=not wide), partial(split, inputs, scaled=wide)
    return _multiply(left, right, count, found, count, add=add)


Part = Callable[[slice, slice, int, int], Tensor | None]


def _multiply(
    left: Part,
    right: Part,
    inner: int,
    out: Tensor,
    batch: int,
    bias: Tensor | None = None,
    *,
    add: bool = False,
) -> bool:
    """Write the product of two matrices, some rows and columns at a time, which bounds its memory.

    `batch` is the one of its three sizes that grows with the batch.

    `left` and `right` split some rows of the first factor, or columns of the second, over some of
    the numbers that are added up, with room for so many. False if they cannot, which the first call
    says. With `add` the product is added to what is there.
    """
    rows, columns = out.shape
    length, high, wide = _tile(rows, columns, inner, batch)
    down, along = _ranges(rows, high), _ranges(columns, wide)
    # Rows of a result have to begin where tensor cores can write them: else columns are copied.
    aligned = columns % _ALIGNED == 0 and out.data_ptr() % (4 * _ALIGNED) == 0
    # What is in the outer loop is split once, the other one for each of its ranges.
    by_rows = aligned and rows + len(down) * columns < columns + len(along) * rows
    for one in down if by_rows else along:
        place, space = (out[one] if by_rows else out[:, one]), 0
        if not aligned:  # tensor cores are slow with rows that are not filled up
            space = -(-place.shape[1] // _ALIGNED) * _ALIGNED
            place = out.new_empty(rows, space)
        for chunk in _ranges(inner, length):
            held = (left if by_rows else right)(one, chunk, length, space)
            for other in along if by_rows else down:
                met = (right if by_rows else left)(other, chunk, length, 0)
                if held is None or met is None:
                    return False
                shift = None
                if bias is not None and not chunk.start:
                    shift = bias[other if by_rows else one]
                    shift = F.pad(shift, (0, max(0, space - len(shift))))
                begun = chunk.start > 0 or (add and aligned)
                if by_rows:
                    _add(held, met, place[:, other], shift, begun=begun)
                else:
                    _add(met, held, place[other], shift, begun=begun)
        if not aligned:
            filled = out[:, one]
            found = place[:, : filled.shape[1]]
            filled.add_(found) if add else filled.copy_(found)
    return True


def _tile(rows: int, columns: int, inner: int, batch: int) -> tuple[int, int, int]:
    """How many numbers are added up at once, for how many rows and columns."""
    numbers = batch * (rows + columns + inner - batch)
    room = max(_AT_ONCE, min(_MOST_AT_ONCE, int(_PART_AT_ONCE * numbers)))
    high, wide = min(rows, _SIDE), min(columns, _SIDE)
    chunks = -(-inner // min(_LONGEST, max(_SHORTEST, room // (high + wide))))
    length = -(-inner // (chunks * _ALIGNED)) * _ALIGNED
    both = room // length
    if rows <= columns:
        high = max(high, min(rows, both // 2))
        wide = max(wide, both - high)
    else:
        wide = max(wide, min(columns, both // 2))
        high = max(high, both - wide)
    return length, high, wide


def _ranges(count: int, most: int) -> list[slice]:
    """Ranges of about equal length, of at most so many."""
    parts = -(-count // max(_ALIGNED, most))
    length = -(-count // (_ALIGNED * parts)) * _ALIGNED
    return [slice(start, min(start + length, count)) for start in range(0, count, length)]


def _split(
    matrix: Tensor,
    parts: tuple[bool, ...],
    length: int,
    factors: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """The rows of a matrix, split; factors are those of its columns.

    A view of a transpose is copied on the way: tensor cores want what is summed to lie together.
    """
    if factors is None and matrix.stride(1) == 1:
        return split_matrix(matrix, parts, length=length, **options)
    if matrix.stride(0) != 1:
        matrix = matrix.mT.contiguous().mT
    return split_matrix(matrix.mT, parts, factors, length=length, transposed=True, **options)


def _add(left: Tensor, right: Tensor, out: Tensor, bias: Tensor | None, *, begun: bool) -> None:
    """`left @ right.mT`, written or added to what is there."""
    if left.dtype == torch.bfloat16:
        if left.is_cuda:
            found = torch.mm(left, right.mT, out_dtype=torch.float32)
        else:
            found = left.float() @ right.mT.float()
        out.add_(found) if begun else out.copy_(found)
        return
    with precision(tf32=True):
        if begun:
            out.addmm_(left, right.mT)
        elif bias is None:
            torch.mm(left, right.mT, out=out)
        else:
            torch.addmm(bias, left, right.mT, out=out)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
