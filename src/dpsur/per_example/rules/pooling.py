"""Max pooling of maps whose channels are moved innermost for it: on a CPU that is faster."""

from typing import Any

import torch
from torch import Tensor, nn

from dpsur.per_example.rules.patches import examples_at_once
from dpsur.per_example.tape import Tape

_Pair = tuple[int, int]
# The kind of device, the least channels and the least numbers for which channels-last pays.
DEVICE, _LEAST_CHANNELS, _LEAST_NUMBERS = "cpu", 4, 2**14


def max_pool(module: nn.MaxPool2d, tape: Tape, input: Tensor) -> Any:  # noqa: ARG001
    faster_channels_last = (
        input.device.type == DEVICE
        and input.dtype in (torch.float32, torch.float64)
        and input.dim() == 4
        and input.shape[1] >= _LEAST_CHANNELS
        and input.numel() >= _LEAST_NUMBERS
        and input.is_contiguous()
    )
    if module.return_indices or not faster_channels_last:
        return nn.MaxPool2d.forward(module, input)
    stride = module.kernel_size if module.stride is None else module.stride
    settings = (*map(_pair, (module.kernel_size, stride, module.padding, module.dilation)),)
    return _MaxPool.apply(input, (*settings, module.ceil_mode))  # type: ignore[no-untyped-call]


def _pair(value: int | _Pair) -> _Pair:
    return (value, value) if isinstance(value, int) else value


class _MaxPool(torch.autograd.Function):
    """Forward with the channels innermost, backward as they are: there nothing is guessed.

    Places in a map are kept in two bytes where PyTorch takes eight.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, settings: tuple[Any, ...]) -> Tensor:
        inner = input.contiguous(memory_format=torch.channels_last)
        output, places = torch.ops.aten.max_pool2d_with_indices(inner, *settings)
        few = input.shape[2] * input.shape[3] <= torch.iinfo(torch.int16).max
        ctx.settings = settings
        ctx.save_for_backward(input, places.to(torch.int16) if few else places)
        found: Tensor = output.contiguous()
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        input, places = ctx.saved_tensors
        result = torch.empty_like(input)
        wholes = (gradients[0], input, places, result)
        step = examples_at_once(input, input[0].numel())
        pieces = (torch.split(whole, step) for whole in wholes)
        for gradient, seen, where, into in zip(*pieces, strict=True):
            at = where.contiguous().long()
            torch.ops.aten.max_pool2d_with_indices_backward.grad_input(
                gradient.contiguous(), seen, *ctx.settings, at, grad_input=into
            )
        return result, None
