"""DPAGD (Lee and Kifer 2018), reconstructed: step lengths chosen privately, noise that adapts."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.functional.problem import Problem
from dpsur.functional.tree import Params, elementwise
from dpsur.mechanism.gates import power_of_two_near
from dpsur.mechanism.gaussian import Batch, dp_mean_gradient
from dpsur.mechanism.proposer import SHAPES, Sampler, Sgd, WeightAverage, update_average
from dpsur.mechanism.state import Candidate, OptimizerState, Procedure, State, Verdict
from dpsur.mechanism.streams import BATCH, NOISE, VAL_BATCH, VAL_NOISE, Draws, Stream
from dpsur.methods.base import (
    AVERAGE_HELP,
    Method,
    check_batch_size,
)
from dpsur.options import GATES, OPTIMIZER, UPDATES, option
from dpsur.per_example.record_function import record_losses
from dpsur.privacy.accounting import check_covers_steering
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event, NoisyChoice, SampledGaussian, Step, Trial
from dpsur.privacy.plan import Plan
from dpsur.privacy.planning import Request, filtered_plan, make_plan
from reproduction.methods.menus import noise_for

DEFAULT_UPDATES = 1000
# The range of step lengths follows what was chosen, as in the original: after this many updates it
# ends at this multiple of the largest length that was chosen.
ADAPTIVE = "adaptive"
WINDOW, HEADROOM = 10, 1.1


@dataclass(frozen=True, repr=False)
class Dpagd(Method):
    """Adaptive gradient descent under a privacy filter.

    A noisy clipped gradient is released, and a step length is chosen by the exponential mechanism
    among `step_sizes` candidates from 0 to `largest_step`, all evaluated from the same weights on
    one fresh sample. The length 0 means that the direction is too noisy: the gradient's budget is
    raised by `raise_by`, a fresh noisy gradient is averaged with the old by their precisions, and
    the choice is repeated. Every trial is charged, whatever was chosen.

    Ours are: Poisson samples for gradients and choices, both charged as sampled mechanisms; a fresh
    sample for a retry, so that its charge stands alone; the privacy filter; momentum, which a trial
    of length 0 leaves as it was; a range of lengths that shrinks as the allowance is spent, where
    the original lets it follow what was chosen (`range_schedule` "adaptive"); and an average of the
    weights, where one is asked for. Momentum and range are computed from what was released and
    charged, so they cost nothing.

    Formal guarantee of one trial: a sampled Gaussian for the gradient and a sampled exponential
    mechanism for the choice; the filter composes them (README.md here).
    """

    name = "dpagd"
    summary = "adaptive gradient descent (Lee, Kifer 2018, reconstructed): private step lengths"

    batch_size: int | None = option(
        None,
        "expected size of a Poisson training batch (default: about 8 sqrt(N), a power of two)",
        group=UPDATES,
        common=True,
    )
    max_grad_norm: float = option(
        0.1,
        "L2 norm to which each record's gradient is clipped",
        group=UPDATES,
        common=True,
    )
    val_batch_size: int | None = option(
        None,
        "expected size of a Poisson batch for the choice (default: the training batch's)",
        group=GATES,
    )
    loss_clip: float = option(
        3.0,
        "clip bound of a record's loss in the choice",
        group=GATES,
    )
    choice_epsilon: float | None = option(
        None,
        "epsilon of one choice, before sampling (default: what choice_share pays for)",
        group="method dpagd",
    )
    choice_share: float = option(
        0.1,
        "share of the budget that choices of step lengths take",
        group="method dpagd",
    )
    momentum: float = option(
        0.9,
        "momentum of the direction along which steps are taken",
        group=OPTIMIZER,
    )
    step_sizes: int = option(
        21,
        "step lengths to choose from, 0 among them",
        group="method dpagd",
    )
    largest_step: float = option(
        10.0,
        "largest step length at the start",
        group="method dpagd",
    )
    range_schedule: str = option(
        "linear",
        "how the largest step length changes: by a schedule over the run, or adaptive, which makes "
        "it 1.1 times the largest of ten choices",
        (ADAPTIVE, *SHAPES),
        group="method dpagd",
    )
    range_end: float = option(
        0.2,
        "largest step length at the end of a schedule, as a share of that at the start",
        group="method dpagd",
    )
    raise_by: float = option(
        0.1,
        "share by which a gradient's budget grows where no step helps",
        group="method dpagd",
    )
    updates: int | None = option(
        None,
        f"updates that the first noise is chosen for (default: {DEFAULT_UPDATES})",
        group=UPDATES,
        common=True,
    )
    average_decay: float | None = option(
        None,
        AVERAGE_HELP,
        group=OPTIMIZER,
    )

    def __post_init__(self) -> None:
        for name in ("max_grad_norm", "loss_clip", "largest_step", "raise_by"):
            checks.positive(name, getattr(self, name))
        if self.choice_epsilon is not None:
            checks.positive("choice_epsilon", self.choice_epsilon)
        checks.positive("choice_share", self.choice_share)
        checks.fraction_below_one("choice_share", self.choice_share)
        checks.fraction_below_one("momentum", self.momentum)
        checks.one_of("range_schedule", self.range_schedule, (ADAPTIVE, *SHAPES))
        checks.sample_rate("range_end", self.range_end)
        self._average()
        checks.at_least_one_each(self, "step_sizes", "batch_size", "val_batch_size", "updates")
        if self.step_sizes < 2:
            raise InvalidInputError(
                f"step_sizes must be at least 2, one of them the length 0, got {self.step_sizes}"
            )

    def resolve(
        self,
        dataset_size: int,
        budget: Budget,
        accounting: str,
        setup: tuple[Event, ...] = (),
    ) -> tuple[Self, Plan]:
        """Fix the filter and the first noise; the noise falls where progress stalls."""
        check_covers_steering(accounting)
        settled = self._with_defaults(dataset_size)
        assert settled.updates is not None
        rate = settled._rate(dataset_size)
        request = Request(
            trial_with=lambda noise: Trial(SampledGaussian(rate, noise)),
            noise_multiplier=None,
            count=settled.updates,
            setup=setup,
        )
        guess = make_plan(request, budget, "every-trial").typical
        plan = filtered_plan(budget, accounting, guess, updates=None, setup=setup)
        assert plan.filter is not None
        price = plan.left_after_setup() / settled.updates
        share = settled.choice_share * price
        settled = settled._with_choice(dataset_size, share, plan.filter.order)
        choice = settled._choice(dataset_size)
        noise = noise_for(plan, rate, price, choice)
        typical = Trial(SampledGaussian(rate, noise), choice)
        return settled, replace(plan, phases=(replace(plan.phases[0], step=typical),))

    def build(self, problem: Problem, plan: Plan) -> Procedure:
        """Tie the method to its data."""
        lengths = Lengths(
            count=self.step_sizes,
            largest=self.largest_step,
            loss_clip=self.loss_clip,
            max_grad_norm=self.max_grad_norm,
            raise_by=self.raise_by,
            schedule=self.range_schedule,
            end=self.range_end,
            momentum=self.momentum,
        )
        return AdaptiveSteps(lengths, Sampler(problem), plan, self._average())

    def _average(self) -> WeightAverage | None:
        return None if self.average_decay is None else WeightAverage(self.average_decay)

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


@dataclass(frozen=True)
class Lengths:
    """Step lengths to choose from, and how choices and gradients are bounded."""

    count: int
    largest: float
    loss_clip: float
    max_grad_norm: float
    raise_by: float
    schedule: str = ADAPTIVE
    end: float = 1.0
    momentum: float = 0.0


class AdaptiveSteps:
    """DPAGD as a procedure. All it remembers is released, and so may steer what comes next."""

    def __init__(
        self,
        lengths: Lengths,
        sampler: Sampler,
        plan: Plan,
        average: WeightAverage | None = None,
    ) -> None:
        assert isinstance(plan.typical.update, SampledGaussian)
        assert isinstance(plan.typical.test, NoisyChoice)
        self._sampler, self._problem = sampler, sampler.problem
        self.setup: tuple[Event, ...] = plan.setup
        self._lengths = lengths
        self._rate = plan.typical.update.sample_rate
        self._first_precision = plan.typical.update.noise_multiplier**-2
        self._choice = plan.typical.test
        self._optimizer = Sgd(lengths.momentum)
        self._length = plan.length
        self._average = average

    def initial_state(self) -> State:
        """No gradient yet, and the steps and precision that were settled."""
        params = self._problem.initial_params()
        nothing = torch.zeros((), dtype=torch.float64, device=self._problem.device)
        memory = {
            "retry": nothing,
            "precision": nothing,  # of the gradient estimate, in units of 1 / noise_multiplier^2
            "wanted_precision": nothing + self._first_precision,
            "largest_step": nothing + self._lengths.largest,
            "largest_chosen": nothing,
            "chosen": nothing,
            **{f"gradient/{name}": torch.zeros_like(value) for name, value in params.items()},
        }
        updates = torch.zeros((), dtype=torch.int64, device=self._problem.device)
        average = None if self._average is None else params
        return State(params, self._optimizer.init(params), updates, average, memory)

    def step(self, state: State) -> Step:
        """A noisy gradient of the precision that is still wanted, and a choice."""
        noise = float(self._fresh_noise(_memory(state)))
        return Trial(SampledGaussian(self._rate, noise), self._choice)

    def propose(self, state: State, draws: Draws, position: Tensor) -> Candidate:
        """Improve the gradient, choose a step length, and take the step."""
        memory = _memory(state)
        batch = self._sampler.batch(self._rate, draws, BATCH)
        gradient, precision = self._improved_gradient(state, memory, batch, draws)
        shares = torch.linspace(
            0, 1, self._lengths.count, dtype=torch.float64, device=self._problem.device
        )
        lengths = shares * self._largest(memory, position)
        sample = self._sampler.batch(self._choice.sample_rate, draws, VAL_BATCH)
        direction = self._direction(state.optimizer, gradient)
        row = self._choose(state.params, direction, lengths, sample, draws)
        chosen = torch.take(lengths, row)
        params, optimizer = self._optimizer.step(state.params, gradient, state.optimizer, chosen)
        after = {
            **self._adapted(memory, chosen, state.updates + 1),
            "retry": torch.zeros_like(precision),
            "precision": precision,
            "chosen": chosen,
            **{f"gradient/{name}": value for name, value in gradient.items()},
        }
        updates = state.updates + 1
        average = update_average(self._average, state.average, params, updates)
        return Candidate(State(params, optimizer, updates, average, after))

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:  # noqa: ARG002
        """Keep every step that has a length."""
        chosen = _memory(candidate.state)["chosen"]
        return Verdict(chosen > 0, {"step_length": chosen})

    def padded(self) -> "AdaptiveSteps | None":
        sampler = self._sampler.padded()
        if sampler is None:
            return None
        copied = copy.copy(self)
        copied._sampler = sampler
        return copied

    def after_rejection(self, state: State, candidate: Candidate) -> State:
        """The same weights and momentum, the better gradient, and more precision wanted of it."""
        tried = _memory(candidate.state)
        wanted = _memory(state)["wanted_precision"] * (1 + self._lengths.raise_by)
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

    def _fresh_noise(self, memory: Mapping[str, Tensor]) -> Tensor:
        """The noise multiplier of the next gradient, which stays on the device."""
        return self._fresh_precision(memory).rsqrt()

    def _improved_gradient(
        self, state: State, memory: Mapping[str, Tensor], batch: Batch, draws: Draws
    ) -> tuple[Params, Tensor]:
        """A fresh noisy gradient, averaged with the one at hand where this is a retry."""
        fresh = self._noisy_gradient(state.params, batch, self._fresh_noise(memory), draws)
        fresh_precision = self._fresh_precision(memory)
        total = memory["precision"] * memory["retry"] + fresh_precision
        share = fresh_precision / total
        mixed = elementwise(
            lambda new, old: share.to(new.dtype) * new + (1 - share).to(new.dtype) * old,
            fresh,
            {name: memory[f"gradient/{name}"] for name in fresh},
        )
        return mixed, total

    def _noisy_gradient(
        self, params: Params, batch: Batch, noise_multiplier: Tensor, draws: Draws
    ) -> Params:
        with self._sampler.layer_randomness(draws):
            return dp_mean_gradient(
                self._problem,
                params,
                batch,
                self._rate,
                noise_multiplier,
                self._lengths.max_grad_norm,
                draws[NOISE],
            )

    def _largest(self, memory: Mapping[str, Tensor], position: Tensor) -> Tensor:
        """Where the range of step lengths ends: by what was chosen, or by the position."""
        if self._lengths.schedule == ADAPTIVE:
            return memory["largest_step"]
        shape, end = SHAPES[self._lengths.schedule], self._lengths.end
        return self._lengths.largest * (end + (1 - end) * shape(position.double() / self._length))

    def _direction(self, optimizer: OptimizerState, gradient: Params) -> Params:
        """The velocity with which the optimizer will move, one step length being as good as any."""
        return elementwise(
            lambda before, new: torch.add(new, before, alpha=self._lengths.momentum),
            optimizer.buffers["velocity"],
            gradient,
        )

    def _choose(
        self, params: Params, direction: Params, lengths: Tensor, sample: Batch, draws: Draws
    ) -> Tensor:
        """Which step length has the least noisy clipped loss on a fresh sample."""

        def moved(length: Tensor) -> Params:
            return elementwise(
                lambda value, by: torch.addcmul(value, by, length.to(value.dtype), value=-1),
                params,
                direction,
            )

        losses = torch.zeros(len(lengths), 0, device=lengths.device)
        if len(sample):
            each = [
                record_losses(self._problem, moved(by), sample.examples) for by in lengths.unbind()
            ]
            losses = torch.stack(each)
        if sample.mask is not None:
            losses = torch.where(sample.mask, losses, 0.0)
        return exponential_mechanism(
            losses, self._lengths.loss_clip, self._choice.choice_epsilon, draws[VAL_NOISE]
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


def exponential_mechanism(
    losses: Tensor, loss_clip: float, choice_epsilon: float, stream: Stream
) -> Tensor:
    """Row of `losses` (candidates by records) whose noisy clipped sum, over all ranks, is least.

    Formal guarantee: the exponential mechanism on sums of values in [0, loss_clip], an event
    `NoisyChoice` with this epsilon: a row is chosen with probability in proportion to
    exp(-choice_epsilon * sum / loss_clip). A loss that is not finite counts as the clip bound.
    """
    checks.positive("loss_clip", loss_clip)
    checks.positive("choice_epsilon", choice_epsilon)
    worst = torch.full((), loss_clip, dtype=torch.float64, device=losses.device)
    clipped = torch.where(losses.isfinite(), losses.double().clamp(0.0, loss_clip), worst)
    draws = stream.uniform(len(losses))
    # The largest of scores plus Gumbel noise is distributed as the exponential mechanism.
    gumbel = -torch.log(-torch.log(draws.clamp(min=torch.finfo(torch.float64).tiny)))
    scores = -choice_epsilon / loss_clip * stream.ranks.sum(clipped.sum(1))
    return (scores + gumbel).argmax()
