"""Candidates that are one optimizer step along a gradient (Algorithm 1, lines 3 to 8).

`GradientProposer` turns a gradient into a candidate state. Where the gradient comes from is a
`GradientSource`: `DpGradient` is the noisy sum of clipped gradients that DP-SGD takes.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from dpsur.functional.parameters import Params, elementwise, from_vector, parts, to_vector
from dpsur.functional.problem import Problem
from dpsur.mechanism.dp_gradient import dp_mean_gradient
from dpsur.mechanism.optim import Optimizer, WeightAverage, update_average
from dpsur.mechanism.sampling import Batch, padded_batch, padded_sizes, steady_batch
from dpsur.mechanism.state import Candidate, OptimizerState, State
from dpsur.mechanism.streams import BATCH, LAYERS, NOISE, Draws, Streams
from dpsur.per_example import draws_randomness
from dpsur.privacy.events import SampledGaussian, Step, Trial


@dataclass(frozen=True)
class Sampler:
    """Poisson batches of the training records, exact or padded to a static shape."""

    problem: Problem
    pad: bool = False
    random_layers: bool | None = None  # such as dropout; None: to be found out

    def __post_init__(self) -> None:
        if self.random_layers is None:  # found out once, while the model has its weights
            found = self.problem.augment is not None or draws_randomness(
                self.problem.model, self.problem.train
            )
            object.__setattr__(self, "random_layers", found)

    def batch(self, sample_rate: float, draws: Draws, purpose: str = BATCH) -> Batch:
        """A Poisson sample at this rate."""
        draw = padded_batch if self.pad else steady_batch
        return draw(self.problem.train, sample_rate, draws[purpose])

    def padded(self) -> "Sampler | None":
        """The same on padded batches; not for layers that draw random numbers."""
        return None if self.random_layers else replace(self, pad=True)

    def layer_randomness(self, draws: Draws) -> AbstractContextManager[None]:
        """Where layers such as dropout get their random numbers from."""
        return draws.global_randomness(LAYERS) if self.random_layers else nullcontext()


class GradientSource(Protocol):
    """Where the gradient of a candidate comes from."""

    def step(self, state: State) -> Step:
        """The event of the next gradient."""
        ...

    def gradient(self, state: State, draws: Draws) -> tuple[Params, Tensor | None]:
        """A gradient, and whether a padded batch overflowed."""
        ...

    def padded(self) -> "GradientSource | None":
        """The same on padded batches, or None."""
        ...


class BlockSource(GradientSource, Protocol):
    """A source that a gate over blocks can use: clipping norms change, and blocks start anew."""

    @property
    def sampler(self) -> "Sampler":
        """Where batches come from."""
        ...

    def with_clip_norm(self, max_grad_norm: Tensor) -> "BlockSource":
        """The same with another clipping norm, and noise in proportion to it."""
        ...

    def initial_memory(self, state: State) -> Mapping[str, Tensor]:
        """What the source notes, before the first step."""
        ...

    def restarted(self, memory: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What the source has noted, at the start of a block."""
        ...

    def released(self, state: State, draws: Draws) -> State:
        """The state after a step that is no update, where `step` says that one is due."""
        ...

    def event(self, state: State) -> SampledGaussian:
        """The sampled Gaussian of the last or the next update."""
        ...


@dataclass(frozen=True)
class DpGradient:
    """The noisy sum of clipped gradients of a Poisson batch, over its expected size.

    Formal guarantee of one gradient: the sampled Gaussian mechanism `update`.
    """

    sampler: Sampler
    update: SampledGaussian
    max_grad_norm: float | Tensor

    def step(self, state: State) -> Step:  # noqa: ARG002
        """The same event every time."""
        return Trial(self.update)

    def gradient(self, state: State, draws: Draws) -> tuple[Params, Tensor | None]:
        """Sample, clip, add noise, divide by the expected size."""
        batch = self.sampler.batch(self.update.sample_rate, draws)
        with self.sampler.layer_randomness(draws):
            gradient = dp_mean_gradient(
                self.sampler.problem,
                state.params,
                batch,
                self.update.sample_rate,
                self.update.noise_multiplier,
                self.max_grad_norm,
                draws[NOISE],
            )
        return gradient, batch.overflow

    def with_clip_norm(self, max_grad_norm: Tensor) -> "DpGradient":
        """The same with another clipping norm."""
        return replace(self, max_grad_norm=max_grad_norm)

    def initial_memory(self, state: State) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Nothing is noted."""
        return {}

    def restarted(self, memory: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Nothing is noted."""
        return memory

    def released(self, state: State, draws: Draws) -> State:  # noqa: ARG002
        """Never asked for: every step is an update."""
        return state

    def event(self, state: State) -> SampledGaussian:  # noqa: ARG002
        """The same every time."""
        return self.update

    @property
    def rooms(self) -> tuple[int, ...]:
        """Sizes of padded batches, by level."""
        return padded_sizes(len(self.sampler.problem.train), self.update.sample_rate)

    def batch_sizes(self, streams: Streams, steps: range) -> list[int]:
        """How many records the batches of some steps have."""
        size, rate = len(self.sampler.problem.train), self.update.sample_rate
        return streams.counts_below(rate, size, BATCH, steps)

    def padded(self) -> "DpGradient | None":
        """The same on padded batches."""
        sampler = self.sampler.padded()
        return None if sampler is None else replace(self, sampler=sampler)


# Numbers that an update in place works on at a time, by kind of device. What fits a CPU's caches is
# faster there; on a GPU a part has to be large enough to keep it busy.
_AT_ONCE = {"cpu": 2**18}
_AT_ONCE_ELSEWHERE = 2**21


@dataclass(frozen=True)
class GradientProposer:
    """A candidate is one optimizer step along a gradient."""

    problem: Problem
    source: GradientSource
    optimizer: Optimizer
    schedule: Callable[[Tensor], Tensor]
    average: WeightAverage | None = None

    def step(self, state: State) -> Step:
        """The event of the gradient."""
        return self.source.step(state)

    def initial_state(self) -> State:
        """The model's own weights, and optimizer buffers at rest."""
        params = self.problem.initial_params()
        return State(
            params=params,
            optimizer=self.optimizer.init(params),
            updates=torch.zeros((), dtype=torch.int64, device=self.problem.device),
            average=None if self.average is None else elementwise(torch.clone, params),
        )

    def propose(self, state: State, draws: Draws, position: Tensor) -> Candidate:
        """Take one step from the state."""
        gradient, overflow = self.source.gradient(state, draws)
        params, optimizer = self.optimizer.step(
            state.params, gradient, state.optimizer, self.schedule(position)
        )
        updates = state.updates + 1
        average = update_average(self.average, state.average, params, updates)
        after = replace(state, params=params, optimizer=optimizer, updates=updates, average=average)
        return Candidate(after, overflow)

    def update_in_place(
        self, state: State, draws: Draws, position: Tensor, active: Tensor | None
    ) -> Tensor | None:
        """Take the same step, written into the state itself, with the same bits.

        For candidates that are always kept: there is no second copy of weights and buffers. Where
        `active` is False the state stays as it is. Returns whether a padded batch overflowed.
        Whoever calls this must not use the state if it fails: it may be half updated.
        """
        gradient, overflow = self.source.gradient(state, draws)
        rate, updates = self.schedule(position), state.updates + 1
        most = _AT_ONCE.get(state.updates.device.type, _AT_ONCE_ELSEWHERE)
        small = sum(value.numel() for value in gradient.values()) <= most
        if small and len({value.dtype for value in gradient.values()}) == 1:
            gradient = from_vector(to_vector(gradient, state.params), state.params)
        buffers, average = state.optimizer.buffers, state.average
        together = [state.params, gradient, *buffers.values()]
        together += [] if average is None else [average]
        step = state.optimizer.step
        for params, slope, *others in parts(*together, most=most):
            held = {name: {"": value} for name, value in zip(buffers, others, strict=False)}
            moved, optimizer = self.optimizer.step(
                {"": params}, {"": slope}, OptimizerState(step, held), rate
            )
            if average is not None:
                after = update_average(self.average, {"": others[-1]}, moved, updates)
                _write(others[-1], others[-1] if after is None else after[""], active)
            _write(params, moved[""], active)
            for name, buffer in held.items():
                _write(buffer[""], optimizer.buffers[name][""], active)
        _write(step, step + 1, active)
        _write(state.updates, updates, active)
        return overflow

    def padded(self) -> "GradientProposer | None":
        """The same on padded batches."""
        source = self.source.padded()
        return None if source is None else replace(self, source=source)


def _write(place: Tensor, new: Tensor, active: Tensor | None) -> None:
    """Put new values in place, where that is asked for."""
    if active is None:
        place.copy_(new)
    else:
        torch.where(active, new, place, out=place)
