"""The values that flow through a run: state, candidate, verdict."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from dpsur.functional.parameters import Params
from dpsur.privacy.events import Event, Step


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
    """

    params: Params
    optimizer: OptimizerState
    updates: Tensor
    average: Params | None = None
    memory: Mapping[str, Tensor] | None = None  # what an adaptive method has released so far

    def __repr__(self) -> str:
        return f"State({sum(value.numel() for value in self.params.values())} weights; private)"

    @property
    def released_params(self) -> Params:
        """The weights that a user gets: the average where one is kept."""
        return self.params if self.average is None else self.average


@dataclass(frozen=True)
class Candidate:
    """A proposed next state. `overflow`: a padded batch had no room for all of its rows."""

    state: State
    overflow: Tensor | None = None


@dataclass(frozen=True, repr=False)
class Verdict:
    """Whether to keep a candidate. `private` holds figures that must never be released."""

    accept: Tensor
    private: Mapping[str, Tensor] = field(default_factory=dict)
    overflow: Tensor | None = None

    def __repr__(self) -> str:
        return "Verdict(private)"


class Procedure(Protocol):
    """A method bound to data, model and random streams: what the loop drives."""

    def step(self, state: State) -> Step:
        """The event that the next call of `propose` and `judge` amounts to.

        It may depend on released values only, so that asking for it costs nothing.
        """
        ...

    @property
    def setup(self) -> tuple[Event, ...]:
        """Events that happened before the first trial."""
        ...

    def initial_state(self) -> State:
        """The state before the first trial."""
        ...

    def propose(self, state: State, position: Tensor) -> Candidate:
        """Draw a candidate; `position` is where its schedules stand."""
        ...

    def judge(self, state: State, candidate: Candidate) -> Verdict:
        """Test a candidate against the state it came from."""
        ...

    def padded(self) -> "Procedure | None":
        """The same procedure with batches of static shape, or None if it must see exact ones."""
        ...

    def after_rejection(self, state: State, candidate: Candidate) -> State:
        """The state if the candidate is rejected: `state` itself unless every trial is charged."""
        ...
