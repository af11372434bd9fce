"""Convolutions in one, two and three dimensions.

On a GPU, in full float32, the library for convolutions chooses by heuristics that are an order of
magnitude off for some shapes. What is chosen here instead computes the same. The limits are round
numbers between shapes that were measured on an H200 (`reproduction/bench/convolution_kernels.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpsur.functional.process_settings import as_autocast_sees, precision, widen
from dpsur.per_example.contributions import (
    MEMORY_COST,
    Contribution,
    Factors,
    InnerNorms,
    Measure,
    Products,
    Rows,
    instantiating_pays,
    split_dimension,
)
from dpsur.per_example.kernels.cuda_weight_grad import summed_gradient, summing_pays
from dpsur.per_example.kernels.fused import (
    depthwise_gradients,
    has_kernels,
    round_to_tf32,
    rounded_gradients,
)
from dpsur.per_example.rules.patches import (
    Window,
    examples_at_once,
    inner_products,
    inner_products_cost,
    inner_products_of,
    instantiate,
    patches,
    scratch_of,
)
from dpsur.per_example.tape import NotSupportedError, Tape, Uses

Sizes = int | Sequence[int]


@dataclass(frozen=True)
class Sliding(Contribution):
    """A kernel slid over padded inputs, with norms from inner products between positions.

    With `rounds` the gradient is that of inputs and outputs rounded to TF32: norms and sums are
    both made of the rounded numbers, so that no record passes the bound.
    """

    inputs: Tensor
    outputs: Tensor
    window: Window
    weight_shape: tuple[int, ...]
    fold: int
    grams: Tensor | None = None
    finite_inputs: bool = False
    rounds: bool = False

    def measure(self) -> Measure:
        """Every position is an outer product of a patch and an output gradient."""
        if self.fold > 1:
            return self.products().measure()
        places = prod(self.outputs.shape[2:])
        terms = prod(self.weight_shape[1:]) + self.weight_shape[0] + places
        if self.grams is not None:
            outputs = self.outputs.flatten(2)
            return InnerNorms.of(self.grams, torch.bmm(outputs.mT, outputs), terms)
        step = examples_at_once(self.inputs, scratch_of(self.inputs, self.window, places))
        parts = []
        for start in range(0, len(self.outputs), step):
            some = slice(start, start + step)
            with precision(tf32=True if self.rounds else None):  # exact, if factors are rounded
                outputs = self._factor(self.outputs[some]).flatten(2)
                between = inner_products(self._factor(self.inputs[some]), self.window, places)
                parts.append(InnerNorms.of(between, torch.bmm(outputs.mT, outputs), terms))
        return InnerNorms.concatenate(parts)

    def weighted_sum(self, factors: Factors) -> Tensor:
        window, finite = self.window, self.finite_inputs
        if self.rounds:
            return self._rounded_sum(factors)
        each = factors
        if self.fold > 1:
            keep = None if factors.keep is None else factors.keep.repeat_interleave(self.fold)
            each = Factors(factors.values.repeat_interleave(self.fold), keep)
        inputs, outputs = self._factor(self.inputs), self._factor(self.outputs)
        if summing_pays(inputs, outputs, window):
            found = summed_gradient(*_scaled(inputs, outputs, each, finite=finite), window)
            if found is not None:
                return found
        if patches_pay(inputs, outputs):
            return from_patches(inputs, outputs, window, each, finite=finite)
        inputs, outputs = _scaled(inputs, outputs, each, finite=finite)
        geometry = Geometry(window.strides, window.margins, window.dilations, groups=1)
        weight = inputs.new_empty(self.weight_shape)  # its shape is all that is looked at
        gradient = geometry.backward(outputs, inputs, weight, [False, True, False])[1]
        assert gradient is not None
        return gradient

    def _rounded_sum(self, factors: Factors) -> Tensor:
        """The same from rounded numbers, on tensor cores.

        A rounded output times its factor is the sum of two numbers of TF32, to 22 bits. So two
        gradients of weights, whose products are exact, make the sum.
        """
        window = self.window
        inputs = factors.clean(self._factor(self.inputs))
        outputs = factors.scale(self._factor(self.outputs))
        large = self._factor(outputs)
        parts = self._factor(outputs.sub_(large)), large
        geometry = Geometry(window.strides, window.margins, window.dilations, groups=1)
        weight = inputs.new_empty(self.weight_shape)
        with precision(tf32=True):
            small, total = (
                geometry.backward(part, inputs, weight, [False, True, False])[1] for part in parts
            )
        assert small is not None
        assert total is not None
        return total.add_(small)

    def _factor(self, values: Tensor) -> Tensor:
        """What a gradient is made of: the values, or what rounding leaves of them."""
        if not self.rounds:
            return values
        found = round_to_tf32(values)
        assert found is not None  # `rounding_pays` has asked
        return found

    def per_example(self) -> Tensor:
        return self.products().per_example().view(-1, *self.weight_shape)

    def products(self) -> Products:
        examples = len(self.inputs) // self.fold
        padded = self.window.padded(self._factor(self.inputs))
        unfolded = patches(padded, self.window, inside=False).mT
        outputs = self._factor(self.outputs).flatten(2).mT
        return Products(
            unfolded.reshape(examples, -1, unfolded.shape[-1]),
            outputs.reshape(examples, -1, outputs.shape[-1]),
        )


def _scaled(
    inputs: Tensor, outputs: Tensor, factors: Factors, *, finite: bool
) -> tuple[Tensor, Tensor]:
    return inputs if finite else factors.clean(inputs), factors.scale(outputs)


def convolution_map(
    tape: Tape,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Tensor:
    """Instantiates gradients or keeps patches and outputs apart, whichever is cheaper."""
    shape, sizes = tuple(weight.shape), tuple(weight.shape[2:])
    if input.dim() != len(shape):
        raise NotSupportedError("a convolution without a batch dimension")
    strides, dilations = _each(stride, sizes), _each(dilation, sizes)
    # symmetric zero padding is left to the kernel, so that the forward pass makes no copy
    known = None
    if padding_mode == "zeros" and not isinstance(padding, str):
        margins = _each(padding, sizes)
        known = tape.known if tape.known is not None and tape.known.holds(input) else None
    else:
        margins = (0,) * len(sizes)
        pads: list[int] = []
        for size, spread, margin in zip(sizes, dilations, _each(padding, sizes), strict=True):
            total = 2 * margin
            if isinstance(padding, str):
                total = spread * (size - 1) if padding == "same" else 0
            pads = [total // 2, total - total // 2, *pads]
        input = F.pad(input, pads, mode="constant" if padding_mode == "zeros" else padding_mode)
    geometry = Geometry(strides, margins, dilations, groups)
    input = as_autocast_sees(input)
    output = convolve(input, weight, bias, geometry)
    fold = tape.examples_in(output, axis=0).fold
    weight_slot, bias_slot = tape.slot(weight), tape.slot(bias)
    window = Window(sizes, strides, dilations, margins)
    known = known if fold == 1 else None
    rounds = torch.backends.cudnn.allow_tf32 or torch.is_autocast_enabled(input.device.type)

    def record(gradient: Tensor) -> Uses:
        # Kernels read bfloat16 as it is.
        half = gradient.dtype == torch.bfloat16 and has_kernels(gradient) and len(sizes) < 3
        outputs = gradient if half else widen(gradient)
        if bias_slot is not None:
            total = outputs.flatten(2).sum(2, dtype=widen(outputs[:0]).dtype)
            yield bias_slot, Rows(_unfolded(total, fold))
        if weight_slot is None:
            return
        seen = input.detach()
        places = prod(outputs.shape[2:])
        grams = None
        if known is not None and groups == 1 and places**2 <= input[0].numel():
            grams = known.look_up(
                (window, places), lambda data: inner_products_of(widen(data), window, places)
            )
        finite = known is not None and known.finite
        if grams is not None:
            whole = widen(seen), widen(outputs)
            yield weight_slot, Sliding(*whole, window, shape, fold, grams, finite)
        elif groups > 1 or _instantiate(seen, outputs, window, fold):
            yield weight_slot, _rows(seen, outputs, window, groups, fold, rounds=rounds)
        elif rounds and fold == 1 and rounding_pays(seen, outputs, window):
            # kept until the norms of all layers are known
            seen = seen.to(torch.bfloat16) if half else seen
            use = Sliding(seen, outputs, window, shape, fold, None, finite, rounds=True)
            yield weight_slot, use
        else:
            whole = widen(seen), widen(outputs)
            yield weight_slot, Sliding(*whole, window, shape, fold, None, finite)

    return tape.watch(output, record)


def _each(setting: Sizes | str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(setting, str):
        return (0,) * len(sizes)
    several = (setting,) if isinstance(setting, int) else tuple(setting)
    return several * len(sizes) if len(several) == 1 else several


def _rows(
    inputs: Tensor, outputs: Tensor, window: Window, groups: int, fold: int, *, rounds: bool
) -> Rows:
    """Gradient of the kernel for every example, the fastest way there is.

    Where layers round to TF32 or bfloat16, so may gradients: what is measured is what is added up.
    """
    shape = -1, outputs.shape[1], inputs.shape[1] // groups, *window.sizes
    if inputs.dim() == 3:  # along one dimension: maps of the height 1
        sizes, strides, dilations = window.sizes, window.strides, window.dilations
        window = Window((1, *sizes), (1, *strides), (1, *dilations), (0, *window.margins))
        inputs, outputs = inputs.unsqueeze(2), outputs.unsqueeze(2)
    found: tuple[Tensor, Tensor | None] | None = None
    if groups > 1 and groups == inputs.shape[1]:
        found = depthwise_gradients(inputs, outputs, window)
    if found is None and rounds:
        found = rounded_gradients(inputs, outputs, window, groups)
    if found is None:
        found = instantiate(widen(inputs), widen(outputs), window, groups), None
    rows, squares = found[0].view(shape), found[1]
    return Rows(rows, squares) if fold == 1 else Rows(_unfolded(widen(rows), fold))


def _instantiate(inputs: Tensor, outputs: Tensor, window: Window, fold: int) -> bool:
    """Whether forming the gradients costs less than inner products and a sum afterwards."""
    places, height, channels = prod(outputs.shape[2:]), outputs.shape[1], inputs.shape[1]
    width = channels * prod(window.sizes)
    if fold > 1:
        return instantiating_pays(fold * places, width, height)
    making = places * width * (height + MEMORY_COST) + 2 * MEMORY_COST * width * height
    products = inner_products_cost(channels, inputs.shape[2:], window, places)
    return making < products + places**2 * (height + MEMORY_COST) + places * width * height


def _unfolded(rows: Tensor, fold: int) -> Tensor:
    return rows if fold == 1 else split_dimension(rows, 0, (-1, fold)).sum(1)


# --- kernels for a GPU ----------------------------------------------------------------------------

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
    if input.device.type not in PAYS_ON or not input.requires_grad:
        return geometry.apply(input, weight, bias)
    output: Tensor = _Convolved.apply(input, weight, bias, geometry)  # type: ignore[no-untyped-call]
    return output


class _Convolved(torch.autograd.Function):
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
