"""The values that flow through a run, and the parts that a method is composed of.

A method is a `Selective` procedure (`mechanism/trial.py`): a `Proposer` that draws a candidate, and
a `Gate` that decides whether it is kept.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from torch import Tensor

from dpsur.functional.tree import Params
from dpsur.mechanism.streams import Draws
from dpsur.privacy.events import Event, Step, Test

START = "first"  # the name of the weights before the first update, where they are saved


@dataclass(frozen=True)
class OptimizerState:
    """Buffers of an optimizer, one set of tensors per buffer name."""

    step: Tensor
    buffers: Mapping[str, Params]


@dataclass(frozen=True, repr=False)
class State:
    """Everything that a rejected trial must leave as it was.

    Rejecting is not assigning: the next state is either the candidate's or this one, whole. Random
    streams are deliberately not part of it, or a rejected draw would repeat for ever.

    In a custom loop weights and optimizer are those of the loop itself, and `params` is empty: such
    a state holds counts, `memory` and saved weights.
    """

    params: Params
    optimizer: OptimizerState
    updates: Tensor
    average: Params | None = None
    memory: Mapping[str, Tensor] | None = None  # what an adaptive method has released so far
    saved: Mapping[str, Params] | None = None  # weights that a later test may restore

    def __repr__(self) -> str:
        return f"State({sum(value.numel() for value in self.params.values())} weights; private)"

    @property
    def released_params(self) -> Params:
        """The weights that a user gets: the average where one is kept."""
        return self.params if self.average is None else self.average


@dataclass(frozen=True)
class Candidate:
    """A proposed next state.

    Attributes:
        test: what the gate has computed before the candidate was there.
        undo: puts the weights back, where the candidate was made by updating a module in place.
    """

    state: State
    test: Any = None
    undo: Callable[[], None] | None = None


@dataclass(frozen=True, repr=False)
class Verdict:
    """Whether to keep a candidate. `private` holds figures that must never be released."""

    accept: Tensor
    private: Mapping[str, Tensor] = field(default_factory=dict)

    def __repr__(self) -> str:
        return "Verdict(private)"


class Proposer(Protocol):
    """Draws candidates."""

    def step(self, state: State) -> Step:
        """The event of the next candidate, without a test.

        It may depend on released values only, so that asking for it costs nothing.
        """

    def initial_state(self) -> State:
        """The state before the first trial."""

    def propose(self, state: State, draws: Draws, position: Tensor) -> Candidate:
        """Draw a candidate; `position` is where its schedules stand."""

    def padded(self) -> Self | None:
        """The same with batches of static shape, or None if it must see exact ones."""


class Gate(Protocol):
    """Decides whether a candidate is kept."""

    @property
    def test(self) -> Test | None:
        """The event of a decision; None if it does not depend on the data."""

    @property
    def rejects(self) -> bool:
        """Whether a candidate may be rejected."""

    def begin(self, state: State, draws: Draws) -> Any:
        """What can be computed before the candidate is there; goes into `Candidate.test`."""

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:
        """Test a candidate against the state it came from."""

    def after_rejection(self, state: State, candidate: Candidate) -> State:
        """The state if the candidate is rejected: `state` itself unless every trial is charged."""

    def padded(self) -> "Gate":
        """The same with batches of static shape."""


class Procedure(Proposer, Protocol):
    """A method bound to its model and data: what the loop drives.

    Its `step` is the event that the next call of `propose` and `judge` amounts to.
    """

    @property
    def setup(self) -> tuple[Event, ...]:
        """Events that happened before the first trial."""

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:
        """As of a `Gate`."""

    def after_rejection(self, state: State, candidate: Candidate) -> State:
        """As of a `Gate`."""
