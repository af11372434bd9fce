"""DPAGD (Lee and Kifer 2018), reconstructed: step lengths chosen privately, noise that adapts."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dpsur import checks
from dpsur.core.choice import noisy_least
from dpsur.core.gradients import clipped_sum, draws_randomness
from dpsur.core.noise import add_gaussian
from dpsur.core.optim import Sgd
from dpsur.core.problem import Problem
from dpsur.core.sampling import exact_batch
from dpsur.core.streams import BATCH, LAYERS, NOISE, VAL_BATCH, VAL_NOISE, Streams
from dpsur.core.types import Candidate, Params, Procedure, State, Verdict
from dpsur.methods.base import Method, option, power_of_two_near
from dpsur.methods.noisy_steps import check_batch_size
from dpsur.privacy.events import Event, NoisyChoice, SampledGaussian, Step, Trial
from dpsur.privacy.filtered import AnyPlan, FilteredPlan
from dpsur.privacy.plan import Budget, Request, make_plan

DEFAULT_UPDATES = 200
# What the choices of step lengths take of the budget where nothing else is said.
CHOICE_SHARE = 0.2
# The largest step is adapted after this many updates, to this multiple of the largest chosen.
WINDOW, HEADROOM = 10, 1.1


@dataclass(frozen=True)
class Dpagd(Method):
    """Adaptive gradient descent under a privacy filter.

    A noisy clipped gradient is released, and a step length is chosen by the exponential mechanism
    among `step_sizes` candidates from 0 to `largest_step`, all evaluated from the same weights on
    one fresh sample. The length 0 means that the direction is too noisy: the gradient's budget is
    raised by `raise_by`, a fresh noisy gradient is averaged with the old by their precisions, and
    the choice is made again. Every trial is charged, whatever was chosen.

    Ours are: Poisson samples for gradients and choices, both charged as sampled mechanisms; a fresh
    sample for a retry, so that its charge stands alone; and the privacy filter.

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

    def __post_init__(self) -> None:
        for name in ("max_grad_norm", "loss_clip", "largest_step", "raise_by"):
            checks.positive(name, getattr(self, name))
        if self.choice_epsilon is not None:
            checks.positive("choice_epsilon", self.choice_epsilon)
        checks.at_least_one("step_sizes - 1", self.step_sizes - 1)
        for name in ("batch_size", "val_batch_size", "updates"):
            if getattr(self, name) is not None:
                checks.at_least_one(name, getattr(self, name))

    def settle(
        self,
        dataset_size: int,
        budget: Budget,
        accounting: str,
        setup: tuple[Event, ...] = (),
    ) -> tuple[Self, AnyPlan]:
        """Fix the filter and the first noise; the noise falls where progress stalls."""
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
        return AdaptiveSteps(self, problem, plan, streams)

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


class AdaptiveSteps:
    """DPAGD as a procedure. All it remembers is released, and so may steer what comes next."""

    def __init__(self, method: Dpagd, problem: Problem, plan: AnyPlan, streams: Streams) -> None:
        assert isinstance(plan, FilteredPlan)
        assert isinstance(plan.typical.update, SampledGaussian)
        assert isinstance(plan.typical.test, NoisyChoice)
        self.setup: tuple[Event, ...] = plan.setup
        self._method = method
        self._problem = problem
        self._streams = streams
        self._rate = plan.typical.update.sample_rate
        self._first_precision = plan.typical.update.noise_multiplier**-2
        self._choice = plan.typical.test
        self._optimizer = Sgd(momentum=0.0)
        self._random_layers = draws_randomness(problem.model, problem.train)

    def initial_state(self) -> State:
        """No gradient yet, and the steps and precision that were settled."""
        params = self._problem.initial_params()
        nothing = torch.zeros((), dtype=torch.float64, device=self._problem.device)
        memory = {
            "retry": nothing,
            "precision": nothing,  # of the gradient estimate, in units of 1 / noise_multiplier^2
            "wanted_precision": nothing + self._first_precision,
            "largest_step": nothing + self._method.largest_step,
            "largest_chosen": nothing,
            "chosen": nothing,
            **{f"gradient/{name}": torch.zeros_like(value) for name, value in params.items()},
        }
        updates = torch.zeros((), dtype=torch.int64, device=self._problem.device)
        return State(params, self._optimizer.init(params), updates, memory=memory)

    def step(self, state: State) -> Step:
        """A noisy gradient of the precision that is still wanted, and a choice."""
        noise = float(self._fresh_precision(_memory(state))) ** -0.5
        return Trial(SampledGaussian(self._rate, noise), self._choice)

    def propose(self, state: State, position: Tensor) -> Candidate:  # noqa: ARG002
        """Improve the gradient, choose a step length, and take the step."""
        memory = _memory(state)
        gradient, precision = self._improved_gradient(state, memory)
        lengths = torch.linspace(0, 1, self._method.step_sizes, dtype=torch.float64)
        lengths = lengths.to(self._problem.device) * memory["largest_step"]
        chosen = lengths[self._choose(state.params, gradient, lengths)]
        params, optimizer = self._optimizer.step(state.params, gradient, state.optimizer, chosen)
        after = {
            **self._adapted(memory, chosen, state.updates + 1),
            "retry": torch.zeros_like(precision),
            "precision": precision,
            "chosen": chosen,
            **{f"gradient/{name}": value for name, value in gradient.items()},
        }
        return Candidate(State(params, optimizer, state.updates + 1, memory=after))

    def judge(self, state: State, candidate: Candidate) -> Verdict:  # noqa: ARG002
        """Keep every step that has a length."""
        chosen = _memory(candidate.state)["chosen"]
        return Verdict(chosen > 0, {"step_length": chosen})

    def padded(self) -> None:
        """Noise changes during the run, which a captured trial cannot follow."""
        return

    def after_rejection(self, state: State, candidate: Candidate) -> State:
        """The same weights, the better gradient, and more precision wanted of it."""
        tried = _memory(candidate.state)
        wanted = _memory(state)["wanted_precision"] * (1 + self._method.raise_by)
        memory = {
            **_memory(state),
            "retry": torch.ones_like(wanted),
            "precision": tried["precision"],
            "wanted_precision": wanted,
            **{name: value for name, value in tried.items() if name.startswith("gradient/")},
        }
        return replace(state, memory=memory)

    def _fresh_precision(self, memory: Mapping[str, Tensor]) -> Tensor:
        held = memory["precision"] * memory["retry"]
        return memory["wanted_precision"] - held

    def _improved_gradient(
        self, state: State, memory: Mapping[str, Tensor]
    ) -> tuple[Params, Tensor]:
        """A fresh noisy gradient, averaged with the one at hand where this is a retry."""
        fresh_precision = self._fresh_precision(memory)
        fresh = self._noisy_gradient(state.params, float(fresh_precision) ** -0.5)
        held = memory["precision"] * memory["retry"]
        total = held + fresh_precision
        share = fresh_precision / total
        mixed = {
            name: share.to(value.dtype) * value
            + (1 - share).to(value.dtype) * memory[f"gradient/{name}"]
            for name, value in fresh.items()
        }
        return mixed, total

    def _noisy_gradient(self, params: Params, noise_multiplier: float) -> Params:
        train = self._problem.train
        batch = exact_batch(train, self._rate, self._streams[BATCH])
        layers = self._streams.global_randomness(LAYERS) if self._random_layers else nullcontext()
        with layers:
            total = clipped_sum(self._problem, params, batch.examples, self._method.max_grad_norm)
        noisy = add_gaussian(total, noise_multiplier, self._streams[NOISE])
        return {name: value / (self._rate * len(train)) for name, value in noisy.items()}

    def _choose(self, params: Params, gradient: Params, lengths: Tensor) -> Tensor:
        """The step length whose noisy clipped loss is least, on one fresh sample."""
        batch = exact_batch(
            self._problem.train, self._choice.sample_rate, self._streams[VAL_BATCH]
        ).examples
        candidates = (
            {
                name: value - length.to(value.dtype) * gradient[name]
                for name, value in params.items()
            }
            for length in lengths
        )
        losses = torch.stack([self._problem.losses(moved, batch) for moved in candidates])
        return noisy_least(
            losses, self._method.loss_clip, self._choice.choice_epsilon, self._streams[VAL_NOISE]
        )

    def _adapted(
        self, memory: Mapping[str, Tensor], chosen: Tensor, updates: Tensor
    ) -> dict[str, Tensor]:
        """Every so many updates the largest step follows what was chosen since the last time."""
        seen = torch.maximum(memory["largest_chosen"], chosen)
        due = updates % WINDOW == 0
        return {
            "wanted_precision": memory["wanted_precision"],
            "largest_step": torch.where(due, HEADROOM * seen, memory["largest_step"]),
            "largest_chosen": torch.where(due, torch.zeros_like(seen), seen),
        }


def _memory(state: State) -> Mapping[str, Tensor]:
    assert state.memory is not None
    return state.memory
