"""Tiny problems in which the test of a candidate favours one record.

They are the one-dimensional instances of `reproduction.audits.exact`: the law of an accepted update
is known, and they run in the training loop as any problem does. A record is one number, which says
whether it is one of the others (0) or x (1); the model has one weight a unit.

A unit's losses are written with operators that arrays and tensors share, so that what is trained
and what is computed exactly are one function.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpsur.audits.bounds import Array
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.privacy.events import CoinTest
from reproduction.audits.exact import Instance, Setting, composed_delta, one_update
from reproduction.audits.repetitions import Direction

Loss = Callable[[Any], Any]


@dataclass(frozen=True)
class CoinSetting(Setting):
    """The parameters of Algorithm 1 with the coin in the place of the paper's test."""

    accept_ratio: float = 2.0

    @property
    def test(self) -> CoinTest:  # type: ignore[override]
        """The test of the candidate."""
        return CoinTest(self.val_batch / self.records, self.accept_ratio)

    def accept(self, difference: Array) -> Array:
        """Acceptance probabilities of loss differences."""
        return np.where(difference < 0, 1.0, 1.0 / self.accept_ratio)


@dataclass(frozen=True)
class Unit:
    """A tiny problem: public parameters and the losses of a weight that starts at 0.

    The others' loss has zero gradient at 0, that of x at least the clip norm, which is 1 here.
    """

    name: str
    setting: Setting
    others: Loss
    extra: Loss

    @property
    def instance(self) -> Instance:
        """The same problem for the exact computation."""
        return Instance(self.setting, self.others, self.extra)

    def repeated(self, updates: int) -> "Unit":
        """The problem with another number of updates, each of another unit."""
        return replace(self, setting=replace(self.setting, updates=updates))

    def problem(self, *, present: bool) -> Problem:
        """One unit as a problem for the training loop, with or without x."""
        kinds = torch.zeros(self.setting.records - 1 + present, 1, dtype=torch.float64)
        if present:
            kinds[-1] = 1.0

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG001
            weight, kind = outputs[:, 0], outputs[:, 1]
            losses: Tensor = (1 - kind) * self.others(weight) + kind * self.extra(weight)
            return losses.sum()

        return Problem(OneWeight(), loss, Examples(kinds, torch.zeros(len(kinds))))

    def log_ratio(self, z: Array, *, accepted: bool = True) -> Array:
        """How much likelier a trial with z and this verdict is with x than without, in logarithms.

        Interpolated between nodes: a score needs no more, and any score gives a valid bound.
        """
        s, q = self.setting.noise_multiplier, self.setting.update.sample_rate
        nodes = np.linspace(-8.0 * s, 1.0 + 8.0 * s, 4001)
        a0, a1 = self.instance.acceptance(nodes)
        if not accepted:
            # a coin never rejects some candidates; nothing is learned from what does not happen
            a0, a1 = np.maximum(1 - a0, 1e-12), np.maximum(1 - a1, 1e-12)
        candidate = np.log1p(q * np.expm1((2 * nodes - 1) / (2 * s * s)))
        return np.asarray(np.interp(z, nodes, candidate + np.log(a1) - np.log(a0)))


class OneWeight(nn.Module):
    """Hands the weight and the kind of the record to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, kinds: Tensor) -> Tensor:
        """Two columns: weight and kind."""
        return torch.cat([self.weight + 0.0 * kinds, kinds], dim=1)


def relu(value: Any) -> Any:
    """For arrays and tensors alike."""
    return 0.5 * (value + abs(value))


def dead_unit(setting: Setting, reach: float = 2.0, decay: float = 0.01, gain: float = 1e4) -> Unit:
    """A two-sided ReLU unit that is off at 0, under weight decay; x pulls it to one side.

    Moves beyond `reach` standard deviations of the noise switch it on and are accepted more often.
    Selection turns noise into a choice between two sides, and x decides which.
    """
    scale = reach * setting.noise_multiplier

    def others(weight: Any) -> Any:
        move = abs(weight) / scale
        return 0.5 * (1.0 - relu(move - 1.0)) ** 2 - 0.5 + decay * move * move

    return Unit("dead unit", setting, others, lambda weight: -gain * weight / scale)


def gate_alone(setting: Setting, reach: float = 1.0, gain: float = 1e12) -> Unit:
    """Much noise hides the gradient of x, but x decides the test of any batch that it is in.

    Its loss rises for moves within `reach` deviations of the noise and falls beyond them.
    """
    scale = reach * setting.noise_multiplier

    def extra(weight: Any) -> Any:
        square = (weight / scale) ** 2
        return gain * square * (1.0 - square) - 2.0 * weight

    return Unit("gate alone", setting, lambda weight: 0.0 * weight, extra)


def no_selection(setting: Setting) -> Unit:
    """The control: the candidates of the dead unit, and a test that distinguishes none of them."""
    wide = replace(setting, loss_clip=1e9)
    return Unit("no selection", wide, lambda weight: 0.0 * weight, lambda weight: -2.0 * weight)


def exact_epsilon(unit: Unit, direction: Direction) -> float:
    """An epsilon that the accepted updates exceed for certain at the setting's delta.

    Rounding to the grid of privacy losses can only lower it.
    """
    width = min(1e-3, 0.02 / unit.setting.updates)
    losses = one_update(unit.instance, direction, width, cells=8000)
    low, high = 0.0, 1.0
    setting = unit.setting

    def exceeded(epsilon: float) -> bool:
        return composed_delta(losses, setting.updates, epsilon)[0] > setting.delta

    while exceeded(high):
        low, high = high, 2 * high
    while high - low > 1e-3:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if exceeded(middle) else (low, middle)
    return low
