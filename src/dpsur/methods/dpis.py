"""DPIS (Wei et al. 2022), reconstructed: records join a batch in proportion to their gradients."""

from dataclasses import dataclass, replace
from typing import Self

from dpsur import checks
from dpsur.errors import BudgetError
from dpsur.functional.problem import Problem
from dpsur.mechanism.state import Procedure
from dpsur.mechanism.streams import Streams
from dpsur.methods.base import option
from dpsur.methods.gated import NO_GATE, Gated
from dpsur.methods.importance_steps import (
    NORMS_SPEND_ALL,
    ImportanceSteps,
    Steering,
    updates_at_a_price,
)
from dpsur.privacy.accounting import check_covers_steering
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event, SampledGaussian
from dpsur.privacy.plans import AnyPlan, FilteredPlan, MenuPlan, Plan
from dpsur.privacy.plans.menu_rates import as_costly, best_order, menu_around
from dpsur.privacy.plans.request import make_plan

# What the noisy norms may take of the budget altogether, by Rényi divergence.
STEERING_SHARE = 0.02
DEFAULT_REFRESHES = 20
DEFAULT_NORM_RECORDS = 4096


@dataclass(frozen=True, repr=False)
class Dpis(Gated):
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
    composes them (docs/privacy.md).
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
        """Fix what may be chosen later: a menu of updates, or behind a gate the price of one."""
        check_covers_steering(accounting)
        settled = self._with_defaults(dataset_size, budget, accounting)
        request = replace(settled._request(dataset_size, accounting), setup=setup)
        typical = make_plan(request, budget, accounting)
        settled = replace(
            settled._with_plan(typical),
            noise_multiplier=None,
            refresh_every=self.refresh_every or max(1, -(-typical.length // DEFAULT_REFRESHES)),
            norm_batch_size=min(self.norm_batch_size or DEFAULT_NORM_RECORDS, dataset_size),
        )
        if self.gate == NO_GATE:
            return settled._with_menu(typical, dataset_size)
        return settled._with_filter(typical, dataset_size)

    def _with_menu(self, typical: Plan, dataset_size: int) -> tuple[Self, AnyPlan]:
        """Offer rates from b / N upwards, each with noise of its own, that fit the budget."""
        assert self.refresh_every is not None
        update, count = typical.trial.update, typical.length
        assert isinstance(update, SampledGaussian)
        order = best_order(update, count, typical.budget.delta)
        rate = self.norm_rate(dataset_size)
        share = STEERING_SHARE * count / self.refreshes(count)
        noise = self.norm_noise_multiplier or as_costly(update, rate, order, share)
        plan = MenuPlan.for_budget(
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

    def _with_filter(self, typical: Plan, dataset_size: int) -> tuple[Self, AnyPlan]:
        """Fix the filter. The price of an update follows, and the noise when the rate is known."""
        count = typical.length
        plan = FilteredPlan.for_budget(
            typical.budget,
            typical.accounting,
            typical.trial,
            updates=typical.updates,
            trials=count,
            setup=typical.setup,
            on_reject=self.on_reject,
        )
        if self.norm_noise_multiplier is not None:
            return self, plan
        share = STEERING_SHARE * plan.allowance / self.refreshes(count)
        noise = plan.noise_for(self.norm_rate(dataset_size), share)
        return replace(self, norm_noise_multiplier=noise), plan

    def refreshes(self, count: int) -> int:
        """How often the norms are released, at most, in a run of so many updates or trials."""
        assert self.refresh_every is not None
        return -(-count // self.refresh_every)

    def norm_rate(self, dataset_size: int) -> float:
        """The rate at which a release of the norms looks at records."""
        assert self.norm_batch_size is not None
        return min(1.0, self.norm_batch_size / dataset_size)

    def _proposer(self, problem: Problem, plan: AnyPlan, streams: Streams) -> Procedure:
        assert self.batch_size is not None
        assert self.refresh_every is not None
        assert self.norm_noise_multiplier is not None
        norms = SampledGaussian(self.norm_rate(len(problem.train)), self.norm_noise_multiplier)
        assert isinstance(plan, MenuPlan | FilteredPlan)
        steering = Steering(
            self.batch_size,
            self.max_grad_norm,
            norms,
            self.refresh_every,
            plan.nearest
            if isinstance(plan, MenuPlan)
            else updates_at_a_price(plan, norms, self.refresh_every),
        )
        return ImportanceSteps(self, steering, problem, plan, streams)
