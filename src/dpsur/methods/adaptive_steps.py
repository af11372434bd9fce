"""DPAGD as a procedure: a better gradient where none helps, and a step length chosen privately."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpsur.functional.parameters import Params, elementwise
from dpsur.functional.problem import Problem
from dpsur.mechanism.dp_gradient import noisy_mean_gradient
from dpsur.mechanism.optim import Sgd, WeightAverage, followed
from dpsur.mechanism.sampling import Batch
from dpsur.mechanism.state import Candidate, State, Verdict
from dpsur.mechanism.streams import BATCH, NOISE, VAL_BATCH, VAL_NOISE, Streams
from dpsur.methods.draws import Draws
from dpsur.methods.exponential_mechanism import noisy_least
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


class AdaptiveSteps(Draws):
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
        super().__init__(problem, streams)
        self.setup: tuple[Event, ...] = plan.setup
        self._lengths = lengths
        self._rate = plan.typical.update.sample_rate
        self._first_precision = plan.typical.update.noise_multiplier**-2
        self._choice = plan.typical.test
        self._optimizer = Sgd(momentum=0.0)
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

    def propose(self, state: State, position: Tensor) -> Candidate:  # noqa: ARG002
        """Improve the gradient, choose a step length, and take the step."""
        memory, train = _memory(state), self._problem.train
        batch = self._draw(train, self._rate, self._streams[BATCH])
        gradient, precision = self._improved_gradient(state, memory, batch)
        shares = torch.linspace(
            0, 1, self._lengths.count, dtype=torch.float64, device=self._problem.device
        )
        lengths = shares * memory["largest_step"]
        sample = self._draw(train, self._choice.sample_rate, self._streams[VAL_BATCH])
        chosen = torch.take(lengths, self._choose(state.params, gradient, lengths, sample))
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
        overflow = _either(batch.overflow, sample.overflow)
        return Candidate(State(params, optimizer, updates, average, after), overflow)

    def judge(self, state: State, candidate: Candidate) -> Verdict:  # noqa: ARG002
        """Keep every step that has a length."""
        chosen = _memory(candidate.state)["chosen"]
        return Verdict(chosen > 0, {"step_length": chosen})

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

    def _fresh_noise(self, memory: Mapping[str, Tensor]) -> Tensor:
        """The noise multiplier of the next gradient, which stays on the device."""
        return self._fresh_precision(memory).rsqrt()

    def _improved_gradient(
        self, state: State, memory: Mapping[str, Tensor], batch: Batch
    ) -> tuple[Params, Tensor]:
        """A fresh noisy gradient, averaged with the one at hand where this is a retry."""
        fresh = self._noisy_gradient(state.params, batch, self._fresh_noise(memory))
        fresh_precision = self._fresh_precision(memory)
        total = memory["precision"] * memory["retry"] + fresh_precision
        share = fresh_precision / total
        mixed = elementwise(
            lambda new, old: share.to(new.dtype) * new + (1 - share).to(new.dtype) * old,
            fresh,
            {name: memory[f"gradient/{name}"] for name in fresh},
        )
        return mixed, total

    def _noisy_gradient(self, params: Params, batch: Batch, noise_multiplier: Tensor) -> Params:
        with self._layer_randomness():
            return noisy_mean_gradient(
                self._problem,
                params,
                batch,
                self._rate,
                noise_multiplier,
                self._lengths.max_grad_norm,
                self._streams[NOISE],
            )

    def _choose(self, params: Params, gradient: Params, lengths: Tensor, sample: Batch) -> Tensor:
        """Which step length has the least noisy clipped loss on a fresh sample."""

        def moved(length: Tensor) -> Params:
            return elementwise(
                lambda value, by: torch.addcmul(value, by, length.to(value.dtype), value=-1),
                params,
                gradient,
            )

        losses = torch.stack(
            [self._problem.losses(moved(length), sample.examples) for length in lengths.unbind()]
        )
        if sample.mask is not None:
            losses = torch.where(sample.mask, losses, 0.0)
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


def _either(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Whether one of two batches had no room; None where both have room for any."""
    if one is None or other is None:
        return one if other is None else other
    return one | other


def _memory(state: State) -> Mapping[str, Tensor]:
    assert state.memory is not None
    return state.memory
