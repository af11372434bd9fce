"""Algorithm 1 of the paper: one trial, from a state to the next one.

The loop on the host (`loop.py`) and the loop on CUDA graphs (`cuda_graph_loop.py`) both call
`trial`. Line numbers are the paper's. Its parts: a candidate is drawn in `proposer.py` with the
gradient of `dp_gradient.py`, and tested in `gate.py`.
"""

from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
from torch import Tensor

from dpsur.functional.parameters import elementwise
from dpsur.functional.tree import map_tensors
from dpsur.mechanism.cuda_graphs import run_concurrently
from dpsur.mechanism.gate import AlwaysAccept
from dpsur.mechanism.optim import Adam, Sgd
from dpsur.mechanism.proposer import GradientProposer
from dpsur.mechanism.state import Candidate, Gate, Procedure, Proposer, State, Verdict
from dpsur.mechanism.streams import Draws
from dpsur.privacy.events import Event, Step, Trial


@dataclass(frozen=True)
class Selective:
    """Selective update and release: a proposer's candidates behind a gate.

    With a gate that accepts everything it is the proposer's own method, such as DP-SGD. `overlap`
    starts the test while the candidate is drawn, which pays on a GPU.
    """

    proposer: Proposer
    gate: Gate
    setup: tuple[Event, ...] = ()
    overlap: bool = False

    def step(self, state: State) -> Step:
        """The proposer's event, with the gate's test where it is an update."""
        step = self.proposer.step(state)
        return replace(step, test=self.gate.test) if isinstance(step, Trial) else step

    def initial_state(self) -> State:
        """The proposer's."""
        return self.proposer.initial_state()

    def propose(self, state: State, draws: Draws, position: Tensor) -> Candidate:
        """Draw a candidate (lines 3 to 8)."""
        if not self.overlap:
            return self.proposer.propose(state, draws, position)
        begun, candidate = run_concurrently(
            state.updates.device,
            lambda: self.gate.begin(state, draws),
            lambda: self.proposer.propose(state, draws, position),
        )
        return replace(candidate, test=begun)

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:
        """Test the candidate (lines 9 to 14). What is not an update is always kept."""
        if not isinstance(self.step(state), Trial):
            return Verdict(torch.ones((), dtype=torch.bool, device=state.updates.device))
        return self.gate.judge(state, candidate, draws)

    def after_rejection(self, state: State, candidate: Candidate) -> State:
        """The gate's."""
        return self.gate.after_rejection(state, candidate)

    @property
    def updates_in_place(self) -> bool:
        """Whether nothing is ever undone, so that a trial needs no second copy of the state."""
        # exact types: a subclass may do more than these do
        kinds = type(self), type(self.proposer), type(self.gate)
        if kinds != (Selective, GradientProposer, AlwaysAccept):
            return False
        # Some weights after the others: a custom optimizer may need them all at once.
        return type(getattr(self.proposer, "optimizer", None)) in (Sgd, Adam)

    def update_in_place(
        self, state: State, draws: Draws, position: Tensor, active: Tensor | None
    ) -> Verdict:
        """A candidate that is kept, written into the state itself."""
        assert isinstance(self.proposer, GradientProposer)
        overflow = self.proposer.update_in_place(state, draws, position, active)
        verdict = self.gate.judge(state, Candidate(state, overflow), draws)
        accept = verdict.accept if active is None else verdict.accept & active
        return replace(verdict, accept=accept, overflow=overflow)

    def padded(self) -> "Selective | None":
        """The same on padded batches, if the proposer can be padded.

        Nothing waits for the host then, and a test can start while its candidate is drawn. Every
        step is an update: a proposer with steps of several kinds (DPIS) is not padded.
        """
        proposer = self.proposer.padded()
        if proposer is None:
            return None
        overlap = self.gate.test is not None
        return replace(self, proposer=proposer, gate=self.gate.padded(), overlap=overlap)


def trial(
    procedure: Procedure,
    state: State,
    draws: Draws,
    position: Tensor,
    *,
    active: Tensor | None = None,
    out: State | None = None,
) -> tuple[State, Verdict]:
    """Draw a candidate, test it, and return the next state with the verdict.

    A pure function of its arguments: `draws` are the random numbers of this trial, and `position`
    is where schedules stand. Where `active` is False the trial is made and its outcome dropped: the
    state stays as it is. `out` receives the next state in place, for a captured trial. If it is
    `state` itself, a procedure that never rejects updates it as it goes, without a candidate: the
    same numbers, but a trial that fails may leave it half updated.
    """
    if out is state and updates_in_place(procedure):
        return state, procedure.update_in_place(state, draws, position, active)
    candidate = procedure.propose(state, draws, position)  # lines 3 to 8
    verdict = procedure.judge(state, candidate, draws)  # lines 9 to 14
    accept = verdict.accept
    rejected = procedure.after_rejection(state, candidate)
    if active is not None:
        accept = accept & active
        rejected = rejected if rejected is state else keep(active, rejected, state)
    after = keep(accept, candidate.state, rejected, out)  # lines 15 to 18
    return after, replace(
        verdict, accept=accept, overflow=either(candidate.overflow, verdict.overflow)
    )


def updates_in_place(procedure: Procedure) -> TypeGuard[Selective]:
    """Whether trials of a procedure need no second copy of its state."""
    return isinstance(procedure, Selective) and procedure.updates_in_place


def keep(accept: Tensor, candidate: State, current: State, out: State | None = None) -> State:
    """Choose one of two states, whole. On a GPU nothing waits for the verdict.

    This is where a rejected trial is undone: every tensor of the state comes from `current`.
    """
    if out is None and accept.device.type == "cpu":
        return candidate if bool(accept) else current
    if out is None:
        return map_tensors(
            lambda new, old: torch.where(accept, new, old), candidate, current, together=elementwise
        )

    def choose(place: Tensor, new: Tensor, old: Tensor) -> Tensor:
        if new is old is place:  # what this trial did not touch
            return place
        return torch.where(accept, new, old, out=place)

    return map_tensors(choose, out, candidate, current, together=elementwise)


def either(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Whether one of two padded batches overflowed; None if neither can."""
    if one is None or other is None:
        return one if other is None else other
    return one | other
