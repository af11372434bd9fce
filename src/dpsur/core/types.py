"""The values that flow through a run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from dpsur.errors import InvalidInputError
from dpsur.privacy.events import Event, Step

Params = dict[str, Tensor]
LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, repr=False)
class Examples:
    """Records as two tensors with one row per record."""

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise InvalidInputError(
                f"{len(self.inputs)} inputs but {len(self.targets)} targets: "
                "there must be one target per input"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def __repr__(self) -> str:
        inputs, targets = self.inputs, self.targets
        return (
            f"{type(self).__name__}({len(self)} records, inputs {tuple(inputs.shape[1:])} of "
            f"{inputs.dtype}, targets {tuple(targets.shape[1:])} of {targets.dtype})"
        )

    def select(self, rows: Tensor) -> "Examples":
        """Return the named rows: their indices, or a truth value for each."""
        if rows.dtype == torch.bool:
            rows = rows.nonzero()[:, 0]
        # on a CPU several times as fast as indexing: whole rows are copied
        return Examples(self.inputs.index_select(0, rows), self.targets.index_select(0, rows))

    def part(self, some: slice) -> "Examples":
        """Return neighbouring rows."""
        return Examples(self.inputs[some], self.targets[some])

    def to(self, device: torch.device) -> "Examples":
        """Move both tensors to a device."""
        return Examples(self.inputs.to(device), self.targets.to(device))


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
