"""DPIS (Wei et al. 2022), reconstructed: records join a batch in proportion to their gradients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dpsur import checks
from dpsur.errors import BudgetError, InvalidInputError
from dpsur.functional.problem import Problem
from dpsur.functional.tree import Params
from dpsur.mechanism import gaussian
from dpsur.mechanism.gates import Metrics
from dpsur.mechanism.gaussian import dp_mean_gradient
from dpsur.mechanism.proposer import GradientProposer, GradientSource, Sampler
from dpsur.mechanism.state import START, Candidate, Procedure, State
from dpsur.mechanism.streams import COINS, NOISE, STEERING, Draws
from dpsur.mechanism.trial import Selective
from dpsur.methods.gradient_method import BLOCK_GATE, NO_GATE, GradientMethod
from dpsur.options import option
from dpsur.per_example import ClippedSum, clipped_norms
from dpsur.privacy.accountants.proven import event_divergence
from dpsur.privacy.accounting import check_covers_steering
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event, SampledGaussian, Step, Trial
from dpsur.privacy.plan import Plan
from dpsur.privacy.planning import filtered_plan
from dpsur.privacy.search import MOST_NOISE
from reproduction.methods.menus import (
    as_costly,
    best_order,
    fitted_menu_plan,
    menu_around,
    noise_for,
)

# What the noisy norms may take of the budget altogether, by Rényi divergence.
STEERING_SHARE = 0.02
DEFAULT_REFRESHES = 20
DEFAULT_NORM_RECORDS = 4096
NORMS_SPEND_ALL = (
    "the releases of gradient norms spend the whole budget; raise epsilon, refresh_every or "
    "norm_noise_multiplier"
)


@dataclass(frozen=True, repr=False)
class Dpis(GradientMethod):
    """Importance sampling by gradient norm.

    Let K be the sum of all clipped gradient norms, released with Gaussian noise now and then and
    floored at b C, so that every probability below is at most 1. Record i joins a batch with
    probability b |g_i| / K, and what it adds is g_i / |g_i| times C, so that every contribution has
    the norm C exactly and the sum over N b C / K estimates the mean clipped gradient. Drawing all
    records at the rate b C / K and keeping each with probability |g_i| / C is the same thing.

    The original has no public code. Ours are: K from a Poisson sample of the records, its refreshes
    every so many updates, and a menu of rates, each with noise of its own, that is fixed before the
    run. The rate b C / K is rounded to the nearest on the menu, the sum divided accordingly. Behind
    a gate there is no menu: a privacy filter stands around the run, and the noise is chosen so that
    all updates cost the same share of its allowance whatever K comes out as.

    Formal guarantee of one update: a sampled Gaussian at its rate given the released K (the
    random choice of who is kept can only lower the rate, and the divergence rises with it); of one
    release of K: a sampled Gaussian of the rate `norm_batch_size` / N. The menu or the filter
    composes them (README.md here).
    """

    name = "dpis"
    summary = "importance sampling (Wei et al. 2022, reconstructed): batches by gradient norm"

    refresh_every: int | None = option(
        None,
        "updates between two releases of the sum of gradient norms (default: 20 in a run)",
        group="method dpis",
    )
    norm_batch_size: int | None = option(
        None,
        f"records that a release of the norms looks at (default: {DEFAULT_NORM_RECORDS})",
        group="method dpis",
    )
    norm_noise_multiplier: float | None = option(
        None,
        "noise of the sum of norms relative to the clip norm (default: 2% of the budget)",
        group="method dpis",
    )

    def __post_init__(self, metrics: Metrics | None) -> None:
        super().__post_init__(metrics)
        checks.at_least_one_each(self, "refresh_every", "norm_batch_size")
        if self.norm_noise_multiplier is not None:
            checks.positive("norm_noise_multiplier", self.norm_noise_multiplier)

    def resolve(
        self,
        dataset_size: int,
        budget: Budget,
        accounting: str,
        setup: tuple[Event, ...] = (),
    ) -> tuple[Self, Plan]:
        """Fix what may be chosen later: a menu of updates, or behind a gate the price of one."""
        check_covers_steering(accounting)
        if self._implied_gate() == BLOCK_GATE:
            return self._settle_menu_blocks(dataset_size, budget, accounting, setup)
        if self.metrics_budget is not None:
            raise InvalidInputError(
                f"metrics_budget {self.metrics_budget:g} is for dpis with the gate block only; "
                "choose that gate, or leave it out"
            )
        settled, typical = self._settle_repeated(dataset_size, budget, accounting, setup)
        settled = replace(
            settled,
            noise_multiplier=None,
            refresh_every=self.refresh_every or max(1, -(-typical.length // DEFAULT_REFRESHES)),
            norm_batch_size=min(self.norm_batch_size or DEFAULT_NORM_RECORDS, dataset_size),
        )
        if self.gate == NO_GATE:
            return settled._with_menu(typical, dataset_size)
        return settled._with_filter(typical, dataset_size)

    def _settle_menu_blocks(
        self, dataset_size: int, budget: Budget, accounting: str, setup: tuple[Event, ...]
    ) -> tuple[Self, Plan]:
        """Offer a menu of updates in every block; a block starts with a release of the norms."""
        if self.noise_multiplier is not None:
            raise InvalidInputError(
                f"noise_multiplier {self.noise_multiplier:g} cannot be fixed with the gate block, "
                "where dpis chooses updates from a menu, each with its own noise; leave it out"
            )
        blocks = replace(self, gate=BLOCK_GATE)
        _, plain = blocks._resolve_blocks(dataset_size, budget, accounting, setup)
        if self.val_noise_multiplier is None:
            # Everything else follows from the noise of the tests, as when settled again with it.
            blocks = replace(blocks, val_noise_multiplier=plain.test.noise_multiplier)
            _, plain = blocks._resolve_blocks(dataset_size, budget, accounting, setup)
        updates = plain.blocks[-1]
        refresh = self.refresh_every or max(1, -(-updates // DEFAULT_REFRESHES))
        settled = replace(
            blocks,
            refresh_every=refresh,
            norm_batch_size=min(self.norm_batch_size or DEFAULT_NORM_RECORDS, dataset_size),
        )
        order = best_order(plain.update, plain.length, budget.delta)
        rate = settled.norm_rate(dataset_size)
        releases = sum(-(-size // refresh) for size in plain.blocks)
        share = STEERING_SHARE * plain.length / releases
        noise = self.norm_noise_multiplier or as_costly(plain.update, rate, order, share)
        found, plan = settled._resolve_blocks(
            dataset_size,
            budget,
            accounting,
            setup,
            menu_around(plain.update, order, refresh),
            SampledGaussian(rate, noise),
        )
        return replace(found, noise_multiplier=None, norm_noise_multiplier=noise), plan

    def _with_menu(self, typical: Plan, dataset_size: int) -> tuple[Self, Plan]:
        """Offer rates from b / N upwards, each with noise of its own, that fit the budget."""
        assert self.refresh_every is not None
        update, count = typical.typical.update, typical.length
        assert isinstance(update, SampledGaussian)
        order = best_order(update, count, typical.budget.delta)
        rate = self.norm_rate(dataset_size)
        share = STEERING_SHARE * count / self.refreshes(count)
        noise = self.norm_noise_multiplier or as_costly(update, rate, order, share)
        plan = fitted_menu_plan(
            typical.budget,
            typical.accounting,
            menu_around(update, order, self.refresh_every),
            SampledGaussian(rate, noise),
            updates=count,
            setup=typical.setup,
        )
        if plan is None:
            raise BudgetError(NORMS_SPEND_ALL)
        return replace(self, norm_noise_multiplier=noise), plan

    def _with_filter(self, typical: Plan, dataset_size: int) -> tuple[Self, Plan]:
        """Fix the filter. The price of an update follows, and the noise when the rate is known."""
        count = typical.length
        plan = filtered_plan(
            typical.budget,
            typical.accounting,
            typical.typical,
            updates=typical.updates,
            trials=count,
            setup=typical.setup,
            on_reject=self.on_reject,
        )
        if self.norm_noise_multiplier is not None:
            return self, plan
        assert plan.filter is not None
        share = STEERING_SHARE * plan.filter.allowance / self.refreshes(count)
        noise = noise_for(plan, self.norm_rate(dataset_size), share)
        return replace(self, norm_noise_multiplier=noise), plan

    def refreshes(self, count: int) -> int:
        """How often the norms are released, at most, in a run of so many updates or trials."""
        assert self.refresh_every is not None
        return -(-count // self.refresh_every)

    def norm_rate(self, dataset_size: int) -> float:
        """The rate at which a release of the norms looks at records."""
        assert self.norm_batch_size is not None
        return min(1.0, self.norm_batch_size / dataset_size)

    def build(self, problem: Problem, plan: Plan) -> Procedure:
        """Importance sampling, behind the gate that was settled."""
        assert self.batch_size is not None
        assert self.refresh_every is not None
        assert self.norm_noise_multiplier is not None
        norms = SampledGaussian(self.norm_rate(problem.size), self.norm_noise_multiplier)
        steering = Steering(
            self.batch_size,
            self.max_grad_norm,
            norms,
            self.refresh_every,
            self._updates_by_rate(plan, norms),
        )
        source = ImportanceGradient(Sampler(problem), steering)
        plain = self.proposer(problem, source, plan.length)
        steps = ImportanceProposer(problem, source, plain.optimizer, plain.schedule, plain.average)
        if plan.tests:
            return self.block_procedure(plan, steps)
        return Selective(steps, self.make_gate(problem, plan), plan.setup)

    def _updates_by_rate(
        self, plan: Plan, norms: SampledGaussian
    ) -> Callable[[float], SampledGaussian]:
        """The update for a rate: from the menu, or at the price that the filter leaves for it."""
        if plan.tests:
            assert plan.menu is not None
            return plan.menu.nearest
        if self.gate == NO_GATE:
            assert plan.menu is not None
            return plan.menu.nearest
        assert self.refresh_every is not None
        return updates_at_a_price(plan, norms, self.refresh_every)


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


@dataclass(frozen=True)
class ImportanceGradient(GradientSource):
    """Gradients of records that were drawn in proportion to their norms."""

    sampler: Sampler
    steering: Steering

    def event(self, state: State) -> SampledGaussian:
        """Rate and noise of an update, by the last release of the norms."""
        assert state.memory is not None
        rate, noise = state.memory["sample_rate"], state.memory["noise_multiplier"]
        return SampledGaussian(float(rate), float(noise))

    def gradient(self, state: State, draws: Draws) -> Params:
        """Sample at the rate, keep each record in proportion to its norm, add noise."""
        event, problem = self.event(state), self.sampler.problem
        batch = self.sampler.batch(event.sample_rate, draws)
        # In (0, 1]: a draw of zero would keep a gradient that is too small to be scaled up.
        drawn = len(batch) if batch.total is None else batch.total
        coins = batch.ranks.own(1 - draws[COINS].uniform(drawn))
        with self.sampler.layer_randomness(draws):
            return dp_mean_gradient(
                problem,
                state.params,
                batch,
                event.sample_rate,
                event.noise_multiplier,
                self.steering.max_grad_norm,
                draws[NOISE],
                coins=coins,
            )

    # never padded: rates change during the run, and so do the shapes of batches

    def with_clip_norm(self, max_grad_norm: Tensor) -> Self:
        """The same with another clipping norm, of gradients and of the norms that are released."""
        return replace(self, steering=replace(self.steering, max_grad_norm=float(max_grad_norm)))

    def initial_memory(self, state: State) -> Mapping[str, Tensor]:
        """Nothing is known of the norms yet."""
        unknown = torch.zeros((), dtype=torch.float64, device=state.updates.device)
        return {
            "norm_sum": unknown,
            "sample_rate": unknown,
            "noise_multiplier": unknown,
            "refresh_at": torch.zeros_like(state.updates),
        }

    def refresh_is_due(self, state: State) -> bool:
        """Whether a release of the norms comes next."""
        assert state.memory is not None
        return bool(state.updates >= state.memory["refresh_at"])

    def released(self, state: State, draws: Draws) -> State:
        """Release a noisy sum of clipped gradient norms, and fix the noise that follows from it."""
        steering, sampler = self.steering, self.sampler
        train, bound, release = sampler.problem.train, steering.max_grad_norm, steering.norms
        batch = sampler.batch(release.sample_rate, draws, STEERING)
        with sampler.layer_randomness(draws):
            norms = clipped_norms(sampler.problem, state.params, batch.examples, bound)
        if batch.mask is not None:
            norms = torch.where(batch.mask, norms, 0.0)
        total = ClippedSum({"norms": batch.ranks.sum(norms.sum())}, sensitivity=bound)
        noisy = gaussian.add_noise(total, release.noise_multiplier, draws[STEERING])
        estimate = noisy["norms"] / release.sample_rate
        # The floor keeps every probability at most 1; the ceiling is what K cannot exceed.
        smallest = steering.batch_size * bound
        norm_sum = estimate.clamp(min=smallest, max=len(train) * bound)
        update = steering.update_at(min(smallest / float(norm_sum), 1.0))
        assert state.memory is not None
        memory = {
            **state.memory,
            "norm_sum": norm_sum,
            "sample_rate": torch.full_like(norm_sum, update.sample_rate),
            "noise_multiplier": torch.full_like(norm_sum, update.noise_multiplier),
            "refresh_at": state.updates + steering.refresh_every,
        }
        return replace(state, memory=memory)


@dataclass(frozen=True)
class ImportanceProposer(GradientProposer):
    """DPIS: now and then a release of the norms, else an update at the rate that they imply."""

    source: ImportanceGradient

    def step(self, state: State) -> Step:
        """A release of the norms where one is due, else an update."""
        if self.source.refresh_is_due(state):
            return self.source.steering.norms
        return super().step(state)

    def initial_state(self) -> State:
        """Nothing is known of the norms yet."""
        state = super().initial_state()
        return replace(state, memory=self.source.initial_memory(state))

    def propose(self, state: State, draws: Draws, position: Tensor) -> Candidate:
        """Release the norms, or take one step."""
        if self.source.refresh_is_due(state):
            return Candidate(self.source.released(state, draws))
        return super().propose(state, draws, position)

    def restore(self, state: State, name: str, add: Sequence[tuple[str, float]] = ()) -> State:
        """Where training starts again a release is due: the norms are those of other weights."""
        state = super().restore(state, name, add)
        if name != START or state.memory is None:
            return state
        due = torch.zeros_like(state.memory["refresh_at"])
        return replace(state, memory={**state.memory, "refresh_at": due})

    def padded(self) -> None:
        """Rates change during the run, and so do the shapes of batches."""
        return


def updates_at_a_price(
    plan: Plan, norms: SampledGaussian, refresh_every: int
) -> Callable[[float], SampledGaussian]:
    """Updates of any rate that cost the same: the noise of one follows from its rate."""
    price, gate = price_of_an_update(plan, norms, refresh_every), plan.typical.gate
    return lambda rate: SampledGaussian(rate, noise_for(plan, rate, price, gate))


def price_of_an_update(plan: Plan, norms: SampledGaussian, refresh_every: int) -> float:
    """What each update, or trial where those are fixed, may take of a filter's allowance."""
    count = plan.trials if plan.updates is None else plan.updates
    refreshes = -(-count // refresh_every)
    assert plan.filter is not None
    left = plan.left_after_setup() - refreshes * event_divergence(norms, plan.filter.order)
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
