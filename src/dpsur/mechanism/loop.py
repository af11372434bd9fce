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
from dpsur.mechanism.state import Procedure, State, Verdict
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.trial import trial
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.plans import PrivacyPlan


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
        """Where the run stands after the last block."""
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


def run_loop(loop: Loop, plan: PrivacyPlan, on_block: OnBlock = lambda *_: None) -> Progress:
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
    plan: PrivacyPlan,
    streams: Streams,
    progress: Progress | None = None,
    on_block: OnBlock = lambda *_: None,
) -> Progress:
    """Make all trials one by one; same guarantee as `run_loop`."""
    progress = start(procedure) if progress is None else progress
    return run_loop(EagerLoop(procedure, plan, streams, progress), plan, on_block)


class EagerLoop:
    """One trial per block."""

    def __init__(
        self, procedure: Procedure, plan: PrivacyPlan, streams: Streams, progress: Progress
    ) -> None:
        self._procedure, self._plan, self._streams = procedure, plan, streams
        self.progress = progress

    @property
    def finished(self) -> bool:
        """Whether the plan affords no further trial."""
        return not has_next(self._procedure, self._plan, self.progress)

    def launch(self) -> None:
        """Nothing: the trial is made when it is collected."""

    def collect(self) -> list[Verdict]:
        """Make one trial."""
        self.progress, verdict = make_trial(
            self._procedure, self._plan, self._streams, self.progress
        )
        return [verdict]

    def close(self) -> None:
        """Nothing: all is done in the foreground."""


def has_next(procedure: Procedure, plan: PrivacyPlan, progress: Progress) -> bool:
    """Whether there is another trial to make. Asked before it, never after."""
    stopped = getattr(procedure, "stopped", None)  # by what it has released
    if stopped is not None and stopped(progress.state):
        return False
    step = procedure.step(progress.state)
    return plan.affords(progress.ledger, step) or plan.drops(progress.ledger)


def make_trial(
    procedure: Procedure, plan: PrivacyPlan, streams: Streams, progress: Progress
) -> tuple[Progress, Verdict]:
    """One trial of Algorithm 1, recorded in the ledger."""
    state, ledger = progress.state, progress.ledger
    step = procedure.step(state)
    device = state.updates.device
    position = torch.tensor(plan.position(ledger), device=device)
    # after the last update trials may continue, so that their number is the same for all data
    active = torch.tensor(False, device=device) if plan.drops(ledger) else None
    state, verdict = trial(procedure, state, streams.at(ledger.steps + 1), position, active=active)
    return Progress(state, ledger.record(step, updates=int(verdict.accept))), verdict


def check_completed(plan: PrivacyPlan, progress: Progress) -> None:
    """Refuse to release a run that hit its cap on trials."""
    if not plan.completed(progress.ledger):
        raise NothingReleasedError(
            f"the cap of {plan.trials} trials came before {plan.updates} accepted updates; nothing "
            "may be released from this run: start another one"
        )
