"""Layers under the names of Opacus, which are those of `torch.nn`, and helpers for modules.

Layers need no replacement here. Their weights have the names that `torch.nn` gives them.

Gradients of single records under the names of Opacus, held against one backward pass each.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dpsur.engine.loader import BatchMemoryManager as BatchMemoryManager
from dpsur.errors import InvalidInputError
from dpsur.per_example.api import per_example_gradients

DPLSTM, DPGRU, DPRNN, DPMultiheadAttention = nn.LSTM, nn.GRU, nn.RNN, nn.MultiheadAttention


class DifferentiallyPrivateDistributedDataParallel(nn.Module):
    """A module as it is: the gradients of all processes are added up in `optimizer.step()`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def requires_grad(module: nn.Module, *, recurse: bool = False) -> bool:
    return any(value.requires_grad for value in module.parameters(recurse))


has_trainable_params = requires_grad


def parametrized_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Submodules with parameters of their own, by name."""
    for name, part in module.named_modules():
        if any(True for _ in part.parameters(recurse=False)):
            yield name, part


def trainable_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Submodules with trainable parameters of their own, by name."""
    for name, part in parametrized_modules(module):
        if requires_grad(part):
            yield name, part


def trainable_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, value in module.named_parameters():
        if value.requires_grad:
            yield name, value


clone_module = copy.deepcopy
get_submodule = nn.Module.get_submodule


def are_state_dict_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


Params = dict[str, Tensor]


class ModelWithLoss(nn.Module):
    """A module and the L1 loss of its outputs against zeros."""

    def __init__(self, module: nn.Module, loss_reduction: str = "mean") -> None:
        super().__init__()
        if loss_reduction not in ("mean", "sum"):
            raise InvalidInputError(
                f"loss_reduction must be 'mean' or 'sum', got {loss_reduction!r}"
            )
        self.wrapped_module, self.loss_reduction = module, loss_reduction

    def forward(self, x: Any) -> Tensor:
        outputs = self.wrapped_module(*x) if type(x) is tuple else self.wrapped_module(x)
        return F.l1_loss(outputs, torch.zeros_like(outputs), reduction=self.loss_reduction)


class _BatchFirst(nn.Module):
    """A module that has its records in the second dimension, called with them in the first."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.module(x.transpose(0, 1)).transpose(0, 1)
        return outputs


def is_batch_empty(batch: Tensor | Iterable[Tensor]) -> bool:
    """Whether a batch, or the first tensor of one, has no element."""
    return not (batch if isinstance(batch, Tensor) else next(iter(batch))).numel()


def get_grad_sample_modes(use_ew: bool = False) -> list[str]:
    """Names of ways to compute gradients of records: they all stand for the same one."""
    return ["hooks", "functorch", *(["ew"] if use_ew else [])]


def compute_microbatch_grad_sample(
    x: Any,
    module: nn.Module,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    chunk_method: Callable[[Any], Iterable[Any]] = iter,
) -> Params:
    """The gradient of each record, by a backward pass for each."""
    model = ModelWithLoss(module, loss_reduction)
    names = {n: value for n, value in module.named_parameters() if value.requires_grad}
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    rows = x if batch_first or type(x) is list else x.transpose(0, 1)
    for row in chunk_method(rows):
        one = row if type(row) is tuple else row.unsqueeze(0 if batch_first else 1)
        gradients = torch.autograd.grad(
            model(one), list(names.values()), allow_unused=True, materialize_grads=True
        )
        for name, gradient in zip(names, gradients, strict=True):
            found[name].append(gradient)
    return {name: torch.stack(values) for name, values in found.items()}


def compute_opacus_grad_sample(
    x: Any,
    module: nn.Module,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    grad_sample_mode: str = "hooks",  # noqa: ARG001
) -> Params:
    """The gradient of each record, all at once, as in a private step."""
    if isinstance(x, PackedSequence):
        raise InvalidInputError(
            "packed sequences cannot be taken apart; pack them inside of the model, from padded "
            "records and their lengths"
        )

    def loss(outputs: Tensor, _: Any) -> Tensor:
        return F.l1_loss(outputs, torch.zeros_like(outputs), reduction=loss_reduction)

    model, inputs = (module, x) if batch_first else (_BatchFirst(module), x.transpose(0, 1))
    found = per_example_gradients(model, loss, inputs, None)
    return {name.removeprefix("module." if not batch_first else ""): v for name, v in found.items()}


def compute_grad_samples_microbatch_and_opacus(
    x: Any,
    module: nn.Module,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    grad_sample_mode: str = "hooks",
    chunk_method: Callable[[Any], Iterable[Any]] = iter,
) -> tuple[Params, Params]:
    ours = compute_opacus_grad_sample(x, module, batch_first, loss_reduction, grad_sample_mode)
    slow = compute_microbatch_grad_sample(x, module, batch_first, loss_reduction, chunk_method)
    return slow, ours


def check_per_sample_gradients_are_correct(
    x: Any,
    module: nn.Module,
    *,
    batch_first: bool = True,
    atol: float = 10e-6,
    rtol: float = 10e-5,
    grad_sample_mode: str = "hooks",
) -> bool:
    """Whether the gradients of the records of a batch are those of one backward pass each."""
    if is_batch_empty(x):
        raise RuntimeError("the batch is empty: there is nothing to compare")
    for reduction in ("sum", "mean"):
        slow, ours = compute_grad_samples_microbatch_and_opacus(
            x, module, batch_first, reduction, grad_sample_mode
        )
        if slow.keys() != ours.keys() or any(
            not torch.allclose(slow[name], ours[name], atol=atol, rtol=rtol) for name in slow
        ):
            return False
    return True
