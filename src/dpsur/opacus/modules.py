"""Layers under the names of Opacus, which are those of `torch.nn`, and helpers for modules.

Layers need no replacement here. Their weights have the names that `torch.nn` gives them.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


class DPLSTM(nn.LSTM):
    """`nn.LSTM`."""


class DPGRU(nn.GRU):
    """`nn.GRU`."""


class DPRNN(nn.RNN):
    """`nn.RNN`."""


class DPMultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention`."""


class DifferentiallyPrivateDistributedDataParallel(nn.Module):
    """A module as it is: the gradients of all processes are added up in `optimizer.step()`."""

    def __init__(self, model: nn.Module) -> None:
        """Keep the module."""
        super().__init__()
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)


def requires_grad(module: nn.Module, *, recurse: bool = False) -> bool:
    """Whether a parameter of a module requires a gradient."""
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
    """Parameters that require a gradient, by name."""
    for name, value in module.named_parameters():
        if value.requires_grad:
            yield name, value


def clone_module(module: nn.Module) -> nn.Module:
    """A copy of a module."""
    return copy.deepcopy(module)


def get_submodule(module: nn.Module, target: str) -> nn.Module:
    """A submodule by its name."""
    return module.get_submodule(target)


def are_state_dict_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two states have the same keys and the same values."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
