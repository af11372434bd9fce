"""A line that says what is being computed while nothing else is shown."""

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

# What is done sooner needs no line.
PATIENCE = 1.0
_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


@contextmanager
def silenced(quiet: bool = True) -> Iterator[None]:
    """Show no status lines inside, if `quiet` or silenced already."""
    token = _quiet.set(quiet or _quiet.get())
    try:
        yield
    finally:
        _quiet.reset(token)


def is_silenced() -> bool:
    return _quiet.get()


@contextmanager
def status(text: str) -> Iterator[None]:
    """Show on stderr what takes long: live on a terminal, elsewhere one line after a second."""
    if _quiet.get() or sys.stderr is None or sys.stderr.closed:
        yield
        return
    with ExitStack() as shown:
        if not (sys.stderr.isatty() and _live(text, shown)):
            timer = threading.Timer(PATIENCE, _say, [text])
            timer.daemon = True
            timer.start()
            shown.callback(timer.cancel)
        yield


def notes(lines: Iterable[str]) -> None:
    """Print lines on stderr, unless silenced."""
    if _quiet.get() or sys.stderr is None or sys.stderr.closed:
        return
    for line in lines:
        _print(f"dpsur: {line}")


def _live(text: str, shown: ExitStack) -> bool:
    try:
        from rich.console import Console
    except ImportError:
        return False
    shown.enter_context(Console(stderr=True).status(text))
    return True


def _say(text: str) -> None:
    _print(f"dpsur: {text} ...")


def _print(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return  # nobody is there to read it
