"""A line that says what is being computed while nothing else is shown.

What notebooks show: small tables as HTML.
"""

import html
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

# What is done sooner needs no line.
PATIENCE = 1.0
# Seconds between two lines on how far it is, where there is no terminal.
BETWEEN = 30.0
_quiet: ContextVar[bool] = ContextVar("quiet", default=False)
_shown: ContextVar["_Shown | None"] = ContextVar("shown", default=None)


@dataclass
class _Shown:
    """A line that is shown: its text, rich's form of it on a terminal, and the times of it."""

    text: str
    live: Any = None
    begun: float = field(default_factory=time.monotonic)
    last: float = field(default_factory=time.monotonic)


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
    line = _Shown(text)
    token = _shown.set(line)
    with ExitStack() as shown:
        shown.callback(_shown.reset, token)
        if sys.stderr.isatty():
            from rich.console import Console

            line.live = shown.enter_context(Console(stderr=True).status(text))
        if line.live is None:
            timer = threading.Timer(PATIENCE, _say, [text])
            timer.daemon = True
            timer.start()
            shown.callback(timer.cancel)
        yield


def advance(done: int, total: int) -> None:
    """Say how far the work of the innermost `status` is, and how long the rest takes."""
    line, now = _shown.get(), time.monotonic()
    if line is None or not 0 < done < total:
        return
    left = (now - line.begun) / done * (total - done)
    text = f"{line.text}: {done} of {total}, about {left:.0f} s left"
    if line.live is not None:
        line.live.update(text)
    elif now - line.last > BETWEEN:
        line.last = now
        _say(text)


def notes(lines: Iterable[str]) -> None:
    if _quiet.get() or sys.stderr is None or sys.stderr.closed:
        return
    for line in lines:
        _print(f"dpsur: {line}")


def _say(text: str) -> None:
    _print(f"dpsur: {text} ...")


def _print(line: str) -> None:
    with suppress(OSError, ValueError):  # nobody is there to read it
        print(line, file=sys.stderr, flush=True)


def html_table(title: str, rows: Iterable[tuple[object, object]]) -> str:
    cells = "".join(
        f'<tr><th style="text-align:left">{html.escape(str(name))}</th>'
        f'<td style="text-align:left">{html.escape(str(value))}</td></tr>'
        for name, value in rows
    )
    return f"<b>{html.escape(title)}</b><table>{cells}</table>"


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook. IPython is not imported to find out."""
    found = sys.modules.get("IPython")
    shell = None if found is None else found.get_ipython()
    return shell is not None and hasattr(shell, "kernel")
