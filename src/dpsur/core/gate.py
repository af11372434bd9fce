"""The paper's test of a candidate: a clipped, noisy loss difference against a threshold."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpsur import checks
from dpsur.core.problem import Problem
from dpsur.core.types import Examples, Params
from dpsur.errors import InvalidInputError


@dataclass(frozen=True)
class LossGate:
    """Accept a candidate whose noisy loss difference is below the threshold (Alg. 1, L11-14).

    Formal guarantee: whatever the difference, NaN included, acceptance has a probability between
    the a_min and a_max of `dpsur.privacy.events.LossTest` with the same parameters, and the noisy
    difference is a Gaussian mechanism of noise multiplier `noise_multiplier`.
    """

    loss_clip: float
    noise_multiplier: float
    accept_threshold: float

    def __post_init__(self) -> None:
        checks.positive("loss_clip", self.loss_clip)
        checks.positive("val_noise_multiplier", self.noise_multiplier)
        if math.isnan(self.accept_threshold):
            raise InvalidInputError("accept_threshold must be a number, got nan")

    def decide(self, difference: Tensor, generator: torch.Generator) -> Tensor:
        """Draw a verdict for a loss difference. The noise is drawn whatever the difference is."""
        bound = self.loss_clip
        # A comparison with NaN would reject with certainty, and a certain rejection has no
        # acceptance probability above a_min: count it as the worst finite difference instead.
        worst = torch.full_like(difference, bound)
        difference = torch.where(difference.isfinite(), difference, worst)
        clipped = difference.clamp(-bound, bound)
        noise = torch.randn(
            difference.shape, generator=generator, device=difference.device, dtype=difference.dtype
        )
        noisy = clipped + 2 * bound * self.noise_multiplier * noise
        return noisy < self.accept_threshold * bound


def mean_losses(
    problem: Problem, candidate: Params, current: Params, batch: Examples
) -> tuple[Tensor, Tensor]:
    """Mean losses of the candidate and of the current model, on one batch (Alg. 1, L10).

    An empty batch says nothing for or against: both are zero.
    """
    if len(batch) == 0:
        nothing = torch.zeros((), dtype=torch.float64, device=batch.inputs.device)
        return nothing, nothing
    after = problem.losses(candidate, batch).double().mean()
    before = problem.losses(current, batch).double().mean()
    return after, before
