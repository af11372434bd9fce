"""DPAGD as a procedure: a better gradient where none helps, and a step length chosen privately."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpsur.core.averaging import WeightAverage, followed
from dpsur.core.choice import noisy_least
from dpsur.core.gradients import draws_randomness
from dpsur.core.noisy_mean import noisy_mean_gradient
from dpsur.core.optim import Sgd
from dpsur.core.problem import Problem
from dpsur.core.sampling import steady_batch
from dpsur.core.streams import BATCH, LAYERS, NOISE, VAL_BATCH, VAL_NOISE, Streams
from dpsur.core.types import Candidate, Params, State, Verdict
from dpsur.privacy.events import Event, NoisyChoice, SampledGaussian, Step, Trial
from dpsur.privacy.plans import FilteredPlan

# The largest step is adapted after this many updates, to this multiple of the largest chosen.
WINDOW, HEADROOM = 10, 1.1


@dataclass(frozen=True)
class Lengths:
    """Step lengths to choose from, and how choices and gradients are bounded."""

    count: int
    largest: float
    loss_clip: float
    max_grad_norm: float
    raise_by: float


class AdaptiveSteps:
    """DPAGD as a procedure. All it remembers is released, and so may steer what comes next."""

    def __init__(
        self,
        lengths: Lengths,
        problem: Problem,
        plan: FilteredPlan,
        streams: Streams,
        average: WeightAverage | None = None,
    ) -> None:
        assert isinstance(plan.typical.update, SampledGaussian)
        assert isinstance(plan.typical.test, NoisyChoice)
        self.setup: tuple[Event, ...] = plan.setup
        self._lengths = lengths
        self._problem = problem
        self._streams = streams
        self._rate = plan.typical.update.sample_rate
        self._first_precision = plan.typical.update.noise_multiplier**-2
        self._choice = plan.typical.test
        self._optimizer = Sgd(momentum=0.0)
        self._average = average
        self._random_layers = draws_randomness(problem.model, problem.train)

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
        noise = float(self._fresh_precision(_memory(state))) ** -0.5
        return Trial(SampledGaussian(self._rate, noise), self._choice)

    def propose(self, state: State, position: Tensor) -> Candidate:  # noqa: ARG002
        """Improve the gradient, choose a step length, and take the step."""
        memory = _memory(state)
        gradient, precision = self._improved_gradient(state, memory)
        lengths = torch.linspace(0, 1, self._lengths.count, dtype=torch.float64)
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
        updates = state.updates + 1
        average = followed(self._average, state.average, params, updates)
        return Candidate(State(params, optimizer, updates, average, after))

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
        batch = steady_batch(self._problem.train, self._rate, self._streams[BATCH])
        layers = self._streams.global_randomness(LAYERS) if self._random_layers else nullcontext()
        with layers:
            return noisy_mean_gradient(
                self._problem,
                params,
                batch,
                SampledGaussian(self._rate, noise_multiplier),
                self._lengths.max_grad_norm,
                self._streams[NOISE],
            )

    def _choose(self, params: Params, gradient: Params, lengths: Tensor) -> Tensor:
        """The step length whose noisy clipped loss is least, on one fresh sample."""
        batch = steady_batch(
            self._problem.train, self._choice.sample_rate, self._streams[VAL_BATCH]
        )
        candidates = (
            {
                name: value - length.to(value.dtype) * gradient[name]
                for name, value in params.items()
            }
            for length in lengths
        )
        losses = torch.stack([self._problem.losses(moved, batch.examples) for moved in candidates])
        if batch.mask is not None:
            losses = torch.where(batch.mask, losses, 0.0)
        return noisy_least(
            losses, self._lengths.loss_clip, self._choice.choice_epsilon, self._streams[VAL_NOISE]
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
