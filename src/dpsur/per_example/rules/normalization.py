"""Layers that normalise within an example and then scale and shift by trained vectors."""

from collections.abc import Callable, Iterable

import torch.nn.functional as F
from torch import Tensor, nn

from dpsur.per_example.contributions import Contribution, Rows
from dpsur.per_example.tape import NotSupportedError, Slot, Tape

# From values in the shape (examples, fold, ...) to one row per example in the parameter's shape.
Collect = Callable[[Tensor], Tensor]


def group_norm(module: nn.GroupNorm, tape: Tape, input: Tensor) -> Tensor:
    """Channels are normalise in groups; one scale and shift per channel."""
    output = F.group_norm(input, module.num_groups, module.weight, module.bias, module.eps)

    def normalise() -> Tensor:
        return F.group_norm(input, module.num_groups, None, None, module.eps)

    return _scaled(tape, output, module.weight, module.bias, normalise, _by_channel)


def instance_norm(module: nn.InstanceNorm2d, tape: Tape, input: Tensor) -> Tensor:
    """Every channel of an example is normalise by itself."""
    if module.track_running_stats or input.dim() != _instance_norm_dims(module):
        raise NotSupportedError("instance norm with running statistics or without a batch")
    output = F.instance_norm(input, weight=module.weight, bias=module.bias, eps=module.eps)

    def normalise() -> Tensor:
        return F.instance_norm(input, eps=module.eps)

    return _scaled(tape, output, module.weight, module.bias, normalise, _by_channel)


def layer_norm(module: nn.LayerNorm, tape: Tape, input: Tensor) -> Tensor:
    """The last dimensions are normalise together; one scale and shift per entry of them."""
    shape = list(module.normalized_shape)
    output = F.layer_norm(input, shape, module.weight, module.bias, module.eps)

    def normalise() -> Tensor:
        return F.layer_norm(input, shape, None, None, module.eps)

    return _scaled(tape, output, module.weight, module.bias, normalise, _by_entry(shape))


def rms_norm(module: nn.RMSNorm, tape: Tape, input: Tensor) -> Tensor:
    """Like layer norm, without centring and without a shift."""
    shape = list(module.normalized_shape)
    output = F.rms_norm(input, shape, module.weight, module.eps)

    def normalise() -> Tensor:
        return F.rms_norm(input, shape, None, module.eps)

    return _scaled(tape, output, module.weight, None, normalise, _by_entry(shape))


def _scaled(
    tape: Tape,
    output: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalise: Callable[[], Tensor],
    collect: Collect,
) -> Tensor:
    layout = tape.examples_in(output, axis=0 if collect is _by_channel else None)
    scale, shift = tape.slot(weight), tape.slot(bias)

    def record(gradient: Tensor) -> Iterable[tuple[Slot, Contribution]]:
        if scale is not None:
            yield scale, Rows(collect(layout.by_example(gradient * normalise())))
        if shift is not None:
            yield shift, Rows(collect(layout.by_example(gradient)))

    return tape.watch(output, record)


def _by_channel(values: Tensor) -> Tensor:
    return values.flatten(3).sum((1, 3)) if values.dim() > 3 else values.sum(1)


def _by_entry(shape: list[int]) -> Collect:
    return lambda values: values.reshape(len(values), -1, *shape).sum(1)


def _instance_norm_dims(module: nn.Module) -> int:
    dims: dict[type[nn.Module], int] = {
        nn.InstanceNorm1d: 3,
        nn.InstanceNorm2d: 4,
        nn.InstanceNorm3d: 5,
    }
    return next(dims[kind] for kind in dims if isinstance(module, kind))
