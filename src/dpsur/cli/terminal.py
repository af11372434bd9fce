"""What commands do with a terminal: streams, signals, and a private log of error details."""

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from dpsur.environment import cache_folder
from dpsur.errors import FileError, InvalidInputError, cause_of
from dpsur.runs.files import PRIVATE


@contextmanager
def standard_streams() -> Iterator[None]:
    """Wrap the standard streams: what nobody reads is dropped, a full disk is an error.

    Standard error shows progress and warnings only, so there it is dropped in any case.
    """
    before = sys.stdout, sys.stderr
    for number in range(3):
        # open what was closed (`2>&-`), or the next file takes the number and gets what is printed
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    with _Stream(before[0], "standard output") as out, _Stream(before[1]) as err:
        sys.stdout, sys.stderr = cast("TextIO", out), cast("TextIO", err)
        try:
            yield
            out.flush()
        finally:
            sys.stdout, sys.stderr = before


class _Nowhere(io.StringIO):
    """Stands in for a stream that was closed before the process began."""

    def write(self, text: str) -> int:
        return len(text)


class _Stream:
    """A text stream whose reader may leave. `name` makes other failures errors, by that name."""

    def __init__(self, stream: TextIO | None, name: str | None = None) -> None:
        self._stream = _Nowhere() if stream is None else stream
        self._name = name

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.flush()

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except UnicodeEncodeError as error:  # the C locale: question marks for other letters
            return self._stream.write(text.encode(error.encoding, "replace").decode(error.encoding))
        except (OSError, ValueError) as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._failed(error)

    def _failed(self, error: OSError | ValueError) -> None:
        # the rest goes to nowhere, also what the interpreter flushes at its end
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        gone = isinstance(error, (BrokenPipeError, ValueError))  # ValueError: closed in the process
        if self._name is not None and isinstance(error, OSError) and not gone:
            raise FileError(f"{self._name} cannot be written ({cause_of(error)})") from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


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

    def exit_at_once(*_: object) -> NoReturn:
        _say("dpsur: stopped")
        os._exit(130)

    signal.signal(signal.SIGINT, exit_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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

    def started(self, *_: object) -> None:
        """There is a checkpoint now, and a trial to be finished."""
        self._training = True

    def trials(self, *_: object) -> None:
        pass

    def evaluated(self, *_: object) -> None:
        pass

    def on_signal(self, *_: object) -> None:
        again, self.asked = self.asked, True
        if again or not self._training:
            raise KeyboardInterrupt
        _say("\ndpsur: stopping after the current trial, or block of captured trials ...")


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    stop = Stop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, stop.on_signal) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


LOG = "errors.log"


def logged_privately(error: InvalidInputError, resumed: str | None) -> str:
    """Write what an error holds back to a log, and return the words that say where it is.

    The log is in `private/` of the run that is resumed, else in `private/` of the cache: a run that
    never began has no folder.
    """
    if error.private is None:
        return ""
    folder = cache_folder() / PRIVATE
    if resumed is not None and (Path(resumed) / PRIVATE).is_dir():
        folder = Path(resumed) / PRIVATE
    path = folder / LOG
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{error}\n  {error.private}\n")
        return f" (the values are private: see {path})"
    return ""
