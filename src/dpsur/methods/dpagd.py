"""DPAGD (Lee and Kifer 2018), reconstructed: step lengths chosen privately, noise that adapts."""

import math
from dataclasses import dataclass, replace
from typing import Self

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.functional.problem import Problem
from dpsur.mechanism.state import Procedure
from dpsur.mechanism.streams import Streams
from dpsur.methods.adaptive_steps import AdaptiveSteps, Lengths
from dpsur.methods.base import Method, option, power_of_two_near
from dpsur.methods.noisy_steps import check_batch_size
from dpsur.methods.optimization import AVERAGE_HELP, make_average
from dpsur.privacy.accounting import check_covers_steering
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event, NoisyChoice, SampledGaussian, Trial
from dpsur.privacy.plans import AnyPlan, FilteredPlan
from dpsur.privacy.plans.request import Request, make_plan

DEFAULT_UPDATES = 200
# What the choices of step lengths take of the budget where nothing else is said.
CHOICE_SHARE = 0.2


@dataclass(frozen=True, repr=False)
class Dpagd(Method):
    """Adaptive gradient descent under a privacy filter.

    A noisy clipped gradient is released, and a step length is chosen by the exponential mechanism
    among `step_sizes` candidates from 0 to `largest_step`, all evaluated from the same weights on
    one fresh sample. The length 0 means that the direction is too noisy: the gradient's budget is
    raised by `raise_by`, a fresh noisy gradient is averaged with the old by their precisions, and
    the choice is made again. Every trial is charged, whatever was chosen.

    Ours are: Poisson samples for gradients and choices, both charged as sampled mechanisms; a fresh
    sample for a retry, so that its charge stands alone; the privacy filter; and an average of the
    weights, where one is asked for: lengths do not shrink towards the end.

    Formal guarantee of one trial: a sampled Gaussian for the gradient and a sampled exponential
    mechanism for the choice; the filter composes them (docs/privacy.md).
    """

    name = "dpagd"
    summary = "adaptive gradient descent (Lee, Kifer 2018, reconstructed): private step lengths"

    batch_size: int | None = option(
        None, "expected size of a Poisson training batch (default: near 8 times the root of N)"
    )
    max_grad_norm: float = option(0.1, "L2 norm to which each record's gradient is clipped")
    val_batch_size: int | None = option(
        None, "expected size of a Poisson batch for the choice (default: the training batch's)"
    )
    loss_clip: float = option(3.0, "clip bound of a record's loss in the choice")
    choice_epsilon: float | None = option(
        None, "epsilon of one choice, before sampling (default: choices take 20% of the budget)"
    )
    step_sizes: int = option(21, "step lengths to choose from, 0 among them")
    largest_step: float = option(20.0, "largest step length at the start")
    raise_by: float = option(0.1, "share by which a gradient's budget grows where no step helps")
    updates: int | None = option(
        None, f"updates that the first noise is chosen for (default: {DEFAULT_UPDATES})"
    )
    average_decay: float | None = option(None, AVERAGE_HELP)

    def __post_init__(self) -> None:
        for name in ("max_grad_norm", "loss_clip", "largest_step", "raise_by"):
            checks.positive(name, getattr(self, name))
        if self.choice_epsilon is not None:
            checks.positive("choice_epsilon", self.choice_epsilon)
        make_average(self.average_decay)
        checks.at_least_one_each(self, "step_sizes", "batch_size", "val_batch_size", "updates")
        if self.step_sizes < 2:
            raise InvalidInputError(
                f"step_sizes must be at least 2, one of them the length 0, got {self.step_sizes}"
            )

    def settle(
        self,
        dataset_size: int,
        budget: Budget,
        accounting: str,
        setup: tuple[Event, ...] = (),
    ) -> tuple[Self, AnyPlan]:
        """Fix the filter and the first noise; the noise falls where progress stalls."""
        check_covers_steering(accounting)
        settled = self._with_defaults(dataset_size)
        assert settled.updates is not None
        rate = settled._rate(dataset_size)
        request = Request(
            trial_with=lambda noise: Trial(SampledGaussian(rate, noise)),
            noise_multiplier=None,
            count=settled.updates,
            default_count=settled.updates,
            setup=setup,
        )
        guess = make_plan(request, budget, "every-trial").trial
        plan = FilteredPlan.for_budget(budget, accounting, guess, updates=None, setup=setup)
        price = plan.left_after_setup() / settled.updates
        settled = settled._with_choice(dataset_size, CHOICE_SHARE * price, plan.order)
        choice = settled._choice(dataset_size)
        noise = plan.noise_for(rate, price, choice)
        typical = Trial(SampledGaussian(rate, noise), choice)
        return settled, replace(plan, typical=typical)

    def bind(self, problem: Problem, plan: AnyPlan, streams: Streams) -> Procedure:
        """Tie the method to its data."""
        assert isinstance(plan, FilteredPlan)
        lengths = Lengths(
            count=self.step_sizes,
            largest=self.largest_step,
            loss_clip=self.loss_clip,
            max_grad_norm=self.max_grad_norm,
            raise_by=self.raise_by,
        )
        return AdaptiveSteps(lengths, problem, plan, streams, make_average(self.average_decay))

    def _with_defaults(self, dataset_size: int) -> Self:
        chosen = self.batch_size or min(power_of_two_near(8 * dataset_size**0.5), dataset_size)
        check_batch_size("batch_size", chosen, dataset_size)
        tested = self.val_batch_size or chosen
        check_batch_size("val_batch_size", tested, dataset_size)
        return replace(
            self,
            batch_size=chosen,
            val_batch_size=tested,
            updates=self.updates or DEFAULT_UPDATES,
        )

    def _rate(self, dataset_size: int) -> float:
        assert self.batch_size is not None
        return self.batch_size / dataset_size

    def _choice(self, dataset_size: int) -> NoisyChoice:
        assert self.val_batch_size is not None
        assert self.choice_epsilon is not None
        return NoisyChoice(self.val_batch_size / dataset_size, self.choice_epsilon)

    def _with_choice(self, dataset_size: int, price: float, order: float) -> Self:
        """Settle the epsilon of a choice at its price: a range of eta costs order * eta^2 / 8."""
        if self.choice_epsilon is not None:
            return self
        assert self.val_batch_size is not None
        widest = math.sqrt(8 * price / order)
        epsilon = math.log1p(math.expm1(widest) * dataset_size / self.val_batch_size)
        return replace(self, choice_epsilon=epsilon)
