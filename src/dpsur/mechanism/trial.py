"""One step of training: Algorithm 1 of the paper, and its charge.

    charge    book the step, before any noise is drawn
    propose   sample, clip, sum over ranks, add noise, divide, update       lines 3 to 8
    judge     compare both models on a fresh batch, with noise             lines 9 to 14
    decide    book the verdict
    keep      one of the two states, whole                                 lines 15 to 18

DP-SGD is the same step with a gate that accepts everything. `take_step` is what `fit` and
`PrivacyEngine` both call. They differ in where weights are: `GradientProposer` makes a new state
from an old one, and `engine/weights.py` updates a module and its `torch.optim` optimizer in place.
On CUDA graphs (`cuda_graph_loop.py`) `trial` is captured, and a block of trials is booked as one.

What an interruption leaves behind, in memory:
  * before the charge: nothing happened;
  * after the charge, before the verdict is booked: the step stays charged (or, where only accepted
    updates are charged, counted against the cap), and a gate's candidate is undone;
  * while the verdict is booked: an acceptance may be charged whose update was undone, never the
    reverse.
A checkpoint holds state and account of one moment. A run that resumes from it makes the steps after
it again, with the draws that they had: nothing is spent twice.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
from torch import Tensor

from dpsur.functional.tree import elementwise, map_tensors
from dpsur.mechanism.cuda_graphs import run_concurrently
from dpsur.mechanism.gate import AlwaysAccept
from dpsur.mechanism.optim import Adam, Sgd
from dpsur.mechanism.proposer import GradientProposer
from dpsur.mechanism.state import Candidate, Gate, Procedure, Proposer, State, Verdict
from dpsur.mechanism.streams import Draws, Streams
from dpsur.privacy.account import Account
from dpsur.privacy.events import Event, Step, Trial


@dataclass(frozen=True)
class Selective:
    """Selective update and release: a proposer's candidates behind a gate.

    With a gate that accepts everything it is the proposer's own method, such as DP-SGD. `overlap`
    starts the test while the candidate is drawn, which pays on a GPU. `in_place`: candidates take
    the place of the weights they came from, so that these are tested first.
    """

    proposer: Proposer
    gate: Gate
    setup: tuple[Event, ...] = ()
    overlap: bool = False
    in_place: bool = False

    def step(self, state: State) -> Step:
        """The proposer's event, with the gate's test where it is an update."""
        step = self.proposer.step(state)
        return replace(step, test=self.gate.test) if isinstance(step, Trial) else step

    def initial_state(self) -> State:
        """The proposer's."""
        return self.proposer.initial_state()

    def propose(self, state: State, draws: Draws, position: Tensor) -> Candidate:
        """Draw a candidate (lines 3 to 8)."""
        if self.in_place:
            begun = self.gate.begin(state, draws)
            return replace(self.proposer.propose(state, draws, position), test=begun)
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
    decide: Callable[[Tensor], None] = lambda _: None,
) -> tuple[State, Verdict]:
    """Draw a candidate, test it, and return the next state with the verdict.

    A pure function of its arguments: `draws` are the random numbers of this trial, and `position`
    is where schedules stand. Where `active` is False the trial is made and its outcome dropped: the
    state stays as it is. `out` receives the next state in place, for a captured trial. If it is
    `state` itself, a procedure that never rejects updates it as it goes, without a candidate: the
    same numbers, but a trial that fails may leave it half updated. `decide` books the verdict.
    """
    if out is state and updates_in_place(procedure):
        return state, procedure.update_in_place(state, draws, position, active)
    candidate = procedure.propose(state, draws, position)  # lines 3 to 8
    with undone_if_interrupted(candidate):
        verdict = procedure.judge(state, candidate, draws)  # lines 9 to 14
        accept = verdict.accept if active is None else verdict.accept & active
        decide(accept)
        if candidate.undo is not None and not bool(accept):
            candidate.undo()
    rejected = procedure.after_rejection(state, candidate)
    if active is not None and rejected is not state:
        rejected = keep(active, rejected, state)
    after = keep(accept, candidate.state, rejected, out)  # lines 15 to 18
    return after, replace(
        verdict, accept=accept, overflow=either(candidate.overflow, verdict.overflow)
    )


def take_step(
    procedure: Procedure,
    account: Account,
    streams: Streams,
    state: State,
    *,
    out: State | None = None,
    charged: bool = False,
) -> tuple[State, Verdict]:
    """Charge the step that is due, make it, and book its verdict; raises if it does not fit.

    `charged`: it was charged before and then interrupted, so it is made with the draws of its own
    number. Nothing has been seen of it.
    """
    device = state.updates.device
    position = torch.tensor(account.position, device=device)
    # after the last update trials may continue, so that their number is the same for all data
    active = torch.tensor(False, device=device) if account.dummy_trials_left else None
    if not charged:
        account.book(procedure.step(state))
    draws = streams.at(account.steps)

    def decide(accept: Tensor) -> None:
        account.decide(accepted=bool(accept))

    return trial(procedure, state, draws, position, active=active, out=out, decide=decide)


@contextmanager
def undone_if_interrupted(candidate: Candidate) -> Iterator[None]:
    """Nothing untested stays in the weights, whatever interrupts a test: also Ctrl-C."""
    try:
        yield
    except BaseException:
        if candidate.undo is not None:
            candidate.undo()
        raise


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
