"""The methods of the library that step along noisy sums of clipped gradients.

DP-SGD (Abadi et al. 2016), the same on handcrafted features (Tramèr and Boneh 2021), and DPSUR (Fu
et al., VLDB 2024): a DP-SGD candidate that is kept only if it passes a noisy test.

The non-private reference: the same networks and batches, without clipping or noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dpsur import checks
from dpsur.distributed import Reduction
from dpsur.functional.problem import Problem, call_on, example_losses, mode
from dpsur.functional.tree import Params
from dpsur.mechanism import gates
from dpsur.mechanism.proposer import GradientSource, Sampler
from dpsur.mechanism.state import Procedure, State
from dpsur.mechanism.streams import Draws
from dpsur.mechanism.trial import AlwaysAccept, Selective
from dpsur.methods.base import OptimizerMethod, check_batch_size
from dpsur.methods.gradient_method import (
    GATE_HELP,
    GATES,
    NO_GATE,
    TESTS_OF_CANDIDATES,
    GradientMethod,
)
from dpsur.options import GATE, UPDATES, option
from dpsur.privacy.accounting import DEFAULT_ACCOUNTING, SELECTIVE_ACCOUNTING
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event, NonPrivate, Trial
from dpsur.privacy.plan import Plan
from dpsur.privacy.planning import repeated_plan


@dataclass(frozen=True, repr=False)
class Dpsgd(GradientMethod):
    """Differentially private stochastic gradient descent.

    Formal guarantee of one step: a sampled Gaussian mechanism at rate batch_size / N.
    """

    name = "dpsgd"
    summary = "DP-SGD (Abadi et al. 2016): clipped, noisy gradients, every update kept"


@dataclass(frozen=True, repr=False)
class DpsgdHf(GradientMethod):
    """DP-SGD on scattering features of images, which need no training and cost no privacy.

    The features are all that differs from DPSGD. Where they are normalised by statistics of the
    records, those are private and charged before training. Formal guarantee of one step: a sampled
    Gaussian mechanism at rate batch_size / N.
    """

    name = "dpsgd-hf"
    summary = "handcrafted features (Tramèr, Boneh 2021): DP-SGD on scattering coefficients"
    features = "scattering"


@dataclass(frozen=True, repr=False)
class Dpsur(GradientMethod):
    """DP-SGD with selective update and release (the paper's Algorithm 1).

    The gate is the paper's, `loss` with C_v = 0.001 and beta = -1, unless another is named or
    implied by an option that belongs to it (`accept_ratio`: the gate `coin`, which is ours).

    Formal guarantee of one trial: a sampled Gaussian for the candidate, and a test that accepts
    with a probability in a known interval. What a run of them costs is the accounting's business.
    """

    name = "dpsur"
    summary = "selective update and release (Fu et al. 2024): an update must pass a test to count"

    gate: str | gates.Gate | None = option(None, GATE_HELP, GATES, group=GATE, common=True)

    @property
    def label(self) -> str:
        """`dpsgd` where nothing is tested: that is what then runs."""
        return Dpsgd.name if self.gate == NO_GATE else self.name

    @property
    def usual_accounting(self) -> str:
        """By distributions behind a test of every candidate; what steers itself has none."""
        tested = self._implied_gate() in (None, *TESTS_OF_CANDIDATES)
        return SELECTIVE_ACCOUNTING if tested else DEFAULT_ACCOUNTING


DEFAULT_EPOCHS = 20
DEFAULT_BATCH = 128


@dataclass(frozen=True, repr=False)
class Nonprivate(OptimizerMethod):
    """Plain stochastic gradient descent. Formal guarantee: none, epsilon is infinite."""

    name = "nonprivate"
    summary = "no privacy at all: the reference that private methods are held against"

    learning_rate: float = option(0.05, "learning rate at the start", group=UPDATES, common=True)
    batch_size: int | None = option(
        None,
        f"expected size of a batch (default: {DEFAULT_BATCH})",
        group=UPDATES,
        common=True,
    )
    updates: int | None = option(
        None,
        f"updates to make (default: {DEFAULT_EPOCHS} epochs)",
        group=UPDATES,
        common=True,
    )

    def __post_init__(self) -> None:
        checks.positive("learning_rate", self.learning_rate)
        super().__post_init__()
        checks.at_least_one_each(self, "batch_size", "updates")

    def resolve(
        self,
        dataset_size: int,
        budget: Budget,
        accounting: str,
        setup: tuple[Event, ...] = (),
    ) -> tuple[Self, Plan]:
        """Fix batch and length. The plan states an infinite budget, whatever was asked for."""
        settled = self.of_epochs(DEFAULT_EPOCHS, dataset_size)
        updates, unlimited = self.updates or settled.updates, Budget(math.inf, budget.delta)
        assert updates is not None
        plan = repeated_plan(unlimited, accounting, Trial(NonPrivate()), updates, updates, setup)
        return replace(settled, updates=updates), plan

    def of_epochs(self, epochs: int, dataset_size: int) -> Self:
        """With so many passes over the records, and a size of batches."""
        size = min(DEFAULT_BATCH, dataset_size) if self.batch_size is None else self.batch_size
        check_batch_size("batch_size", size, dataset_size)
        return replace(self, batch_size=size, updates=max(1, round(epochs * dataset_size / size)))

    def build(self, problem: Problem, plan: Plan) -> Procedure:
        """The procedure of batches without a clip norm and without noise."""
        assert self.batch_size is not None
        source = PlainGradient(Sampler(problem), self.batch_size / len(problem.train))
        return Selective(self.proposer(problem, source, plan.length), AlwaysAccept(), plan.setup)


@dataclass(frozen=True)
class PlainGradient(GradientSource):
    """The gradient of the mean loss of a batch, without protection."""

    sampler: Sampler
    sample_rate: float

    def event(self, state: State) -> NonPrivate:  # noqa: ARG002
        return NonPrivate()

    def gradient(self, state: State, draws: Draws) -> Params:
        batch, problem = self.sampler.batch(self.sample_rate, draws), self.sampler.problem
        count = batch.count().clamp(min=1)
        leaves = {name: value.detach().requires_grad_() for name, value in state.params.items()}
        gradients: Sequence[Tensor]
        if not len(batch):  # no rows of this rank, which adds nothing to the mean over all
            gradients = [torch.zeros_like(value) for value in state.params.values()]
        else:
            with (
                self.sampler.layer_randomness(draws),
                torch.enable_grad(),
                mode(problem.model, training=True),
            ):
                outputs = call_on(problem.model, leaves, batch.examples.inputs)
                losses = example_losses(problem.loss, outputs, batch.examples.targets)
                gradients = torch.autograd.grad(
                    batch.own_sum(losses) / count,
                    list(leaves.values()),
                    allow_unused=True,
                    materialize_grads=True,
                )
        reduction = Reduction(batch.ranks)
        for name, value in zip(leaves, gradients, strict=True):
            reduction.add(name, value)
        return reduction.result()

    def padded(self) -> Self | None:
        sampler = self.sampler.padded()
        return None if sampler is None else replace(self, sampler=sampler)
