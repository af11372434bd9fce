"""Products of float32 matrices on tensor cores.

A number of float32 is, to 22 bits, the sum of two numbers of TF32: what it is rounded to, and the
rounded rest. A product of matrices is then the sum of three in TF32, of all but the two rests. They
are made as one, of matrices three times as long, the small terms first: tensor cores cut off what
they add up, by about 2e-9 of the sum for every number that is added, so that what comes last counts
most. Products over many numbers are made in chunks and added up in float32. The error is 2e-6 to
5e-6 of the result where that of float32 is 5e-7, and that of TF32 3e-4. GPUs for data centres are
about twice as fast this way. Everywhere else, and where TF32 is forbidden, PyTorch's product is
used.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpsur.functional.process_settings import precision, tf32_is_forbidden
from dpsur.per_example.kernels.fused import SPLIT_TILE, split_matrix

# Where TF32 is at least five times as fast as float32: A100, H100 and H200, B200.
CAPABILITIES = ((8, 0), (9, 0), (10, 0), (10, 3))
# Splitting a matrix moves numbers: products must be this large in all directions for it to pay.
_LEAST_SIZE = 200
# Numbers that are added up by tensor cores alone: at most so many, in multiples of this.
_LONGEST_CHUNK, _CHUNK_UNIT = 2048, SPLIT_TILE[0]
# Rows of matrices begin at multiples of so many numbers, so that tensor cores can read them.
_ALIGNED = 4
# Numbers that are split at once, which bounds the memory for it.
_AT_ONCE = 2**25
# What the two factors hold side by side: the rest of each meets the rounded numbers of the other.
_LEFT, _RIGHT = (True, False, False), (False, True, False)
# Where one factor consists of numbers of TF32 it has no rest.
_SPLIT, _WHOLE = (True, False), (False, False)


def pays(rows: int, inner: int, columns: int, *factors: Tensor) -> bool:
    """Whether a product of two matrices of these sizes is faster on tensor cores."""
    if any(value.device.type != "cuda" or value.dtype != torch.float32 for value in factors):
        return False
    if not min(rows, inner, columns) or 1 / rows + 1 / inner + 1 / columns > 1 / _LEAST_SIZE:
        return False
    if torch.version.hip or tf32_is_forbidden() or torch.backends.cuda.matmul.allow_tf32:
        return False
    return torch.cuda.get_device_capability(factors[0].device) in CAPABILITIES


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, where no gradient of the weight is asked for."""
    if not weight.requires_grad and not torch.is_autocast_enabled(x.device.type):
        height, width = weight.shape
        if pays(x.numel() // max(1, width), width, height, x, weight):
            found: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
            return found
    return F.linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    """The layer, and the gradient of its input, by `product`."""

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
    """`one @ other + bias`, some rows of `one` at a time."""
    (rows, inner), columns = one.shape, other.shape[1]
    chunk = _chunk(inner)
    right = _split(other.mT, chunk, _RIGHT)
    if right is None:
        return torch.mm(one, other) if bias is None else torch.addmm(bias, one, other)
    found = one.new_empty(rows, columns)
    aligned = columns % _ALIGNED == 0
    for some in _parts(rows, inner if aligned else max(inner, columns)):
        left = _split(one[some], chunk, _LEFT)
        assert left is not None
        if aligned:
            _add_up(left, right, 3 * chunk, found[some], bias)
        else:  # written where rows begin as tensor cores like it, then copied
            room = one.new_empty(len(left), -(-columns // _ALIGNED) * _ALIGNED)[:, :columns]
            _add_up(left, right, 3 * chunk, room, bias)
            found[some] = room
    return found


def weighted_product(
    outputs: Tensor, inputs: Tensor, factors: Tensor, *, narrow: bool = False
) -> Tensor | None:
    """Sum over rows i of factor_i outputs_i^T inputs_i; one with the factor 0 is not read.

    Neighbouring rows share a factor where there are more rows than factors. `narrow` numbers are
    those of TF32 already. None where it would not pay.
    """
    (count, height), width = outputs.shape, inputs.shape[1]
    if not pays(height, count, width, outputs, inputs, factors):
        return None
    chunk, wide = _chunk(count), height >= width
    parts = (_SPLIT, _WHOLE) if narrow else (_LEFT, _RIGHT)
    # factors go to the smaller matrix, and the larger one is split some columns at a time
    smaller, larger = (inputs, outputs) if wide else (outputs, inputs)
    scaled = _split(smaller.mT, chunk, parts[0], factors, scaled=True)
    if scaled is None:
        return None
    found = inputs.new_empty(height, width)
    for some in _parts(larger.shape[1], count):
        kept = _split(larger.mT[some], chunk, parts[1], factors)
        assert kept is not None
        if wide:
            _add_up(kept, scaled, len(parts[0]) * chunk, found[some])
        else:
            _add_up(scaled, kept, len(parts[0]) * chunk, found[:, some])
    return found


def _chunk(inner: int) -> int:
    """Equal chunks of at most _LONGEST_CHUNK numbers."""
    chunks = -(-inner // _LONGEST_CHUNK)
    return -(-inner // (chunks * _CHUNK_UNIT)) * _CHUNK_UNIT


def _parts(count: int, each: int) -> list[slice]:
    """Ranges of about equal length, of at most _AT_ONCE numbers where each has so many."""
    parts = -(-count * each // _AT_ONCE)
    length = -(-count // (_ALIGNED * parts)) * _ALIGNED
    return [slice(start, min(start + length, count)) for start in range(0, count, length)]


def _split(
    matrix: Tensor,
    chunk: int,
    parts: tuple[bool, ...],
    factors: Tensor | None = None,
    *,
    scaled: bool = False,
) -> Tensor | None:
    """The rows of a matrix, split; factors are those of its columns.

    A view of a transpose is turned on the way: tensor cores want what is summed to lie together.
    """
    if factors is None and matrix.stride(1) == 1:
        return split_matrix(matrix, chunk, parts)
    if matrix.stride(0) != 1:
        matrix = matrix.mT.contiguous().mT
    return split_matrix(matrix.mT, chunk, parts, factors, scaled=scaled, turned=True)


def _add_up(
    left: Tensor, right: Tensor, length: int, out: Tensor, bias: Tensor | None = None
) -> None:
    """`left @ right.mT + bias`, chunk by chunk."""
    with precision(tf32=True):
        for start in range(0, left.shape[1], length):
            one, other = left[:, start : start + length], right[:, start : start + length].mT
            if start:
                out.addmm_(one, other)
            elif bias is None:
                torch.mm(one, other, out=out)
            else:
                torch.addmm(bias, one, other, out=out)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
