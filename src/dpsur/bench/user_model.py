"""A user's model to measure, found by the import path of the function that makes it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpsur.bench.arms import Network
from dpsur.errors import InvalidInputError
from dpsur.functional.records import Examples
from dpsur.mechanism.streams import INIT, SETUP, Streams

NETWORKS = "dpsur.bench.user_model:model_named"
FORM = "a function of the batch size that returns (model, inputs, labels)"
SMALL = 2  # a batch of no importance, where only the model is needed


@dataclass(frozen=True)
class UserModel:
    """What a function makes: a model, and a batch of any size that it can be trained on."""

    name: str
    make: Callable[[int], Any]

    @cached_property
    def parameters(self) -> int:
        model = self.model(torch.device("cpu"))
        return sum(value.numel() for value in model.parameters() if value.requires_grad)

    def model(self, device: torch.device, seed: int = 0) -> nn.Module:
        """The model, with the same weights for the same seed."""
        return self._made(SMALL, seed)[0].to(device)

    def batch(self, size: int, device: torch.device, seed: int = 0) -> Examples:
        return self._made(size, seed)[1].to(device)

    def _made(self, size: int, seed: int) -> tuple[nn.Module, Examples]:
        with Streams(seed, torch.device("cpu")).at(SETUP).global_randomness(INIT):
            made = self.make(size)
        match made:
            case (nn.Module() as model, Tensor() as inputs, Tensor() as targets):
                pass
            case _:
                raise InvalidInputError(f"--model {self.name} must be {FORM}")
        if not len(inputs) == len(targets) == size:
            raise InvalidInputError(
                f"--model {self.name} was asked for a batch of {size} and made {len(inputs)} "
                f"inputs and {len(targets)} labels"
            )
        return model, Examples(inputs, targets)


def model_named(name: str) -> Network:
    """Find a model by `module:function`; modules of the current folder are found too."""
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise InvalidInputError(f"--model must be module:function, {FORM}, got {name!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        make = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InvalidInputError(f"cannot find --model {name}: {error}") from error
    if not callable(make):
        raise InvalidInputError(f"--model {name} must be {FORM}, got {type(make).__name__}")
    return UserModel(name, make)
