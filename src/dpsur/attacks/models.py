"""Trained models as attacks see them, one or many at once."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from dpsur.core.types import Examples, Params

ROWS_AT_ONCE = 1024


class Models(Protocol):
    """One or more trained models of the same form."""

    def __len__(self) -> int:
        """How many."""
        ...

    def outputs(self, inputs: Tensor) -> Tensor:
        """Scores per class, of shape (models, records, classes)."""
        ...

    def module(self, index: int) -> nn.Module:
        """One of them."""
        ...


class Trainer(Protocol):
    """Trains one model on each of several sets of rows of a pool, all equally many."""

    def __call__(self, pool: Examples, rows: Sequence[Tensor], seed: int) -> Models:
        """Train, with everything that is random drawn from the seed."""
        ...


@dataclass(frozen=True)
class StackedModels:
    """Models of one form: a template, and their weights stacked along a first dimension."""

    template: nn.Module
    params: Params
    buffers: Params

    def __len__(self) -> int:
        return len(next(iter(self.params.values())))

    def outputs(self, inputs: Tensor) -> Tensor:
        """Scores per class, in pieces of bounded size."""
        device = next(iter(self.params.values())).device

        def one(params: Params, buffers: Params, rows: Tensor) -> Tensor:
            result: Tensor = functional_call(self.template, (params, buffers), (rows,))
            return result

        with torch.no_grad():
            pieces = [
                vmap(one, in_dims=(0, 0, None))(self.params, self.buffers, piece.to(device))
                for piece in torch.split(inputs, ROWS_AT_ONCE)
            ]
        return torch.cat(pieces, dim=1)

    def module(self, index: int) -> nn.Module:
        """A module with the weights of one model."""
        module = copy.deepcopy(self.template)
        weights = {**self.params, **self.buffers}
        module.load_state_dict({name: value[index] for name, value in weights.items()})
        return module


@dataclass(frozen=True)
class SeparateModels:
    """Modules that were trained one by one."""

    modules: Sequence[nn.Module]

    def __len__(self) -> int:
        return len(self.modules)

    def outputs(self, inputs: Tensor) -> Tensor:
        """Scores per class, in pieces of bounded size."""
        with torch.no_grad():
            return torch.stack(
                [
                    torch.cat(
                        [
                            module(piece.to(_device(module)))
                            for piece in torch.split(inputs, ROWS_AT_ONCE)
                        ]
                    )
                    for module in self.modules
                ]
            )

    def module(self, index: int) -> nn.Module:
        """One of them."""
        return self.modules[index]


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
