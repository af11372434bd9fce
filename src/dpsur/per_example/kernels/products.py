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

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from dpsur.functional.process_settings import precision, tf32_is_forbidden, widen
from dpsur.per_example.kernels.fused import READABLE, split_matrix

# Where TF32 is at least five times as fast as float32: A100, H100 and H200, B200.
CAPABILITIES = ((8, 0), (9, 0), (10, 0), (10, 3))
# Splitting a matrix moves numbers: products must be this large in all directions for it to pay.
_LEAST_SIZE = 200
# Numbers that are added up by tensor cores alone.
_LONGEST = 2048
# Rows of matrices begin at multiples of so many numbers, so that tensor cores can read them.
_ALIGNED = 4
# Numbers that are split at once, which bounds the memory for it.
_AT_ONCE = 2**25
# What the two factors hold side by side: the rest of each meets the rounded numbers of the other.
_LEFT, _RIGHT = (True, False, False), (False, True, False)
# Where one factor has been rounded before it has no rest.
_SPLIT, _WHOLE = (True, False), (False, False)


def batched_product(one: Tensor, other: Tensor) -> Tensor:
    """`torch.bmm`, of factors in bfloat16 with a result in float32."""
    if one.dtype == other.dtype == torch.bfloat16 and one.is_cuda:
        found: Tensor = torch.bmm(one, other, out_dtype=torch.float32)
        return found
    return torch.bmm(widen(one), widen(other))


def pays(rows: int, inner: int, columns: int, *factors: Tensor) -> bool:
    """Whether a product of two matrices of these sizes is faster on tensor cores."""
    for value in factors:
        if type(value) not in (Tensor, nn.Parameter) or value.device.type != "cuda":
            return False
        if value.dtype not in READABLE:
            return False
    if not min(rows, inner, columns) or 1 / rows + 1 / inner + 1 / columns > 1 / _LEAST_SIZE:
        return False
    if torch.version.hip or tf32_is_forbidden() or torch.backends.cuda.matmul.allow_tf32:
        return False
    return torch.cuda.get_device_capability(factors[0].device) in CAPABILITIES


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, on tensor cores where that pays."""
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
    """`one @ other + bias`, some rows and columns at a time."""
    (rows, inner), columns = one.shape, other.shape[1]
    found, length = one.new_empty(rows, columns), _length(inner)
    for some in _ranges(rows, _AT_ONCE // length):
        for several in _ranges(columns, _AT_ONCE // length):
            out = place = found[some, several]
            shift = None if bias is None else bias[several]
            if columns % _ALIGNED:  # tensor cores are slow with rows that are not filled up
                wide = -(-out.shape[1] // _ALIGNED) * _ALIGNED
                place = one.new_empty(len(out), wide)
                shift = None if shift is None else F.pad(shift, (0, wide - len(shift)))
            for chunk in _ranges(inner, length):
                left = _split(one[some, chunk], _LEFT, length)
                right = _split(other.mT[several, chunk], _RIGHT, length, room=place.shape[1])
                if left is None or right is None:
                    return torch.mm(one, other) if bias is None else torch.addmm(bias, one, other)
                _add(left, right, place, None if chunk.start else shift, begun=chunk.start > 0)
            if place is not out:
                out.copy_(place[:, : out.shape[1]])
    return found


@torch.no_grad()
def weighted_product(outputs: Tensor, inputs: Tensor, factors: Tensor) -> Tensor | None:
    """Sum over rows i of factor_i outputs_i^T inputs_i; one with the factor 0 is not read.

    Neighbouring rows share a factor where there are more rows than factors. None where it would not
    pay.
    """
    (count, height), width = outputs.shape, inputs.shape[1]
    if not pays(height, count, width, outputs, inputs, factors):
        return None
    # factors go to the smaller matrix; what has no factor must not be read in either
    wide = height >= width
    smaller, larger = (inputs, outputs) if wide else (outputs, inputs)
    narrow = larger.dtype == torch.bfloat16
    parts = (_SPLIT, _WHOLE) if narrow else (_LEFT, _RIGHT)
    positions, length = count // len(factors), _length(count)
    found = inputs.new_empty(height, width, dtype=torch.float32)
    for some in _ranges(larger.shape[1], _AT_ONCE // length):
        place = found[some] if wide else found[:, some]
        for chunk in _ranges(count, length):
            split = partial(
                _split, length=length, factors=factors, first=chunk.start, dtype=larger.dtype
            )
            scaled = split(smaller.mT[:, chunk], parts[0], positions=positions, scaled=True)
            kept = split(larger.mT[some, chunk], parts[1], positions=positions)
            if scaled is None or kept is None:
                return None
            left, right = (kept, scaled) if wide else (scaled, kept)
            _add(left, right, place, None, begun=chunk.start > 0)
    return found


def _length(inner: int) -> int:
    """Of equal chunks of at most _LONGEST numbers."""
    chunks = -(-inner // _LONGEST)
    return -(-inner // (chunks * _ALIGNED)) * _ALIGNED


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
    *,
    first: int = 0,
    positions: int = 1,
    scaled: bool = False,
    dtype: torch.dtype = torch.float32,
    room: int = 0,
) -> Tensor | None:
    """The rows of a matrix, split; factors are those of its columns.

    A view of a transpose is turned on the way: tensor cores want what is summed to lie together.
    """
    if factors is None and matrix.stride(1) == 1:
        return split_matrix(matrix, parts, length=length, dtype=dtype, room=room)
    if matrix.stride(0) != 1:
        matrix = matrix.mT.contiguous().mT
    return split_matrix(
        matrix.mT,
        parts,
        factors,
        length=length,
        first=first,
        positions=positions,
        scaled=scaled,
        turned=True,
        dtype=dtype,
        room=room,
    )


def _add(left: Tensor, right: Tensor, out: Tensor, bias: Tensor | None, *, begun: bool) -> None:
    """`left @ right.mT`, written or added to what is there."""
    if left.dtype == torch.bfloat16:
        found = _wide_product(left, right.mT)
        out.add_(found) if begun else out.copy_(found)
        return
    with precision(tf32=True):
        if begun:
            out.addmm_(left, right.mT)
        elif bias is None:
            torch.mm(left, right.mT, out=out)
        else:
            torch.addmm(bias, left, right.mT, out=out)


def _wide_product(one: Tensor, other: Tensor) -> Tensor:
    """Of matrices in bfloat16, in float32."""
    if one.is_cuda:
        found: Tensor = torch.mm(one, other, out_dtype=torch.float32)
        return found
    return one.float() @ other.float()


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
