"""Records made to be recognised, planted among the private ones by fair coins.

A gradient canary's gradient is a separate coordinate: the model gets a block with one weight per
canary, and a canary's loss is linear in its weight, so that its clipped gradient has exactly the
clip norm at every step. Nothing else moves that weight but noise. An input canary is an ordinary
record with a label drawn at random, which only a model that has seen it will get right.

Both are ordinary records to the training: they are sampled, clipped and tested like any other.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpsur.errors import InvalidInputError
from dpsur.functional.problem import LossFunction, Problem
from dpsur.functional.records import Examples
from dpsur.functional.tree import Params

# A canary's gradient is this many clip norms long before it is clipped.
EXCESS = 1.01
BLOCK = "canaries.weight"


@dataclass(frozen=True)
class CanaryProblem:
    """A problem with canaries in it: `included` says which, `scores` what training says of each.

    `scores` maps the problem and trained weights to one number per canary, larger for a canary that
    seems to have been trained on.
    """

    model: nn.Module
    loss: LossFunction
    train: Examples
    included: Tensor
    scores: Callable[[Problem, Params], Tensor]


# Tosses the coins and adds what they say to a model, a loss and records.
Planter = Callable[[nn.Module, LossFunction, Examples, torch.Generator], CanaryProblem]


class WithCanaries(nn.Module):
    """A model with a block of one weight per canary beside it.

    The last column of an input is 0 for an ordinary record, else the number of its canary, from 1.
    Outputs have two more columns: whether the record is a canary, and the weight of that canary.
    """

    def __init__(self, model: nn.Module, canaries: int, shape: torch.Size) -> None:
        super().__init__()
        self.model = model
        self.canaries = nn.Linear(canaries, 1, bias=False)
        nn.init.zeros_(self.canaries.weight)
        self._shape = shape
        self._numbers: Tensor
        self.register_buffer("_numbers", torch.arange(1, canaries + 1), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Outputs of the model, whether a row is a canary, and that canary's weight."""
        number = rows[:, -1:]
        outputs = self.model(rows[:, :-1].reshape(-1, *self._shape))
        own = torch.eq(number, self._numbers).to(outputs.dtype)
        is_canary = own.sum(1, keepdim=True)
        return torch.cat([outputs, is_canary, self.canaries(own)], dim=1)


def gradient_canaries(canaries: int, max_grad_norm: float) -> Planter:
    """A planter of gradient canaries for a training with this clip norm."""

    def plant(
        model: nn.Module, loss: LossFunction, train: Examples, generator: torch.Generator
    ) -> CanaryProblem:
        inputs = train.inputs.flatten(1)
        if inputs.dtype == torch.uint8:
            raise InvalidInputError("inputs of type uint8 cannot number canaries; convert to float")
        included = _coins(canaries, generator).to(inputs.device)
        numbers = torch.arange(1, canaries + 1, device=inputs.device)[included]
        ordinary = torch.cat([inputs, inputs.new_zeros(len(inputs), 1)], dim=1)
        planted = inputs.new_zeros(len(numbers), inputs.shape[1] + 1)
        planted[:, -1] = numbers.to(inputs.dtype)
        targets = torch.cat([train.targets, train.targets[:1].expand(len(numbers))])
        gain = EXCESS * max_grad_norm

        def with_canaries(outputs: Tensor, targets: Tensor) -> Tensor:
            is_canary, weight = outputs[:, -2], outputs[:, -1]
            ordinary = loss(outputs[:, :-2], targets)
            return ((1 - is_canary) * ordinary - is_canary * gain * weight).sum()

        return CanaryProblem(
            WithCanaries(model, canaries, train.inputs.shape[1:]),
            with_canaries,
            Examples(torch.cat([ordinary, planted]), targets),
            included,
            lambda _, params: params[BLOCK][0],
        )

    return plant


def input_canaries(candidates: Examples, classes: int) -> Planter:
    """A planter of records with labels drawn at random. They must not be among the private ones."""

    def plant(
        model: nn.Module, loss: LossFunction, train: Examples, generator: torch.Generator
    ) -> CanaryProblem:
        device = train.inputs.device
        included = _coins(len(candidates), generator).to(device)
        labels = torch.randint(classes, (len(candidates),), generator=generator)
        canaries = Examples(candidates.inputs.to(device), labels.to(device, train.targets.dtype))
        chosen = canaries.select(included)
        planted = Examples(
            torch.cat([train.inputs, chosen.inputs]), torch.cat([train.targets, chosen.targets])
        )

        def scores(problem: Problem, params: Params) -> Tensor:
            # against the loss before training: some labels are unlikely for any model
            before = problem.losses(problem.initial_params(), canaries)
            return before - problem.losses(params, canaries)

        return CanaryProblem(model, loss, planted, included, scores)

    return plant


def _coins(count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, generator=generator) < 0.5
