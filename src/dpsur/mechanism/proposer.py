"""Candidates that are one optimizer step along a gradient (Algorithm 1, lines 3 to 8).

Optimizers are pure functions: state in, state out, nothing changed in place. They work on each
number by itself, so that a step can also be made for some of them at a time. `GradientProposer`
turns a gradient into a candidate state. Where the gradient comes from is a `GradientSource`:
`DpGradient` is the noisy sum of clipped gradients that DP-SGD takes.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, Self

import torch
from torch import Tensor

from dpsur import checks
from dpsur.functional.problem import Problem
from dpsur.functional.tree import Params, elementwise, from_vector, parts, to_vector
from dpsur.mechanism.gaussian import (
    Batch,
    dp_mean_gradient,
    padded_batch,
    steady_batch,
)
from dpsur.mechanism.state import START, Candidate, OptimizerState, State
from dpsur.mechanism.streams import BATCH, LAYERS, NOISE, Draws
from dpsur.per_example import draws_randomness
from dpsur.privacy.events import NonPrivate, SampledGaussian, Step, Trial


class Optimizer(Protocol):
    """A pair of pure functions."""

    def init(self, params: Params) -> OptimizerState:
        """Buffers before the first step."""

    def step(
        self, params: Params, gradient: Params, state: OptimizerState, learning_rate: Tensor
    ) -> tuple[Params, OptimizerState]:
        """Weights and buffers after one step."""


def _count(params: Params) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=next(iter(params.values())).device)


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent with heavy-ball momentum, as torch.optim.SGD computes it."""

    momentum: float = 0.9

    def __post_init__(self) -> None:
        checks.fraction_below_one("momentum", self.momentum)

    def init(self, params: Params) -> OptimizerState:
        return OptimizerState(_count(params), {"velocity": elementwise(torch.zeros_like, params)})

    def step(
        self, params: Params, gradient: Params, state: OptimizerState, learning_rate: Tensor
    ) -> tuple[Params, OptimizerState]:
        velocity = elementwise(
            lambda before, new: torch.add(new, before, alpha=self.momentum),
            state.buffers["velocity"],
            gradient,
        )
        moved = elementwise(
            lambda value, by: torch.addcmul(value, by, learning_rate.to(value.dtype), value=-1),
            params,
            velocity,
        )
        return moved, OptimizerState(state.step + 1, {"velocity": velocity})


@dataclass(frozen=True)
class Adam:
    """Adam with bias correction, as torch.optim.Adam computes it."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-7

    def __post_init__(self) -> None:
        checks.fraction_below_one("adam_beta1", self.beta1)
        checks.fraction_below_one("adam_beta2", self.beta2)
        checks.positive("adam_eps", self.eps)

    def init(self, params: Params) -> OptimizerState:
        moments = {name: elementwise(torch.zeros_like, params) for name in ("mean", "square")}
        return OptimizerState(_count(params), moments)

    def step(
        self, params: Params, gradient: Params, state: OptimizerState, learning_rate: Tensor
    ) -> tuple[Params, OptimizerState]:
        step = state.step + 1
        mean = elementwise(
            lambda before, new: self.beta1 * before + (1 - self.beta1) * new,
            state.buffers["mean"],
            gradient,
        )
        square = elementwise(
            lambda before, new: self.beta2 * before + (1 - self.beta2) * new**2,
            state.buffers["square"],
            gradient,
        )
        # Corrections in double precision: 1 - beta2^t loses digits in single at the first steps.
        rate = learning_rate / (1 - torch.pow(self.beta1, step.double()))
        correction = (1 - torch.pow(self.beta2, step.double())).sqrt()

        def move(value: Tensor, mean: Tensor, square: Tensor) -> Tensor:
            root = square.sqrt() / correction.to(value.dtype) + self.eps
            return value - rate.to(value.dtype) * mean / root

        moved = elementwise(move, params, mean, square)
        return moved, OptimizerState(step, {"mean": mean, "square": square})


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "constant": torch.ones_like,
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + torch.cos(math.pi * progress)),
}


@dataclass(frozen=True)
class Schedule:
    """A learning rate that starts at `learning_rate` and decays over `length` positions."""

    shape: str
    learning_rate: float
    length: int

    def __post_init__(self) -> None:
        checks.one_of("schedule", self.shape, tuple(SHAPES))
        checks.positive("learning_rate", self.learning_rate)

    def __call__(self, position: Tensor) -> Tensor:
        """Learning rate at a position from 0 to length - 1; never zero within the run."""
        progress = position.double() / self.length
        return self.learning_rate * SHAPES[self.shape](progress)


def update_average(
    rule: "WeightAverage | None", average: Params | None, params: Params, updates: Tensor
) -> Params | None:
    """The average after one more update; None where none is kept."""
    return None if rule is None or average is None else rule(average, params, updates)


@dataclass(frozen=True)
class WeightAverage:
    """Average with a decay that warms up, so that the initial weights are soon forgotten."""

    decay: float

    def __post_init__(self) -> None:
        checks.fraction_below_one("average_decay", self.decay)

    def __call__(self, average: Params, params: Params, updates: Tensor) -> Params:
        warm = (1 + updates.double()) / (10 + updates.double())
        decay = torch.minimum(torch.full_like(warm, self.decay), warm)
        return elementwise(
            lambda old, new: torch.lerp(new, old, decay.to(old.dtype)), average, params
        )


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
        draw = padded_batch if self.pad else steady_batch
        return draw(self.problem.train, sample_rate, draws[purpose])

    def padded(self) -> "Sampler | None":
        """The same on padded batches; not for layers that draw random numbers."""
        return None if self.random_layers else replace(self, pad=True)

    def layer_randomness(self, draws: Draws) -> AbstractContextManager[None]:
        return draws.global_randomness(LAYERS) if self.random_layers else nullcontext()


class GradientSource:
    """Where the gradient of a candidate comes from: a source states `event` and `gradient`."""

    def event(self, state: State) -> SampledGaussian | NonPrivate:
        """What the last or the next update is charged as."""
        raise NotImplementedError

    def gradient(self, state: State, draws: Draws) -> Params:
        """A gradient, drawn anew."""
        raise NotImplementedError

    def with_clip_norm(self, max_grad_norm: Tensor) -> Self:  # noqa: ARG002
        """The same with another clipping norm, and noise in proportion to it."""
        return self

    def padded(self) -> Self | None:
        """The same on padded batches, or None."""
        return None


@dataclass(frozen=True)
class DpGradient(GradientSource):
    """The noisy sum of clipped gradients of a Poisson batch, over its expected size.

    Formal guarantee of one gradient: the sampled Gaussian mechanism `update`.
    """

    sampler: Sampler
    update: SampledGaussian
    max_grad_norm: float | Tensor

    def event(self, state: State) -> SampledGaussian:  # noqa: ARG002
        return self.update

    def gradient(self, state: State, draws: Draws) -> Params:
        batch = self.sampler.batch(self.update.sample_rate, draws)
        with self.sampler.layer_randomness(draws):
            return dp_mean_gradient(
                self.sampler.problem,
                state.params,
                batch,
                self.update.sample_rate,
                self.update.noise_multiplier,
                self.max_grad_norm,
                draws[NOISE],
            )

    def with_clip_norm(self, max_grad_norm: Tensor) -> Self:
        return replace(self, max_grad_norm=max_grad_norm)

    def padded(self) -> Self | None:
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
        return Trial(self.source.event(state))

    def initial_state(self) -> State:
        params = self.problem.initial_params()
        return State(
            params=params,
            optimizer=self.optimizer.init(params),
            updates=torch.zeros((), dtype=torch.int64, device=self.problem.device),
            average=None if self.average is None else elementwise(torch.clone, params),
        )

    def propose(self, state: State, draws: Draws, position: Tensor) -> Candidate:
        return Candidate(self._after(state, self.source.gradient(state, draws), position))

    def _after(self, state: State, gradient: Params, position: Tensor) -> State:
        params, optimizer = self.optimizer.step(
            state.params, gradient, state.optimizer, self.schedule(position)
        )
        updates = state.updates + 1
        average = update_average(self.average, state.average, params, updates)
        return replace(state, params=params, optimizer=optimizer, updates=updates, average=average)

    def update_in_place(
        self, state: State, draws: Draws, position: Tensor, active: Tensor | None
    ) -> None:
        """Take the same step, written into the state itself, with the same bits.

        For candidates that are always kept: there is no second copy of weights and buffers. Where
        `active` is False the state stays as it is. Whoever calls this must not use the state if it
        fails: it may be half updated.
        """
        gradient = self.source.gradient(state, draws)
        most = _AT_ONCE.get(state.updates.device.type, _AT_ONCE_ELSEWHERE)
        small = sum(value.numel() for value in gradient.values()) <= most
        if small and len({value.dtype for value in gradient.values()}) == 1:
            gradient = from_vector(to_vector(gradient, state.params), state.params)
        buffers, step = state.optimizer.buffers, state.optimizer.step
        together = [gradient, state.params, *buffers.values()]
        together += [] if state.average is None else [state.average]
        for slope, *places in parts(*together, most=most):
            params, *others = ({"": place} for place in places)
            held = OptimizerState(step, dict(zip(buffers, others, strict=False)))
            average = None if state.average is None else others[-1]
            after = self._after(State(params, held, state.updates, average), {"": slope}, position)
            found = [after.params, *(after.optimizer.buffers[n] for n in buffers), after.average]
            for place, new in zip(places, found, strict=False):
                assert new is not None
                _write(place, new[""], active)
        _write(step, step + 1, active)
        _write(state.updates, state.updates + 1, active)

    def at_rate(self, schedule: Callable[[Tensor], Tensor], max_grad_norm: Tensor) -> Self:
        return replace(self, schedule=schedule, source=self.source.with_clip_norm(max_grad_norm))

    def reserve(self, state: State, names: Sequence[str]) -> State:
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
        assert state.saved is not None
        first = state.saved[START]
        squares = [
            (value - first[name]).double().square().sum() for name, value in state.params.items()
        ]
        count = sum(value.numel() for value in state.params.values())
        return float(torch.stack(squares).sum()), count

    def padded(self) -> Self | None:
        source = self.source.padded()
        return None if source is None else replace(self, source=source)


def _write(place: Tensor, new: Tensor, active: Tensor | None) -> None:
    """Put new values in place, where that is asked for."""
    if active is None:
        place.copy_(new)
    else:
        torch.where(active, new, place, out=place)
