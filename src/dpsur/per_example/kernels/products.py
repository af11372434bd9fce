"""Products of float32 matrices on tensor cores.

A number of float32 is, to about 22 bits, the sum of two numbers of TF32: one that it is rounded to
and one for the rest. Three products of such matrices, added up in float32, give the product of the
originals with an error like that of a product in float32, which adds up rounded terms. GPUs for
data centres make them in less than half of the time. Everywhere else PyTorch's product is used.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpsur.functional.process_settings import precision
from dpsur.per_example.kernels.fused import halves

# Where TF32 is at least five times as fast as float32: A100, H100 and H200, B200.
CAPABILITIES = ((8, 0), (9, 0), (10, 0), (10, 3))
# Splitting a matrix moves numbers: products must be this large in all directions for it to pay.
_LEAST_SIZE = 200
# Numbers that are split at once, which bounds the memory for it.
_AT_ONCE = 2**25
# What was rounded, and the rest where there is one.
Halves = tuple[Tensor, Tensor | None]


def pays(rows: int, inner: int, columns: int, *factors: Tensor) -> bool:
    """Whether a product of two matrices of these sizes is faster from three in TF32."""
    if any(value.device.type != "cuda" or value.dtype != torch.float32 for value in factors):
        return False
    if not min(rows, inner, columns) or 1 / rows + 1 / inner + 1 / columns > 1 / _LEAST_SIZE:
        return False
    if torch.version.hip or torch.backends.cuda.matmul.allow_tf32:
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
    split = _split(other)
    if split is None:
        return torch.mm(one, other) if bias is None else torch.addmm(bias, one, other)
    found = one.new_empty(len(one), other.shape[1])
    for rows in _parts(len(one), one.shape[1]):
        some = _split(one[rows])
        assert some is not None
        _add_up(some, split, found[rows], bias)
    return found


def weighted_product(
    outputs: Tensor, inputs: Tensor, factors: Tensor, *, narrow: bool = False
) -> Tensor | None:
    """Sum over rows i of factor_i outputs_i^T inputs_i; one with the factor 0 is not read.

    Neighbouring rows share a factor where there are more rows than factors. Of `narrow` numbers the
    second half is zero. None where it would not pay.
    """
    height, width = outputs.shape[1], inputs.shape[1]
    if not pays(height, len(inputs), width, outputs, inputs, factors):
        return None
    wide = height >= width  # factors go to the smaller matrix, the larger one is split in parts
    scaled = halves(inputs if wide else outputs, factors)
    if scaled is None:
        return None
    found = inputs.new_empty(height, width)
    for columns in _parts(max(height, width), len(inputs)):
        some = halves((outputs if wide else inputs)[:, columns], factors, scaled=False)
        assert some is not None
        rest = None if narrow else some[1]
        if wide:
            _add_up((some[0].mT, None if rest is None else rest.mT), scaled, found[columns])
        else:
            left = scaled[0].mT, scaled[1].mT
            _add_up(left, (some[0], rest), found[:, columns])
    return found


def _parts(count: int, each: int) -> list[slice]:
    """Ranges of about equal length, of at most _AT_ONCE numbers where each has so many."""
    parts = -(-count * each // _AT_ONCE)
    length = -(-count // (4 * parts)) * 4
    return [slice(start, min(start + length, count)) for start in range(0, count, length)]


def _add_up(one: Halves, other: Halves, out: Tensor, bias: Tensor | None = None) -> None:
    """The products of all but the two second halves, the largest last."""
    pairs = ((one[1], other[0]), (one[0], other[1]), (one[0], other[0]))
    begun = False
    with precision(tf32=True):
        for left, right in pairs:
            if left is None or right is None:
                continue
            if begun:
                out.addmm_(left, right)
            elif bias is None:
                torch.mm(left, right, out=out)
            else:
                torch.addmm(bias, left, right, out=out)
            begun = True


def _split(matrix: Tensor) -> Halves | None:
    if matrix.stride(1) != 1:
        turned = halves(matrix.mT)
        return None if turned is None else (turned[0].mT, turned[1].mT)
    return halves(matrix)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
