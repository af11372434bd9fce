"""What all methods share whose updates come from noisy sums of clipped gradients."""

from dataclasses import dataclass, replace
from typing import Self

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.methods.base import option, power_of_two_near
from dpsur.methods.optimization import Optimization
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event, SampledGaussian, Trial
from dpsur.privacy.plans import AnyPlan, Plan
from dpsur.privacy.plans.request import Request, make_plan

DEFAULT_EPOCHS = 20


@dataclass(frozen=True, repr=False)
class NoisySteps(Optimization):
    """Batches, clipping and noise, and how they are settled against a budget.

    Formal guarantee of one step: a sampled Gaussian mechanism at rate batch_size / N.
    """

    batch_size: int | None = option(
        None, "expected size of a Poisson training batch (default: near 8 times the root of N)"
    )
    max_grad_norm: float = option(0.1, "L2 norm to which each record's gradient is clipped")
    noise_multiplier: float | None = option(
        None, "noise relative to the clip norm (default: calibrated to the budget)"
    )
    updates: int | None = option(
        None, "updates to make (default: what the budget allows at the noise given, else 20 epochs)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive("max_grad_norm", self.max_grad_norm)
        if self.noise_multiplier is not None:
            checks.positive("noise_multiplier", self.noise_multiplier)
        checks.at_least_one_each(self, "batch_size", "updates")

    def settle(
        self,
        dataset_size: int,
        budget: Budget,
        accounting: str,
        setup: tuple[Event, ...] = (),
    ) -> tuple[Self, AnyPlan]:
        """Choose what was left open, then noise and length against the budget."""
        settled = self._with_defaults(dataset_size, budget, accounting)
        request = replace(settled._request(dataset_size, accounting), setup=setup)
        plan = make_plan(request, budget, accounting)
        return settled._with_plan(plan), plan

    def _with_defaults(self, dataset_size: int, budget: Budget, accounting: str) -> Self:  # noqa: ARG002
        if self.batch_size is None:
            chosen = min(power_of_two_near(8 * dataset_size**0.5), dataset_size)
            return replace(self, batch_size=chosen)
        check_batch_size("batch_size", self.batch_size, dataset_size)
        return self

    def _request(self, dataset_size: int, accounting: str) -> Request:  # noqa: ARG002
        return Request(
            trial_with=lambda noise: self._trial(dataset_size, noise),
            noise_multiplier=self.noise_multiplier,
            count=self.updates,
            default_count=self._default_count(dataset_size),
        )

    def _default_count(self, dataset_size: int) -> int:
        assert self.batch_size is not None
        return max(1, round(DEFAULT_EPOCHS * dataset_size / self.batch_size))

    def _trial(self, dataset_size: int, noise_multiplier: float) -> Trial:
        assert self.batch_size is not None
        return Trial(SampledGaussian(self.batch_size / dataset_size, noise_multiplier))

    def _with_plan(self, plan: Plan) -> Self:
        assert isinstance(plan.trial.update, SampledGaussian)
        return replace(
            self, noise_multiplier=plan.trial.update.noise_multiplier, updates=plan.length
        )


def check_batch_size(name: str, value: int, dataset_size: int) -> None:
    """Refuse a batch larger than the data set."""
    if value > dataset_size:
        raise InvalidInputError(
            f"{name} {value} is larger than the data set of {dataset_size} records, a sample rate "
            f"of {value / dataset_size:.3g}; choose at most {dataset_size}"
        )
