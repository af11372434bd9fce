"""DPIS (Wei et al. 2022), reconstructed: records join a batch in proportion to their gradients."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dpsur import checks
from dpsur.core.gradients import ClippedSum, clipped_norms
from dpsur.core.noise import add_gaussian
from dpsur.core.noisy_mean import noisy_mean_gradient
from dpsur.core.problem import Problem
from dpsur.core.sampling import steady_batch
from dpsur.core.streams import BATCH, COINS, NOISE, STEERING, Streams
from dpsur.core.types import Candidate, Params, Procedure, State
from dpsur.errors import BudgetError
from dpsur.methods.base import option
from dpsur.methods.gated import NO_GATE, Gated
from dpsur.methods.gradient_steps import GradientSteps
from dpsur.privacy.calibrate import MOST_NOISE
from dpsur.privacy.events import Event, SampledGaussian, Step, Trial
from dpsur.privacy.filtered import AnyPlan, FilteredPlan, check_covers_filters
from dpsur.privacy.plan import Budget, make_plan
from dpsur.privacy.proven import event_divergence

# What the noisy norms may take of the allowance altogether.
STEERING_SHARE = 0.02
DEFAULT_REFRESHES = 20
DEFAULT_NORM_RECORDS = 4096


@dataclass(frozen=True)
class Dpis(Gated):
    """Importance sampling by gradient norm, under a privacy filter.

    Let K be the sum of all clipped gradient norms, released with Gaussian noise now and then and
    floored at b C, so that every probability below is at most 1. Record i joins a batch with
    probability b |g_i| / K, and what it adds is g_i / |g_i| times C, so that every contribution has
    the norm C exactly and the sum over N b C / K estimates the mean clipped gradient. Drawing all
    records at the rate b C / K and keeping each with probability |g_i| / C is the same thing.

    The original has no public code. Ours are: K from a Poisson sample of the records, its refreshes
    every so many updates, the noise of each update chosen so that all updates cost the same share
    of the allowance whatever K comes out as, and the privacy filter around it.

    Formal guarantee of one update: a sampled Gaussian at rate b C / K given the released K (the
    random choice of who is kept can only lower the rate, and the divergence rises with it); of one
    release of K: a sampled Gaussian of the rate `norm_batch_size` / N. The filter composes them
    (docs/privacy.md).
    """

    name = "dpis"
    summary = "importance sampling (Wei et al. 2022, reconstructed): batches by gradient norm"

    refresh_every: int | None = option(
        None, "updates between two releases of the sum of gradient norms (default: 20 in a run)"
    )
    norm_batch_size: int | None = option(
        None, f"records that a release of the norms looks at (default: {DEFAULT_NORM_RECORDS})"
    )
    norm_noise_multiplier: float | None = option(
        None, "noise of the sum of norms relative to the clip norm (default: 2% of the budget)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.at_least_one_each(self, "refresh_every", "norm_batch_size")
        if self.norm_noise_multiplier is not None:
            checks.positive("norm_noise_multiplier", self.norm_noise_multiplier)

    def settle(
        self,
        dataset_size: int,
        budget: Budget,
        accounting: str,
        setup: tuple[Event, ...] = (),
    ) -> tuple[Self, AnyPlan]:
        """Fix the filter and the price of an update. Noise is settled when the rate is known."""
        check_covers_filters(accounting)
        settled = self._with_defaults(dataset_size, budget, accounting)
        request = replace(settled._request(dataset_size, accounting), setup=setup)
        typical = make_plan(request, budget, accounting)
        count = typical.length
        trials_are_fixed = settled.gate != NO_GATE and typical.updates is None
        plan = FilteredPlan.for_budget(
            budget,
            accounting,
            typical.trial,
            updates=None if trials_are_fixed else count,
            trials=count,
            setup=setup,
            on_reject=self.on_reject,
        )
        settled = replace(
            settled._with_plan(typical),
            noise_multiplier=None,
            refresh_every=self.refresh_every or max(1, -(-count // DEFAULT_REFRESHES)),
            norm_batch_size=min(self.norm_batch_size or DEFAULT_NORM_RECORDS, dataset_size),
        )
        return settled._with_steering(plan, dataset_size), plan

    def _with_steering(self, plan: FilteredPlan, dataset_size: int) -> Self:
        """Choose the noise of the norms, unless it is given, to take its share of the allowance."""
        if self.norm_noise_multiplier is not None:
            return self
        share = STEERING_SHARE * plan.allowance / self.refreshes(_count(plan))
        noise = plan.noise_for(self.norm_rate(dataset_size), share)
        return replace(self, norm_noise_multiplier=noise)

    def refreshes(self, count: int) -> int:
        """How often the norms are released, at most, in a run of so many updates or trials."""
        assert self.refresh_every is not None
        return -(-count // self.refresh_every)

    def norm_rate(self, dataset_size: int) -> float:
        """The rate at which a release of the norms looks at records."""
        assert self.norm_batch_size is not None
        return min(1.0, self.norm_batch_size / dataset_size)

    def _proposer(self, problem: Problem, plan: AnyPlan, streams: Streams) -> Procedure:
        return ImportanceSteps(self, problem, plan, streams)


class ImportanceSteps(GradientSteps):
    """DPIS as a procedure: now and then a release of the norms, otherwise an update."""

    def __init__(self, method: Dpis, problem: Problem, plan: AnyPlan, streams: Streams) -> None:
        super().__init__(method, problem, plan, streams)
        assert isinstance(plan, FilteredPlan)
        assert method.batch_size is not None
        assert method.refresh_every is not None
        assert method.norm_noise_multiplier is not None
        self._plan = plan
        self._batch_size = method.batch_size
        self._max_grad_norm = method.max_grad_norm
        self._refresh_every = method.refresh_every
        self._norms = SampledGaussian(
            method.norm_rate(len(problem.train)), method.norm_noise_multiplier
        )
        count = _count(plan)
        self._price = self._price_of_an_update(count, method.refreshes(count))

    def _price_of_an_update(self, count: int, refreshes: int) -> float:
        norms = refreshes * event_divergence(self._norms, self._plan.order)
        left = self._plan.left_after_setup() - norms
        if left <= 0:
            raise BudgetError(
                "the releases of gradient norms spend the whole budget; raise epsilon, "
                "refresh_every or norm_noise_multiplier"
            )
        price = left / count * (1 - 1e-9)
        hidden = Trial(SampledGaussian(1.0, MOST_NOISE), self._plan.typical.gate)
        if self._plan.cost(hidden) > price:
            raise BudgetError(
                "the tests of candidates spend the whole budget; raise epsilon, make fewer "
                "updates, or weaken the test"
            )
        return price

    def initial_state(self) -> State:
        """Nothing is known of the norms yet."""
        state = super().initial_state()
        unknown = torch.zeros((), dtype=torch.float64, device=self._problem.device)
        memory = {
            "norm_sum": unknown,
            "noise_multiplier": unknown,
            "refresh_at": torch.zeros_like(state.updates),
        }
        return replace(state, memory=memory)

    def step(self, state: State) -> Step:
        """A release of the norms where one is due, else an update at the rate they imply."""
        if self._refresh_is_due(state):
            return self._norms
        return Trial(self._update(state))

    def propose(self, state: State, position: Tensor) -> Candidate:
        """Release the norms, or take one step."""
        if self._refresh_is_due(state):
            return Candidate(self._refreshed(state))
        return super().propose(state, position)

    def padded(self) -> None:
        """Rates change during the run, and so do the shapes of batches."""
        return

    def _refresh_is_due(self, state: State) -> bool:
        assert state.memory is not None
        return bool(state.updates >= state.memory["refresh_at"])

    def _refreshed(self, state: State) -> State:
        """Release a noisy sum of clipped gradient norms, and fix the noise that follows from it."""
        train, bound = self._problem.train, self._max_grad_norm
        batch = steady_batch(train, self._norms.sample_rate, self._streams[STEERING])
        with self._layer_randomness():
            norms = clipped_norms(self._problem, state.params, batch.examples, bound)
        if batch.mask is not None:
            norms = torch.where(batch.mask, norms, 0.0)
        total = ClippedSum({"norms": norms.sum()}, sensitivity=bound)
        noisy = add_gaussian(total, self._norms.noise_multiplier, self._streams[STEERING])
        estimate = noisy["norms"] / self._norms.sample_rate
        # The floor keeps every probability at most 1; the ceiling is what K cannot exceed.
        norm_sum = estimate.clamp(min=self._batch_size * bound, max=len(train) * bound)
        rate = self._batch_size * bound / float(norm_sum)
        noise = self._plan.noise_for(min(rate, 1.0), self._price, self._plan.typical.gate)
        memory = {
            "norm_sum": norm_sum,
            "noise_multiplier": torch.full_like(norm_sum, noise),
            "refresh_at": state.updates + self._refresh_every,
        }
        return replace(state, memory=memory)

    def _update(self, state: State) -> SampledGaussian:
        assert state.memory is not None
        rate = self._batch_size * self._max_grad_norm / float(state.memory["norm_sum"])
        return SampledGaussian(min(rate, 1.0), float(state.memory["noise_multiplier"]))

    def _gradient(self, state: State) -> tuple[Params, Tensor | None]:
        event = self._update(state)
        batch = steady_batch(self._problem.train, event.sample_rate, self._streams[BATCH])
        # In (0, 1]: a draw of zero would keep a gradient that is too small to be scaled up.
        coins = 1 - torch.rand(
            len(batch),
            generator=self._streams[COINS],
            device=self._problem.device,
            dtype=torch.float64,
        )
        with self._layer_randomness():
            gradient = noisy_mean_gradient(
                self._problem,
                state.params,
                batch,
                event,
                self._max_grad_norm,
                self._streams[NOISE],
                coins=coins,
            )
        return gradient, batch.overflow


def _count(plan: FilteredPlan) -> int:
    """Updates, or trials where those are fixed, that the allowance is shared among."""
    return plan.trials if plan.updates is None else plan.updates
