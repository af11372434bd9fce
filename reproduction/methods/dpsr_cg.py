"""DPSR-CG (Xie, Huang 2026), charged in full: a candidate passes if fewer gradients are long."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.functional.problem import Problem
from dpsur.functional.tree import Params
from dpsur.mechanism.gates import Metrics
from dpsur.mechanism.gaussian import Batch, noisy_mean
from dpsur.mechanism.proposer import DpGradient, GradientProposer, GradientSource, Sampler
from dpsur.mechanism.state import Candidate, Gate, State, Verdict
from dpsur.mechanism.streams import NOISE, Draws
from dpsur.methods.gradient_method import NO_GATE, GradientMethod
from dpsur.options import option
from dpsur.per_example import clipped_norms, clipped_sum
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event, SampledGaussian, Test
from dpsur.privacy.plan import Plan

EVERY_TRIAL = "every-trial"
# Of the precision 1 / sigma^2 of a trial, what the sum of norms gets: its noise is sqrt(8) sigma.
NORMS_SHARE = 1 / 8
NORMS = "norms of long gradients"  # beside the gradients of parameters, by name
_GROUP = "method dpsr-cg"


@dataclass(frozen=True, repr=False)
class DpsrCg(GradientMethod):
    """DP-SGD whose candidate is kept if the norms of long gradients fell by more than a threshold.

    A gradient is long if it is clipped. Its norm counts up to `norm_limit` clip norms, as a
    fraction of that, so that a record adds at most 1 to the sum over the batch. A candidate passes
    if the noisy sum fell by more than `fall` since the last accepted one; the first `kept_first`
    pass in any case. This is the rule of the authors' code (github.com/FangXieLab/DPSR-CG,
    algorithm/DPSR_CG.py at commit 5f70811), with its defaults.

    There the sum of the last accepted batch is kept without noise, a fall is clipped to 2 and gets
    noise 4 sigma, and accepted updates alone are charged. Ours: every sum gets noise sqrt(8) sigma
    once, so that a difference has the same 4 sigma, and every trial is charged. A long gradient is
    clipped to the clip norm; there it has another one.

    Formal guarantee of one trial: gradients and sum are one sampled Gaussian of multiplier
    `noise_multiplier`, since both are coordinates of one sum that gets noise once. Verdicts are
    functions of what it released. No accounting that charges accepted updates alone covers it.
    """

    name = "dpsr-cg"
    summary = "release by clipped norms (Xie, Huang 2026), every trial charged: kept if they fell"

    fall: float = option(
        2.0,
        "by how much the sum of norms must have fallen; a record adds at most 1",
        group=_GROUP,
    )
    norm_limit: float = option(
        1.375,
        "clip norms up to which a long gradient counts in that sum",
        group=_GROUP,
    )
    kept_first: int = option(29, "updates at the start that pass in any case", group=_GROUP)

    def __post_init__(self, metrics: Metrics | None) -> None:
        super().__post_init__(metrics)
        checks.finite("fall", self.fall)
        checks.at_least_one("kept_first", self.kept_first)
        if not 1 <= self.norm_limit < math.inf:
            raise InvalidInputError(
                f"norm_limit must be a finite number of at least 1, got {self.norm_limit}"
            )
        if self._implied_gate() != NO_GATE or self.metrics_budget is not None:
            raise InvalidInputError(
                f"{self.name} has a test of its own, by the norms of gradients; leave gate, its "
                "options and metrics_budget out"
            )

    @property
    def usual_accounting(self) -> str:
        """The only one that covers it."""
        return EVERY_TRIAL

    def resolve(
        self,
        dataset_size: int,
        budget: Budget,
        accounting: str,
        setup: tuple[Event, ...] = (),
    ) -> tuple[Self, Plan]:
        """Settle it as DP-SGD: `updates` are trials, of which some are rejected."""
        if accounting_named(accounting).charges != "trials":
            raise InvalidInputError(
                f"{self.name} tests a candidate on the records that it was made of, which the "
                f"{accounting} accounting does not cover; use the accounting {EVERY_TRIAL}"
            )
        return super().resolve(dataset_size, budget, accounting, setup)

    def gradient_source(self, problem: Problem, plan: Plan) -> GradientSource:
        """Gradients with a sum of norms beside them."""
        update = plan.typical.update
        assert isinstance(update, SampledGaussian)
        return GradientWithNorms(Sampler(problem), update, self.max_grad_norm)

    def proposer(self, problem: Problem, source: GradientSource, length: int) -> GradientProposer:
        """Steps that remember the sum of norms."""
        plain = super().proposer(problem, source, length)
        assert isinstance(source, GradientWithNorms)
        return NormsProposer(
            problem,
            source,
            plain.optimizer,
            plain.schedule,
            plain.average,
            norm_limit=self.norm_limit,
        )

    def make_gate(self, problem: Problem, plan: Plan) -> Gate:  # noqa: ARG002
        """The test, which draws nothing."""
        return NormsGate(self.fall, self.kept_first)


class GradientWithNorms(DpGradient):
    """Noisy gradients of a Poisson batch and, of the same batch, a noisy sum of norms.

    Formal guarantee of both together: the sampled Gaussian mechanism `update`. The sum of norms is
    scaled such that it moves by C w when a record joins, w^2 / (1 + w^2) being its share, and the
    noise is that of a sum that moves by C sqrt(1 + w^2).
    """

    def with_norms(self, state: State, draws: Draws, norm_limit: float) -> tuple[Params, Tensor]:
        """The gradient, and the sum of norms in units of what one record adds."""
        problem, bound = self.sampler.problem, float(self.max_grad_norm)
        batch = self.sampler.batch(self.update.sample_rate, draws)
        with self.sampler.layer_randomness(draws):
            total = clipped_sum(
                problem,
                state.params,
                batch.data,
                bound,
                mask=batch.mask,
                rows=batch.rows,
                ranks=batch.ranks,
                at_once=batch.at_once,
            )
            added = long_norms(problem, state.params, batch, bound, norm_limit)
        weight = bound * math.sqrt(NORMS_SHARE / (1 - NORMS_SHARE))
        both = replace(
            total,
            params={**total.params, NORMS: weight * added},
            sensitivity=math.hypot(bound, weight),
        )
        size = self.update.sample_rate * problem.size
        mean = dict(noisy_mean(both, self.update.noise_multiplier, size, draws[NOISE]))
        return mean, mean.pop(NORMS) * (size / weight)


def long_norms(
    problem: Problem, params: Params, batch: Batch, bound: float, norm_limit: float
) -> Tensor:
    """The sum over a batch of min(norm, limit) / limit, of gradients beyond the clip norm."""
    norms = clipped_norms(problem, params, batch.examples, norm_limit * bound)
    counted = torch.where(norms > bound, norms / (norm_limit * bound), 0.0)
    if batch.mask is not None:
        counted = torch.where(batch.mask, counted, 0.0)
    return batch.ranks.sum(counted.sum())


@dataclass(frozen=True)
class KnownGradient(GradientSource):
    """A gradient that was drawn already."""

    found: Params

    def gradient(self, state: State, draws: Draws) -> Params:  # noqa: ARG002
        """That gradient."""
        return self.found


@dataclass(frozen=True)
class NormsProposer(GradientProposer):
    """A candidate remembers the noisy sum of norms of the batch that it was made of."""

    source: GradientWithNorms
    norm_limit: float = 1.0

    def initial_state(self) -> State:
        """No sum was released yet."""
        state = super().initial_state()
        unknown = torch.full((), math.inf, dtype=torch.float64, device=state.updates.device)
        return replace(state, memory={"norms": unknown})

    def propose(self, state: State, draws: Draws, position: Tensor) -> Candidate:
        """One optimizer step, and the sum beside its gradient."""
        gradient, norms = self.source.with_norms(state, draws, self.norm_limit)
        found = KnownGradient(gradient)
        steps = GradientProposer(self.problem, found, self.optimizer, self.schedule, self.average)
        candidate = steps.propose(state, draws, position)
        return replace(candidate, state=replace(candidate.state, memory={"norms": norms}))

    def padded(self) -> None:
        """Trials are made one by one."""
        return


@dataclass(frozen=True)
class NormsGate:
    """Keep a candidate whose noisy sum of norms is lower than that of the last by `fall`.

    It draws nothing and reads released values only; the charge is the candidate's.
    """

    fall: float
    kept_first: int
    test: ClassVar[Test | None] = None
    rejects: ClassVar[bool] = True

    def begin(self, state: State, draws: Draws) -> None:
        """Nothing to prepare."""

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:  # noqa: ARG002
        """Compare two sums that were released."""
        assert state.memory is not None
        assert candidate.state.memory is not None
        fallen = state.memory["norms"] - candidate.state.memory["norms"]
        return Verdict((fallen > self.fall) | (state.updates < self.kept_first))

    def after_rejection(self, state: State, candidate: Candidate) -> State:  # noqa: ARG002
        """The state as it was, with the sum of the last accepted candidate."""
        return state

    def padded(self) -> Self:
        """The same."""
        return self
