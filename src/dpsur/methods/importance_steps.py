"""The steps of DPIS: a noisy sum of gradient norms now and then, and updates steered by it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpsur.errors import BudgetError
from dpsur.functional.parameters import Params
from dpsur.functional.problem import Problem
from dpsur.mechanism.dp_gradient import noisy_mean_gradient
from dpsur.mechanism.noise import add_gaussian
from dpsur.mechanism.sampling import steady_batch
from dpsur.mechanism.state import Candidate, State
from dpsur.mechanism.streams import BATCH, COINS, NOISE, STEERING, Streams
from dpsur.methods.gradient_steps import GradientSteps
from dpsur.methods.optimization import Optimization
from dpsur.per_example import ClippedSum, clipped_norms
from dpsur.privacy.calibrate import MOST_NOISE
from dpsur.privacy.events import SampledGaussian, Step, Trial
from dpsur.privacy.plans import AnyPlan, FilteredPlan
from dpsur.privacy.proven import event_divergence

NORMS_SPEND_ALL = (
    "the releases of gradient norms spend the whole budget; raise epsilon, refresh_every or "
    "norm_noise_multiplier"
)


@dataclass(frozen=True)
class Steering:
    """What decides the rate of an update: b, C, how K is released and after how many updates.

    `update_at` gives the update nearest to a rate that the plan allows. It sees released values
    only, so its noise depends on nothing else.
    """

    batch_size: int
    max_grad_norm: float
    norms: SampledGaussian
    refresh_every: int
    update_at: Callable[[float], SampledGaussian]


class ImportanceSteps(GradientSteps):
    """DPIS as a procedure: now and then a release of the norms, otherwise an update."""

    def __init__(
        self,
        method: Optimization,
        steering: Steering,
        problem: Problem,
        plan: AnyPlan,
        streams: Streams,
    ) -> None:
        super().__init__(method, problem, plan, streams)
        self._steering = steering

    def initial_state(self) -> State:
        """Nothing is known of the norms yet."""
        state = super().initial_state()
        unknown = torch.zeros((), dtype=torch.float64, device=self._problem.device)
        memory = {
            "norm_sum": unknown,
            "sample_rate": unknown,
            "noise_multiplier": unknown,
            "refresh_at": torch.zeros_like(state.updates),
        }
        return replace(state, memory=memory)

    def step(self, state: State) -> Step:
        """A release of the norms where one is due, else an update at the rate they imply."""
        if self._refresh_is_due(state):
            return self._steering.norms
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
        train, bound = self._problem.train, self._steering.max_grad_norm
        release = self._steering.norms
        batch = steady_batch(train, release.sample_rate, self._streams[STEERING])
        with self._layer_randomness():
            norms = clipped_norms(self._problem, state.params, batch.examples, bound)
        if batch.mask is not None:
            norms = torch.where(batch.mask, norms, 0.0)
        total = ClippedSum({"norms": norms.sum()}, sensitivity=bound)
        noisy = add_gaussian(total, release.noise_multiplier, self._streams[STEERING])
        estimate = noisy["norms"] / release.sample_rate
        # The floor keeps every probability at most 1; the ceiling is what K cannot exceed.
        smallest = self._steering.batch_size * bound
        norm_sum = estimate.clamp(min=smallest, max=len(train) * bound)
        update = self._steering.update_at(min(smallest / float(norm_sum), 1.0))
        memory = {
            "norm_sum": norm_sum,
            "sample_rate": torch.full_like(norm_sum, update.sample_rate),
            "noise_multiplier": torch.full_like(norm_sum, update.noise_multiplier),
            "refresh_at": state.updates + self._steering.refresh_every,
        }
        return replace(state, memory=memory)

    def _update(self, state: State) -> SampledGaussian:
        assert state.memory is not None
        rate, noise = state.memory["sample_rate"], state.memory["noise_multiplier"]
        return SampledGaussian(float(rate), float(noise))

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
                event.sample_rate,
                event.noise_multiplier,
                self._steering.max_grad_norm,
                self._streams[NOISE],
                coins=coins,
            )
        return gradient, batch.overflow


def updates_at_a_price(
    plan: FilteredPlan, norms: SampledGaussian, refresh_every: int
) -> Callable[[float], SampledGaussian]:
    """Updates of any rate that cost the same: the noise of one follows from its rate."""
    price, gate = price_of_an_update(plan, norms, refresh_every), plan.typical.gate
    return lambda rate: SampledGaussian(rate, plan.noise_for(rate, price, gate))


def price_of_an_update(plan: FilteredPlan, norms: SampledGaussian, refresh_every: int) -> float:
    """What each update, or trial where those are fixed, may take of a filter's allowance."""
    count = plan.trials if plan.updates is None else plan.updates
    refreshes = -(-count // refresh_every)
    left = plan.left_after_setup() - refreshes * event_divergence(norms, plan.order)
    if left <= 0:
        raise BudgetError(NORMS_SPEND_ALL)
    price = left / count * (1 - 1e-9)
    hidden = Trial(SampledGaussian(1.0, MOST_NOISE), plan.typical.gate)
    if plan.cost(hidden) > price:
        raise BudgetError(
            "the tests of candidates spend the whole budget; raise epsilon, make fewer "
            "updates, or weaken the test"
        )
    return price
