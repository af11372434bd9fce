"""The non-private reference: the same networks and batches, without clipping or noise."""

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dpsur import checks
from dpsur.distributed import Reduction
from dpsur.functional.problem import Problem, call_on, example_losses, mode
from dpsur.functional.tree import Params
from dpsur.mechanism.gaussian import Batch
from dpsur.mechanism.proposer import GradientProposer, GradientSource, Sampler
from dpsur.mechanism.state import Procedure, State
from dpsur.mechanism.streams import Draws
from dpsur.mechanism.trial import AlwaysAccept, Selective
from dpsur.methods.base import OptimizerMethod, check_batch_size
from dpsur.options import UPDATES, option
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event, NonPrivate, Step, Trial
from dpsur.privacy.plan import Plan
from dpsur.privacy.planning import repeated_plan

DEFAULT_EPOCHS = 20
DEFAULT_BATCH = 128


@dataclass(frozen=True, repr=False)
class Nonprivate(OptimizerMethod):
    """Plain stochastic gradient descent. Formal guarantee: none, epsilon is infinite."""

    name = "nonprivate"
    summary = "no privacy at all: the reference that private methods are held against"

    learning_rate: float = option(
        0.05,
        "learning rate at the start",
        group=UPDATES,
        common=True,
    )
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
        size = min(DEFAULT_BATCH, dataset_size) if self.batch_size is None else self.batch_size
        check_batch_size("batch_size", size, dataset_size)
        updates = self.updates or max(1, round(DEFAULT_EPOCHS * dataset_size / size))
        unlimited = Budget(math.inf, budget.delta)
        plan = repeated_plan(unlimited, accounting, Trial(NonPrivate()), updates, updates, setup)
        return replace(self, batch_size=size, updates=updates), plan

    def build(self, problem: Problem, plan: Plan) -> Procedure:
        """Steps along the plain gradient, every one of them kept."""
        assert self.batch_size is not None
        source = PlainGradient(Sampler(problem), self.batch_size / len(problem.train))
        proposer = GradientProposer(
            problem,
            source,
            self.make_optimizer(),
            self.make_schedule(plan.length),
            self.make_average(),
        )
        return Selective(proposer, AlwaysAccept(), plan.setup)


@dataclass(frozen=True)
class PlainGradient(GradientSource):
    """The gradient of the mean loss of a batch, without protection."""

    sampler: Sampler
    sample_rate: float

    def step(self, state: State) -> Step:  # noqa: ARG002
        """An update without protection."""
        return Trial(NonPrivate())

    def gradient(self, state: State, draws: Draws) -> tuple[Params, Tensor | None]:
        """The mean gradient of a fresh batch."""
        batch = self.sampler.batch(self.sample_rate, draws)
        with self.sampler.layer_randomness(draws):
            return _mean_gradient(self.sampler.problem, state.params, batch), batch.overflow

    def padded(self) -> Self | None:
        sampler = self.sampler.padded()
        return None if sampler is None else replace(self, sampler=sampler)


def _mean_gradient(problem: Problem, params: Params, batch: Batch) -> Params:
    count = batch.count().clamp(min=1)
    reduction = Reduction(batch.ranks)
    for name, value in _own_gradient(problem, params, batch, count).items():
        reduction.add(name, value)
    return reduction.result()


def _own_gradient(problem: Problem, params: Params, batch: Batch, count: Tensor) -> Params:
    """What the rows of this rank add to the mean over all `count` rows."""
    if not len(batch):
        return {name: torch.zeros_like(value) for name, value in params.items()}
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    with torch.enable_grad(), mode(problem.model, training=True):
        outputs = call_on(problem.model, leaves, batch.examples.inputs)
        losses = example_losses(problem.loss, outputs, batch.examples.targets)
        gradients = torch.autograd.grad(
            batch.own_sum(losses) / count,
            list(leaves.values()),
            allow_unused=True,
            materialize_grads=True,
        )
    return dict(zip(leaves, gradients, strict=True))
