"""Candidates that are one optimizer step along a gradient (Algorithm 1, lines 3 to 8).

`GradientProposer` turns a gradient into a candidate state. Where the gradient comes from is a
`GradientSource`: `DpGradient` is the noisy sum of clipped gradients that DP-SGD takes.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from dpsur.functional.problem import Problem
from dpsur.functional.tree import Params, elementwise, from_vector, parts, to_vector
from dpsur.mechanism.gaussian import dp_mean_gradient
from dpsur.mechanism.optim import Optimizer, WeightAverage, update_average
from dpsur.mechanism.sampling import Batch, padded_batch, padded_sizes, steady_batch
from dpsur.mechanism.state import START, Candidate, OptimizerState, State
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


class GradientSource:
    """Where the gradient of a candidate comes from.

    A source whose steps are all updates states `step`, `event` and `gradient`. The other methods
    are for sources that are steered by figures which they release now and then (DPIS).
    """

    def step(self, state: State) -> Step:
        """The event of the next gradient, or of a figure that is to be released before it."""
        return Trial(self.event(state))

    def event(self, state: State) -> SampledGaussian:
        """The sampled Gaussian of the last or the next update."""
        raise NotImplementedError

    def gradient(self, state: State, draws: Draws) -> tuple[Params, Tensor | None]:
        """A gradient, and whether a padded batch overflowed."""
        raise NotImplementedError

    def with_clip_norm(self, max_grad_norm: Tensor) -> Self:  # noqa: ARG002
        """The same with another clipping norm, and noise in proportion to it."""
        return self

    def padded(self) -> Self | None:
        """The same on padded batches, or None."""
        return None

    def initial_memory(self, state: State) -> Mapping[str, Tensor]:  # noqa: ARG002
        """What the source remembers, before the first step."""
        return {}

    def restarted(self, memory: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What it remembers where training starts from the first weights again."""
        return memory

    def released(self, state: State, draws: Draws) -> State:  # noqa: ARG002
        """The state after a step that is no update, where `step` says that one is due."""
        return state


@dataclass(frozen=True)
class DpGradient(GradientSource):
    """The noisy sum of clipped gradients of a Poisson batch, over its expected size.

    Formal guarantee of one gradient: the sampled Gaussian mechanism `update`.
    """

    sampler: Sampler
    update: SampledGaussian
    max_grad_norm: float | Tensor

    def event(self, state: State) -> SampledGaussian:  # noqa: ARG002
        """The same every time."""
        return self.update

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

    def with_clip_norm(self, max_grad_norm: Tensor) -> Self:
        """The same with another clipping norm."""
        return replace(self, max_grad_norm=max_grad_norm)

    @property
    def padded_batch_sizes(self) -> tuple[int, ...]:
        """Sizes of padded batches, by level."""
        return padded_sizes(len(self.sampler.problem.train), self.update.sample_rate)

    def batch_sizes(self, streams: Streams, steps: range) -> list[int]:
        """How many records the batches of some steps have."""
        size, rate = len(self.sampler.problem.train), self.update.sample_rate
        return streams.counts_below(rate, size, BATCH, steps)

    def padded(self) -> Self | None:
        """The same on padded batches."""
        sampler = self.sampler.padded()
        return None if sampler is None else replace(self, sampler=sampler)


AVERAGE = "_average"  # added to the name under which weights are saved
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

    def at_rate(self, schedule: Callable[[Tensor], Tensor], max_grad_norm: Tensor) -> Self:
        """The same with another learning rate and clipping norm."""
        return replace(self, schedule=schedule, source=self.source.with_clip_norm(max_grad_norm))

    def reserve(self, state: State, names: Sequence[str]) -> State:
        """A state with places for saved weights, so that checkpoints always hold the same."""
        for name in names:
            state = self.save(state, name)
        return state

    def save(self, state: State, name: str) -> State:
        """Keep weights and average under a name; states are never changed, so nothing is copied."""
        saved = {**(state.saved or {}), name: state.params}
        if state.average is not None and name != START:  # where it is that of the weights
            saved[name + AVERAGE] = state.average
        return replace(state, saved=saved)

    def restore(self, state: State, name: str, add: Sequence[tuple[str, float]] = ()) -> State:
        """Saved weights, perhaps with parts of the ways that blocks have gone from the first."""
        assert state.saved is not None
        saved, params = state.saved, state.saved[name]
        for end, factor in add:
            way = elementwise(torch.sub, saved[end], saved[START])
            params = elementwise(partial(torch.add, alpha=factor), params, way)
        average, updates = state.average, state.updates
        if name == START:
            average, updates = params, torch.zeros_like(state.updates)
        elif average is not None:
            average = saved[name + AVERAGE]
        return replace(
            state,
            params=params,
            optimizer=self.optimizer.init(params),
            updates=updates,
            average=None if state.average is None else average,
        )

    def squared_distance(self, state: State) -> tuple[float, int]:
        """How far the weights are from the first ones, and how many there are."""
        assert state.saved is not None
        first = state.saved[START]
        squares = [
            (value - first[name]).double().square().sum() for name, value in state.params.items()
        ]
        count = sum(value.numel() for value in state.params.values())
        return float(torch.stack(squares).sum()), count

    def padded(self) -> Self | None:
        """The same on padded batches."""
        source = self.source.padded()
        return None if source is None else replace(self, source=source)


def _write(place: Tensor, new: Tensor, active: Tensor | None) -> None:
    """Put new values in place, where that is asked for."""
    if active is None:
        place.copy_(new)
    else:
        torch.where(active, new, place, out=place)
