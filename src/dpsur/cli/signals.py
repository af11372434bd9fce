"""What Ctrl-C and SIGTERM do to a command."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:  # this module is there before torch is
    from collections.abc import Sequence

    from dpsur.mechanism.state import Verdict
    from dpsur.mechanism.trial import Progress
    from dpsur.privacy.plan import Plan


@contextmanager
def interrupts_exit_at_once() -> Iterator[None]:
    """Leave on Ctrl-C without an exception, for as long as there is nothing to clean up.

    An exception would have to pass through modules that are half imported, some of which print it
    or turn it into another one.
    """
    before = signal.getsignal(signal.SIGINT)
    ours = threading.current_thread() is threading.main_thread()
    if not ours or before is not signal.default_int_handler:  # ignored, or someone else's
        yield
        return
    signal.signal(signal.SIGINT, _exit_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _exit_at_once(number: int, frame: object) -> NoReturn:
    del number, frame
    _say("dpsur: stopped")
    os._exit(130)


def _say(text: str) -> None:
    with suppress(RuntimeError):  # the signal came in the middle of another line
        print(text, file=sys.stderr, flush=True)


class Stop:
    """The first Ctrl-C or SIGTERM asks a training run to save itself and stop.

    A second one stops at once, and so does the first where nothing is trained yet.
    """

    def __init__(self) -> None:
        self.asked = False
        self._training = False

    def started(self, plan: "Plan", progress: "Progress") -> None:
        """There is a checkpoint now, and a trial to be finished."""
        del plan, progress
        self._training = True

    def trials(self, progress: "Progress", verdicts: "Sequence[Verdict]") -> None:
        """Nothing to do."""

    def evaluated(self, progress: "Progress", scores: dict[str, float], epsilon: float) -> None:
        """Nothing to do."""

    def on_signal(self, number: int, frame: Any) -> None:
        """Handle SIGINT and SIGTERM."""
        del number, frame
        again, self.asked = self.asked, True
        if again or not self._training:
            raise KeyboardInterrupt
        _say("\ndpsur: stopping after the current trial, or block of captured trials ...")


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """Handle SIGINT and SIGTERM this way for a while."""
    stop = Stop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, stop.on_signal) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
