"""Kernels for convolutions on a GPU, where those that are usually chosen are slow.

In full float32 the library for convolutions chooses by heuristics that are an order of magnitude
off for some shapes. What is chosen here instead computes the same. The limits are round numbers
between shapes that were measured on an H200 (`reproduction/bench/convolution_kernels.py`).
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpsur.per_example.contributions import Factors
from dpsur.per_example.kernels.fused import has_kernels
from dpsur.per_example.rules.patches import Window, examples_at_once, patches

# Devices on which these choices pay.
PAYS_ON = ("cuda",)
# Maps of at most so many positions are small, layers of at most so many channels narrow.
_SMALL_MAP, _NARROW = 16, 32
# Layers of at least so many channels, on maps of at most so many positions, are wide.
_WIDE, _MAP_OF_WIDE = 128, 64


@dataclass(frozen=True)
class Geometry:
    """How a convolution slides, with the padding that its kernel does itself."""

    strides: tuple[int, ...]
    margins: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int

    def apply(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(self.strides) - 1]
        output: Tensor = convolve(
            input, weight, bias, self.strides, self.margins, self.dilations, self.groups
        )
        return output

    def backward(
        self, gradient: Tensor, input: Tensor, weight: Tensor, wanted: list[bool]
    ) -> tuple[Tensor | None, ...]:
        """The library's gradients of input, weight and bias, those that are wanted."""
        found: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
            gradient,
            input,
            weight,
            [len(weight)],
            self.strides,
            self.margins,
            self.dilations,
            False,
            [0] * len(self.strides),
            self.groups,
            wanted,
        )
        return found

    def reversed(self, sizes: torch.Size) -> "Geometry | None":
        """The convolution that leads from output gradients to input gradients, if it is one."""
        margins = tuple(
            dilation * (size - 1) - margin
            for size, margin, dilation in zip(sizes, self.margins, self.dilations, strict=True)
        )
        if self.groups > 1 or any(stride > 1 for stride in self.strides) or min(margins) < 0:
            return None
        return Geometry(self.strides, margins, self.dilations, 1)


def convolve(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """A convolution whose input gradient is found by the better kernel."""
    if input.device.type not in PAYS_ON or not input.requires_grad:
        return geometry.apply(input, weight, bias)
    output: Tensor = _Convolved.apply(input, weight, bias, geometry)  # type: ignore[no-untyped-call]
    return output


class _Convolved(torch.autograd.Function):
    """A convolution with a backward pass of our own."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
    ) -> Tensor:
        ctx.geometry, ctx.dtype = geometry, input.dtype
        needed = any(ctx.needs_input_grad[1:3]) or geometry.reversed(weight.shape[2:]) is None
        ctx.save_for_backward(weight, input if needed else None)
        return geometry.apply(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), geometry = gradients, ctx.geometry
        weight, input = ctx.saved_tensors
        weight = weight.to(gradient.dtype)
        input = None if input is None else input.to(gradient.dtype)
        of_weight, of_bias = None, None
        wanted = [False, *ctx.needs_input_grad[1:3]]
        if any(wanted):
            of_weight, of_bias = geometry.backward(gradient, input, weight, wanted)[1:]
        of_input = _input_gradient(gradient, input, weight, geometry)
        return of_input.to(ctx.dtype), of_weight, of_bias, None


def _input_gradient(
    gradient: Tensor, input: Tensor | None, weight: Tensor, geometry: Geometry
) -> Tensor:
    """Without strides a convolution with the kernel flipped, which has faster kernels."""
    back = geometry.reversed(weight.shape[2:])
    if back is not None:
        flipped = weight.flip(list(range(2, weight.dim()))).transpose(0, 1).contiguous()
        return back.apply(gradient, flipped, None)
    if weight.dim() == 4 and geometry.groups == 1 and prod(gradient.shape[2:]) <= _SMALL_MAP:
        weight = weight.contiguous(memory_format=torch.channels_last)
    assert input is not None
    found = geometry.backward(gradient, input, weight, [True, False, False])[0]
    assert found is not None
    return found


def patches_pay(inputs: Tensor, outputs: Tensor) -> bool:
    """Whether a gradient of a kernel is found faster as one product with all patches."""
    if inputs.device.type not in PAYS_ON:
        return False
    channels, height, places = inputs.shape[1], outputs.shape[1], prod(outputs.shape[2:])
    if places <= _SMALL_MAP and max(channels, height) <= _NARROW:
        return True
    exact = not torch.backends.cudnn.allow_tf32
    return exact and min(channels, height) >= _WIDE and places <= _MAP_OF_WIDE


# Tiles of sums on tensor cores are this large; with less of a kernel they stay half empty.
_LEAST_CHANNELS, _LEAST_ENTRIES = 32, 2**13


def rounding_pays(inputs: Tensor, outputs: Tensor, window: Window) -> bool:
    """Whether sums of weighted gradients are made faster on tensor cores, of rounded factors."""
    if inputs.dim() not in (3, 4) or not has_kernels(inputs):
        return False
    height, width = outputs.shape[1], inputs.shape[1] * prod(window.sizes)
    return min(height, width) >= _LEAST_CHANNELS and height * width >= _LEAST_ENTRIES


def from_patches(
    inputs: Tensor, outputs: Tensor, window: Window, factors: Factors, *, finite: bool
) -> Tensor:
    """Gradient of a kernel, summed over all examples, each times its factor (without groups).

    `finite` tells that all inputs are, so that those of dropped examples need not be replaced.
    """
    channels, height = inputs.shape[1], outputs.shape[1]
    width = channels * prod(window.sizes)
    total = inputs.new_zeros(height, width)
    step = examples_at_once(inputs, width * prod(outputs.shape[2:]))
    for start in range(0, len(inputs), step):
        some = slice(start, start + step)
        part = factors.part(some)
        kept = inputs[some] if finite else part.clean(inputs[some])
        seen = patches(window.padded(kept), window, inside=True).mT.reshape(-1, width)
        scaled = part.scale(outputs[some]).flatten(2).transpose(0, 1).reshape(height, -1)
        total.addmm_(scaled, seen)
    return total.view(height, *window.sizes, channels).movedim(-1, 1)
