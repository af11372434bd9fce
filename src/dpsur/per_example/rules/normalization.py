"""Layers that scale, and perhaps shift, what an example has in a channel or an entry."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dpsur.functional.process_settings import widen
from dpsur.per_example.contributions import Rows
from dpsur.per_example.kernels import fused
from dpsur.per_example.tape import Tape, Uses

# From the gradient of an output to sums of it times normalised inputs, and of itself; or None.
Sums = Callable[[Tensor], tuple[Tensor, Tensor] | None]


def group_norm_map(
    tape: Tape,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Channels are normalised in groups; one scale and shift per channel."""
    sums: Sums | None = None
    input = _as_autocast(input)
    if _has_kernel(input):
        input = input.contiguous()
        shape = (len(input), input.shape[1], input[0, 0].numel(), num_groups)
        output, means, rates = torch.native_group_norm(input, weight, bias, *shape, eps)
        sums = partial(fused.channel_sums, input.detach(), means.detach(), rates.detach())
    else:
        output = F.group_norm(input, num_groups, weight, bias, eps)
    normalise = partial(F.group_norm, input, num_groups, None, None, eps)
    return _scaled(tape, output, weight, bias, normalise, None, sums)


def layer_norm_map(
    tape: Tape,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """The last dimensions are normalised together; one scale and shift per entry of them."""
    shape = list(normalized_shape)
    sums: Sums | None = None
    input = _as_autocast(input)
    if _has_kernel(input):
        input = input.contiguous()
        output, means, rates = torch.native_layer_norm(input, shape, weight, bias, eps)
        rows = input.detach().view(tape.examples, -1, input.numel() // means.numel())
        sums = partial(fused.position_sums, rows, means.detach(), rates.detach())
    else:
        output = F.layer_norm(input, shape, weight, bias, eps)
    normalise = partial(F.layer_norm, input, shape, None, None, eps)
    return _scaled(tape, output, weight, bias, normalise, shape, sums)


def rms_norm_map(
    tape: Tape,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Like layer norm, without centring and without a shift."""
    shape = list(normalized_shape)
    output = F.rms_norm(input, shape, weight, eps)
    normalise = partial(F.rms_norm, input, shape, None, eps)
    return _scaled(tape, output, weight, None, normalise, shape)


def _scaled(
    tape: Tape,
    output: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalise: Callable[[], Tensor],
    shape: list[int] | None,
    sums: Sums | None = None,
) -> Tensor:
    """The output, watched: of a layer with parameters of this shape, or with one per channel."""
    layout = tape.examples_in(output, axis=0 if shape is None else None)
    scale, shift = tape.slot(weight), tape.slot(bias)

    def collect(values: Tensor) -> Rows:
        parts = layout.split(widen(values))
        if shape is not None:
            return Rows(parts.reshape(len(parts), -1, *shape).sum(1))
        return Rows(parts.flatten(3).sum((1, 3)) if parts.dim() > 3 else parts.sum(1))

    def record(gradient: Tensor) -> Uses:
        found = sums(gradient) if sums is not None and layout.fold == 1 else None
        if found is not None:
            for slot, rows in zip((scale, shift), found, strict=True):
                if slot is not None:
                    yield slot, Rows(rows.view(len(rows), *tape.params[slot].shape))
            return
        if scale is not None:
            yield scale, collect(gradient * normalise())
        if shift is not None:
            yield shift, collect(gradient)

    return tape.watch(output, record)


def _as_autocast(input: Tensor) -> Tensor:
    """What autocast gives to a normalisation on a GPU: float32."""
    return widen(input) if input.is_cuda and torch.is_autocast_enabled("cuda") else input


def _has_kernel(input: Tensor) -> bool:
    """Whether sums may be made in one kernel: then the layer's means are kept for them.

    Detached: a hook that held another output of its own node would keep both alive for ever.
    """
    return (
        input.device.type == fused.DEVICE
        and input.dtype == torch.float32
        and input.dim() > 2
        and input.numel() > 0
    )
