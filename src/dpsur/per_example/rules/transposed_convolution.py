"""Transposed convolutions: a convolution whose inputs and outputs change places."""

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from dpsur.functional.process_settings import widen
from dpsur.per_example.contributions import Contribution, Rows, split_dimension
from dpsur.per_example.rules.convolution import Sliding
from dpsur.per_example.rules.patches import Window, instantiate
from dpsur.per_example.tape import NotSupportedError, Slot, Tape

_Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


def transposed_convolution(
    module: _Transposed, tape: Tape, input: Tensor, output_size: list[int] | None = None
) -> Tensor:
    """What the layer returns; `output_size` chooses among the sizes that a stride leaves open."""
    dims = len(module.kernel_size)
    extra = module._output_padding(
        input,
        output_size,
        list(module.stride),
        [int(one) for one in module.padding],
        list(module.kernel_size),
        dims,
        list(module.dilation),
    )
    return transposed_convolution_map(
        tape,
        input,
        module.weight,
        module.bias,
        module.stride,
        module.padding,
        extra,
        module.groups,
        module.dilation,
    )


def transposed_convolution_map(
    tape: Tape,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    """The weight's gradient is that of the convolution from the outputs' gradients to the inputs.

    A weight of the shape (in, out / groups, ...) is that convolution's own.
    """
    dimensions = weight.dim() - 2
    if input.dim() != dimensions + 2:
        raise NotSupportedError("a convolution without a batch dimension")
    strides, margins, extra, dilations = (
        _each(value, dimensions) for value in (stride, padding, output_padding, dilation)
    )
    output = torch.convolution(
        input, weight, bias, strides, margins, dilations, True, extra, groups
    )
    fold = tape.examples_in(output, axis=0).fold
    slot, shift = tape.slot(weight), tape.slot(bias)
    shape = tuple(weight.shape)
    window = Window(shape[2:], strides, dilations, margins)

    def record(gradient: Tensor) -> Iterable[tuple[Slot, Contribution]]:
        wide = widen(gradient)
        if shift is not None:
            yield shift, Rows(_by_example(wide.flatten(2).sum(2), fold))
        if slot is None:
            return
        inputs = widen(input).detach()
        places, width = prod(inputs.shape[2:]), prod(shape[1:])
        # few places and a large kernel: inner products between places cost less than gradients
        if groups == 1 and places**2 < width:
            yield slot, Sliding(wide, inputs, window, shape, fold)
        else:
            yield slot, Rows(_by_example(instantiate(wide, inputs, window, groups), fold))

    return tape.watch(output, record)


def _each(value: Any, dimensions: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dimensions
    return tuple(value) if len(value) == dimensions else tuple(value) * dimensions


def _by_example(rows: Tensor, fold: int) -> Tensor:
    return rows if fold == 1 else split_dimension(rows, 0, (-1, fold)).sum(1)
