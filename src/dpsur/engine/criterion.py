"""A loss that is computed for each record alone, whatever it normalises over."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpsur.errors import InvalidInputError
from dpsur.functional.problem import Arguments, losses_one_by_one, output_rows, weight_by_record
from dpsur.functional.tree import check_rows, map_tensors, slice_rows, tensors_of, with_tensors
from dpsur.runs.data import check_is_loss, check_loss


class Criterion:
    """The mean, or the sum, over records of a loss that sees one record at a time.

    Call it as the loss itself: `criterion(outputs, targets)`, or with more arguments. Every tensor
    among them has a row per record. Class weights count for each record without a mean over them,
    and a mean over tokens is over the record's own tokens.
    """

    def __init__(self, loss: Callable[..., Tensor], reduction: str = "mean") -> None:
        check_is_loss(loss)
        self.loss, self.reduction = weight_by_record(loss), reduction
        self._checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a batch, through which a gradient may be taken once."""
        if args:  # objects among a model's outputs, such as caches, are not for the loss
            args = (output_rows(args[0]), *args[1:])
        given = Arguments(args, kwargs)
        records = check_rows(given, "the arguments of the loss")
        if not records:
            raise InvalidInputError("the loss was called without records")
        if (
            not self._checked and len(args) == 2 and not kwargs
        ):  # a loss that keeps state is refused
            drawn = map_tensors(_synthetic, args[0])
            check_loss(self.loss, drawn, slice_rows(args[1], slice(1)))
        self._checked = True
        outputs = [value for value in tensors_of(given) if value.requires_grad]
        found: Tensor = PerRecord.apply(self, given, records, *outputs)  # type: ignore[no-untyped-call]
        return found

    def losses(self, given: Arguments) -> Tensor:
        if len(given.args) == 2 and not given.kwargs:
            return losses_one_by_one(self.loss, *given.args)
        return losses_one_by_one(lambda one, _: self.loss(*one.args, **one.kwargs), given, None)


def _synthetic(values: Tensor) -> Tensor:
    if not values.is_floating_point():
        return torch.zeros_like(values[:1]).expand(3, *values.shape[1:])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand((3, *values.shape[1:]), generator=generator)
    return drawn.to(values.device, values.dtype)


class PerRecord(torch.autograd.Function):
    """The losses of records one by one, and their gradients by the outputs, in one go."""

    @staticmethod
    def forward(
        ctx: Any, criterion: Criterion, given: Arguments, records: int, *_: Tensor
    ) -> Tensor:
        leaves: list[Tensor] = []

        def leaf(value: Tensor) -> Tensor:
            if not value.requires_grad:
                return value
            leaves.append(value.detach().requires_grad_())
            return leaves[-1]

        with torch.enable_grad():
            alone = with_tensors(given, [leaf(value) for value in tensors_of(given)])
            losses = criterion.losses(alone)
        ctx.records = records
        ctx.mean = criterion.reduction == "mean"
        if leaves:
            ctx.gradients = torch.autograd.grad(
                losses, leaves, torch.ones_like(losses), materialize_grads=True, allow_unused=True
            )
        total = losses.detach().sum()
        return total / records if ctx.mean else total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (outer,) = gradients
        share = outer / ctx.records if ctx.mean else outer
        return None, None, None, *(value * share.to(value.dtype) for value in ctx.gradients)
