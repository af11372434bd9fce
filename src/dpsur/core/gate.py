"""The paper's test of a candidate: a clipped, noisy loss difference against a threshold."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpsur import checks
from dpsur.core.pairs import evaluated_at_once, pair_losses
from dpsur.core.problem import Problem
from dpsur.core.sampling import Batch
from dpsur.core.types import Params
from dpsur.errors import InvalidInputError
from dpsur.privacy.events import CoinTest, Test


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
        difference = torch.where(difference.abs() < math.inf, difference, bound)
        clipped = difference.clamp(-bound, bound)
        noise = torch.randn(
            difference.shape, generator=generator, device=difference.device, dtype=difference.dtype
        )
        noisy = clipped + 2 * bound * self.noise_multiplier * noise
        return noisy < self.accept_threshold * bound


@dataclass(frozen=True)
class CoinGate:
    """Accept every improvement, and a worsening with probability 1 / accept_ratio.

    Formal guarantee: whatever the difference, NaN included, acceptance has a probability between
    1 / accept_ratio and 1. For the `proven` accounting this is all that matters, and against the
    paper's gate with the same ratio it needs about half the trials.
    """

    accept_ratio: float

    def decide(self, difference: Tensor, generator: torch.Generator) -> Tensor:
        """Draw a verdict for a loss difference. The coin is tossed whatever the difference is."""
        toss = torch.rand(
            difference.shape, generator=generator, device=difference.device, dtype=torch.float64
        )
        # a comparison with NaN is false, which makes NaN a worsening, as it should be
        return (difference < 0) | (toss < 1 / self.accept_ratio)


Gate = LossGate | CoinGate


def make_gate(test: Test, loss_clip: float) -> Gate:
    """The gate that an accounted test stands for."""
    if isinstance(test, CoinTest):
        return CoinGate(test.accept_ratio)
    return LossGate(loss_clip, test.noise_multiplier, test.accept_threshold)


def mean_losses(
    problem: Problem, candidate: Params, current: Params, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Mean losses of the candidate and of the current model, on one batch (Alg. 1, L10).

    An empty batch says nothing for or against: both are zero.
    """
    if len(batch) == 0:
        nothing = torch.zeros((), dtype=torch.float64, device=problem.device)
        return nothing, nothing
    losses = pair_losses(problem, candidate, current, batch.examples)
    after, before = batch.mean(losses.double()).unbind()
    return after, before


@dataclass(frozen=True)
class BegunTest:
    """What of a test does not need the candidate: its batch and, where known, the loss before."""

    batch: Batch
    before: Tensor | None = None

    def losses(self, problem: Problem, candidate: Params, current: Params) -> tuple[Tensor, Tensor]:
        """The same two means as `mean_losses`."""
        if self.before is None:
            return mean_losses(problem, candidate, current, self.batch)
        after = problem.losses(candidate, self.batch.examples)
        return self.batch.mean(after.double()), self.before


def begin_test(problem: Problem, current: Params, batch: Batch) -> BegunTest:
    """Evaluate the current model, unless it costs less to evaluate both models at once.

    The batch must have rows, as padded ones do. They are gathered for this, and again for the
    candidate: otherwise they would take memory beside the gradients.
    """
    if evaluated_at_once(problem, current, batch.data.inputs):
        return BegunTest(batch)
    before = problem.losses(current, replace(batch).examples)
    return BegunTest(batch, batch.mean(before.double()))
