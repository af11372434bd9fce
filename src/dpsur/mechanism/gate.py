"""The gate of Algorithm 1: both models on one fresh batch, then a decision (lines 9 to 14).

The decision is a rule: `LossRule` is the paper's clipped, noisy loss difference against a
threshold, `CoinRule` a coin for candidates that got worse.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.functional.problem import Problem
from dpsur.functional.tree import Params
from dpsur.mechanism.sampling import (
    Batch,
    Draw,
    padded_batch,
    padded_sizes,
    steady_batch,
)
from dpsur.mechanism.state import Candidate, State, Verdict
from dpsur.mechanism.streams import VAL_BATCH, VAL_NOISE, Draws, Stream, Streams
from dpsur.per_example.evaluation import record_losses
from dpsur.privacy.events import CoinTest, Test


@dataclass(frozen=True)
class LossRule:
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

    def decide(self, difference: Tensor, stream: Stream) -> Tensor:
        """Draw a verdict for a loss difference. The noise is drawn whatever the difference is."""
        bound = self.loss_clip
        # A comparison with NaN would reject with certainty, and a certain rejection has no
        # acceptance probability above a_min: count it as the worst finite difference instead.
        difference = torch.where(difference.abs() < math.inf, difference, bound)
        clipped = difference.clamp(-bound, bound)
        noise = stream.normal(difference.numel()).view(difference.shape)
        noisy = clipped + 2 * bound * self.noise_multiplier * noise
        return noisy < self.accept_threshold * bound


@dataclass(frozen=True)
class CoinRule:
    """Accept every improvement, and a worsening with probability 1 / accept_ratio.

    Formal guarantee: whatever the difference, NaN included, acceptance has a probability between
    1 / accept_ratio and 1. For the `proven` accounting this is all that matters, and against the
    paper's gate with the same ratio it needs about half the trials.
    """

    accept_ratio: float

    def decide(self, difference: Tensor, stream: Stream) -> Tensor:
        """Draw a verdict for a loss difference. The coin is tossed whatever the difference is."""
        toss = stream.uniform(difference.numel()).view(difference.shape)
        # a comparison with NaN is false, which makes NaN a worsening, as it should be
        return (difference < 0) | (toss < 1 / self.accept_ratio)


Rule = LossRule | CoinRule


def make_rule(test: Test, loss_clip: float) -> Rule:
    """The rule that an accounted test stands for."""
    if isinstance(test, CoinTest):
        return CoinRule(test.accept_ratio)
    return LossRule(loss_clip, test.noise_multiplier, test.accept_threshold)


def mean_losses(
    problem: Problem, candidate: Params, current: Params, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Mean losses of the candidate and of the current model, on one batch (Alg. 1, L10).

    An empty batch says nothing for or against: both are zero.
    """
    return mean_loss(problem, candidate, batch), mean_loss(problem, current, batch)


def mean_loss(problem: Problem, params: Params, batch: Batch) -> Tensor:
    """The mean of the losses that each record of a batch has by itself, in evaluation mode."""
    losses = torch.zeros(0, device=problem.device)
    if len(batch):
        losses = record_losses(problem, params, batch.examples)
    return batch.mean(losses.double())


@dataclass(frozen=True)
class StartedTest:
    """What of a test does not need the candidate: its batch, and the loss before."""

    batch: Batch
    before: Tensor


@dataclass(frozen=True)
class AlwaysAccept:
    """No gate: every candidate is kept."""

    test: Test | None = None
    rejects: ClassVar[bool] = False

    def begin(self, state: State, draws: Draws) -> None:
        """Nothing to prepare."""

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:  # noqa: ARG002
        """Accept."""
        return Verdict(torch.ones((), dtype=torch.bool, device=state.updates.device))

    def after_rejection(self, state: State, candidate: Candidate) -> State:  # noqa: ARG002
        """Nothing is ever rejected."""
        return state

    def padded(self) -> "AlwaysAccept":
        """It draws no batches."""
        return self


@dataclass(frozen=True)
class LossTestGate:
    """Compare both models on one fresh Poisson batch and let a rule decide.

    `keep_momentum` leaves the optimizer as a rejected candidate left it. What it then holds comes
    from a noisy gradient that the `every-trial` accounting has charged; under any other accounting
    a plan with that setting does not exist.
    """

    problem: Problem
    test: Test
    rule: Rule
    rejects: ClassVar[bool] = True
    keep_momentum: bool = False
    draw: Draw = steady_batch

    def begin(self, state: State, draws: Draws) -> StartedTest:
        """Draw the batch, and evaluate the current model.

        The rows of the batch are gathered for this, and again for the candidate: otherwise they
        would take memory beside the gradients.
        """
        batch = self._fresh_batch(draws)
        return StartedTest(batch, mean_loss(self.problem, state.params, replace(batch)))

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:
        """The rule's verdict on the loss difference."""
        new, begun = candidate.state.params, candidate.test
        if begun is None:
            batch = self._fresh_batch(draws)
            after, before = mean_losses(self.problem, new, state.params, batch)
        else:
            batch = begun.batch
            after, before = mean_loss(self.problem, new, batch), begun.before
        difference = after - before
        accept = self.rule.decide(difference, draws[VAL_NOISE])
        private = {"loss": after, "loss_difference": difference}
        return Verdict(accept, private, batch.overflow)

    def after_rejection(self, state: State, candidate: Candidate) -> State:
        """The state as it was; with momentum kept, the optimizer as the candidate left it."""
        if self.keep_momentum:
            return replace(state, optimizer=candidate.state.optimizer)
        return state

    def padded(self) -> "LossTestGate":
        """The same on padded batches."""
        return replace(self, draw=padded_batch)

    @property
    def padded_batch_sizes(self) -> tuple[int, ...]:
        """Sizes of padded batches, by level."""
        return padded_sizes(len(self.problem.train), self.test.sample_rate)

    def batch_sizes(self, streams: Streams, steps: range) -> list[int]:
        """How many records the batches of some tests have."""
        size, rate = len(self.problem.train), self.test.sample_rate
        return streams.counts_below(rate, size, VAL_BATCH, steps)

    def _fresh_batch(self, draws: Draws) -> Batch:
        return self.draw(self.problem.train, self.test.sample_rate, draws[VAL_BATCH])
