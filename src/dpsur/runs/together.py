"""Several runs at once in one process, for seeds of one experiment.

A small network does not fill a GPU. Runs take turns, a block of trials each; those on CUDA graphs
are replayed on separate streams. Every run ends as it would alone.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from dpsur.errors import InvalidInputError, NothingReleasedError, PrivacyWarning
from dpsur.runs.fit import finish_run, objections
from dpsur.runs.observers import Recorder
from dpsur.runs.release import NO_ORIGIN
from dpsur.runs.result import Run
from dpsur.runs.session import Observer, Session

# A run, or why nothing may be released from it: the others are not to suffer from that.
Outcome = Run | NothingReleasedError


def run_together(
    sessions: Sequence[Session], observers: Sequence[Sequence[Observer]] | None = None
) -> list[Outcome]:
    """Run prepared sessions to their ends, and return what each of them came to, in their order.

    `observers` are called with every run's trials, a sequence for each session. Records that
    are on the device already, and given to all sessions, are there only once.

    Formal guarantee: each run has its own, as if it were alone; together they are a composition.
    """
    watching = [()] * len(sessions) if observers is None else observers
    if len(watching) != len(sessions):
        raise InvalidInputError(
            f"{len(watching)} groups of observers for {len(sessions)} sessions: give one for each"
        )
    for text in dict.fromkeys(text for session in sessions for text in objections(session)):
        warnings.warn(text, PrivacyWarning, stacklevel=2)
    runs = [_Interleaved(session, seen) for session, seen in zip(sessions, watching, strict=True)]
    try:
        while any(run.outcome is None for run in runs):
            active = [run for run in runs if run.outcome is None]
            for run in active:
                run.launch()
            for run in active:
                run.collect()
    finally:
        for run in runs:
            run.close()
    return [run.outcome for run in runs if run.outcome is not None]


class _Interleaved:
    """One of several runs, with a CUDA stream to itself."""

    def __init__(self, session: Session, observers: Sequence[Observer]) -> None:
        self.outcome: Outcome | None = None
        self._session, self._recorder = session, Recorder()
        self._stream: torch.cuda.Stream | None = None
        if session.streams.device.type == "cuda":
            self._stream = torch.cuda.Stream(session.streams.device)  # type: ignore[no-untyped-call]
        with self._own_stream():
            self._active = session.start([self._recorder, *observers])

    def launch(self) -> None:
        """Start the next block of trials."""
        with self._own_stream():
            if not self._active.finished:
                self._active.launch()

    def collect(self) -> None:
        """Wait for the block, or finish the run."""
        with self._own_stream():
            if not self._active.finished:
                self._active.collect()
                return
            try:
                progress = self._active.finish()
                self.outcome = finish_run(self._session, progress, self._recorder, NO_ORIGIN)
            except NothingReleasedError as error:
                self.outcome = error

    def close(self) -> None:
        """Stop what is done in the background."""
        self._active.close()

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Work beside the others, after what was there before and before what comes after."""
        with self._session.arithmetic():
            if self._stream is None:
                yield
                return
            device = self._session.streams.device
            outer = torch.cuda.current_stream(device)
            self._stream.wait_stream(outer)
            with torch.cuda.stream(self._stream):
                yield
            if self.outcome is not None:
                outer.wait_stream(self._stream)
