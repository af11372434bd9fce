"""The training loop: trials until the plan affords no more.

A loop makes one block of trials at a time. `EagerLoop` makes a trial per block on the host's
command; `CudaGraphLoop` replays many. Between `launch` and `collect` the device is busy, so that a
caller can interleave several runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from dpsur.errors import NothingReleasedError
from dpsur.functional.tree import elementwise, map_tensors, tensors_of
from dpsur.mechanism.state import Procedure, State, Verdict
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.trial import take_step, updates_in_place
from dpsur.privacy.account import Account
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.plan import Plan


@dataclass(frozen=True, repr=False)
class Progress:
    """Where a run stands between two trials. Private as a whole."""

    state: State
    ledger: Ledger

    def __repr__(self) -> str:
        return "Progress(state and ledger; private)"


OnBlock = Callable[[Progress, Sequence[Verdict]], None]


class Loop(Protocol):
    """Makes the trials of a plan, block by block."""

    @property
    def progress(self) -> Progress:
        """Where the run stands after the last block.

        The next block may overwrite its tensors: copy what is to be kept. Raises
        NothingReleasedError while they are being overwritten, or if that has failed.
        """
        ...

    @property
    def finished(self) -> bool:
        """Whether the plan affords no further trial."""
        ...

    def launch(self) -> None:
        """Start the next block."""
        ...

    def collect(self) -> list[Verdict]:
        """Wait for the block, record it in the ledger, and return its verdicts."""
        ...

    def close(self) -> None:
        """Stop what is done in the background, at the end of a run or after an error."""
        ...


def start(procedure: Procedure) -> Progress:
    """The progress of a run that has not made a trial."""
    return Progress(procedure.initial_state(), Ledger(setup=procedure.setup))


def run_loop(loop: Loop, plan: Plan, on_block: OnBlock = lambda *_: None) -> Progress:
    """Make all trials of a plan and return where the run ended.

    Formal guarantee: the returned state satisfies the plan's (epsilon, delta) under the plan's
    accounting, for adding or removing one record. Raises NothingReleasedError if the cap on trials
    came first: that event is as improbable as the plan says, provided nothing is released.
    """
    try:
        while not loop.finished:
            loop.launch()
            verdicts = loop.collect()
            on_block(loop.progress, verdicts)
    finally:
        loop.close()
    check_completed(plan, loop.progress)
    return loop.progress


def train(
    procedure: Procedure,
    plan: Plan,
    streams: Streams,
    progress: Progress | None = None,
    on_block: OnBlock = lambda *_: None,
) -> Progress:
    """Make all trials one by one; same guarantee as `run_loop`. `progress` is left as it is."""
    owned = progress is None
    progress = start(procedure) if progress is None else progress
    loop = EagerLoop(procedure, plan, streams, progress, owned=owned)
    del progress
    return run_loop(loop, plan, on_block)


def own(progress: Progress, *, owned: bool) -> Progress:
    """A progress whose tensors a loop may overwrite: this one if it is `owned`, else a copy.

    Parameters are side by side in memory afterwards.
    """
    state = progress.state
    if owned:
        state = map_tensors(lambda value: value, state, together=elementwise)
        places = [value.data_ptr() for value in tensors_of(state) if value.numel()]
        owned = len(set(places)) == len(places)  # two names for one tensor would change together
    if not owned:
        state = map_tensors(torch.clone, state, together=elementwise)
    return Progress(state, progress.ledger)


HALF_UPDATED = (
    "a trial has begun to update the weights in memory and has not ended, so they are those of no "
    "update and nothing may be released from them; resume the run from its last checkpoint"
)


class EagerLoop:
    """One trial per block.

    Where nothing is ever rejected, trials update the state in place: of `progress` itself if the
    loop has it to itself (`owned`), else of a copy.
    """

    def __init__(
        self,
        procedure: Procedure,
        plan: Plan,
        streams: Streams,
        progress: Progress,
        *,
        owned: bool = False,
    ) -> None:
        self._procedure, self._streams = procedure, streams
        self._account = Account(plan, plan.budget.delta, progress.ledger)
        self._in_place = updates_in_place(procedure)
        state = own(progress, owned=owned).state if self._in_place else progress.state
        self._state: State | None = state

    @property
    def progress(self) -> Progress:
        """Where the run stands after the last trial."""
        if self._state is None:
            raise NothingReleasedError(HALF_UPDATED)
        return Progress(self._state, self._account.charged)

    @property
    def finished(self) -> bool:
        """Whether the plan affords no further trial."""
        plan = self._account.plan
        assert plan is not None
        return not has_next(self._procedure, plan, self.progress)

    def launch(self) -> None:
        """Nothing: the trial is made when it is collected."""

    def collect(self) -> list[Verdict]:
        """Make one trial."""
        before = self.progress.state
        if self._in_place:  # weights and ledger would not fit each other until the trial is done
            self._state = None
        self._state, verdict = take_step(
            self._procedure,
            self._account,
            self._streams,
            before,
            out=before if self._in_place else None,
        )
        return [verdict]

    def close(self) -> None:
        """Nothing: all is done in the foreground."""


def has_next(procedure: Procedure, plan: Plan, progress: Progress) -> bool:
    """Whether there is another trial to make. Asked before it, never after."""
    stopped = getattr(procedure, "stopped", None)  # by what it has released
    if stopped is not None and stopped(progress.state):
        return False
    step = procedure.step(progress.state)
    return plan.affords(progress.ledger, step) or plan.dummy_trials_left(progress.ledger)


def make_trial(
    procedure: Procedure,
    plan: Plan,
    streams: Streams,
    progress: Progress,
    in_place: bool = False,
) -> tuple[Progress, Verdict]:
    """One step from a progress to the next.

    `in_place` overwrites the tensors of `progress`; for procedures of which `updates_in_place`.
    """
    account = Account(plan, plan.budget.delta, progress.ledger)
    state, verdict = take_step(
        procedure, account, streams, progress.state, out=progress.state if in_place else None
    )
    return Progress(state, account.charged), verdict


def check_completed(plan: Plan, progress: Progress) -> None:
    """Refuse to release a run that hit its cap on trials."""
    if not plan.completed(progress.ledger):
        raise NothingReleasedError(
            f"the cap of {plan.trials} trials came before {plan.updates} accepted updates; nothing "
            "may be released from this run: start another one"
        )
