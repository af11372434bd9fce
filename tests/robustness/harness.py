"""Commands in forked processes, and what may be wrong with the way they end.

The process that forks has imported everything, so a command costs milliseconds, not the seconds
that importing torch takes. A child that dies of a signal is seen as a crash, and whatever a child
changes (limits, audit hooks, patched functions) is gone with it.
"""

import errno
import importlib
import io
import os
import re
import resource
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dpsur.cli

# 1: `verify` found faults, 2: bad input, 3: nothing is released, 130: stopped on request.
STATUSES = {0, 1, 2, 3, 130}
UNCAUGHT = 99  # our own status for an exception that came out of the command
TRACEBACK = "Traceback (most recent call last)"
LONGEST_MESSAGE = 10_000  # it may quote what was given
# On top of what the forking process has mapped: a claim of more memory must be refused.
EXTRA_MEMORY = 4 * 2**30
LARGEST_FILE = 200 * 2**20
PATIENCE = 30.0  # seconds in which a command must stop on Ctrl-C

TRACE, CRASH, HANG, UNCLEAR, WRONG = "traceback", "crash", "hang", "unclear", "wrong guarantee"
FAILURES = (TRACE, CRASH, HANG, UNCLEAR, WRONG)


@dataclass(frozen=True)
class Outcome:
    """How a command ended. `status` is None for one that a signal ended."""

    status: int | None
    number: int | None
    stdout: str
    stderr: str
    seconds: float
    interrupted: bool = False  # it took too long and was sent Ctrl-C

    @property
    def error(self) -> str:
        """The lines of the error, without warnings and progress."""
        lines = [line for line in self.stderr.splitlines() if line.strip()]
        first = next((i for i, line in enumerate(lines) if "error: " in line), len(lines))
        return "\n".join(line for line in lines[first:] if "dpsur: warning: " not in line)


@dataclass(frozen=True)
class Fault:
    """What is wrong with an outcome: one of FAILURES, and the details."""

    kind: str
    text: str


def import_everything() -> None:
    """Import all commands and what they import late, so that forked children need not."""
    for home in dpsur.cli.COMMANDS.values():
        importlib.import_module(home.partition(":")[0])
    import torch
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    torch.set_num_threads(1)
    figure = Figure()
    FigureCanvasAgg(figure)
    figure.subplots().plot([1, 2])
    drawn = io.BytesIO()
    figure.savefig(drawn)

    def savefig(figure: Figure, file: Any, **_: Any) -> None:
        """Write a picture that was drawn before: drawing takes longer than a small training."""
        if not hasattr(file, "write"):
            Path(file).write_bytes(drawn.getvalue())
        else:
            file.write(drawn.getvalue())

    Figure.savefig = savefig  # type: ignore[method-assign, assignment]


def command(
    *arguments: str,
    cwd: Path,
    before: Callable[[], None] = lambda: None,
    after: Callable[[int], int] = lambda status: status,
    timeout: float = 60.0,
) -> Outcome:
    """Run `dpsur ARGUMENTS` in a forked process. `before` and `after` run in that process."""

    def work() -> int:
        before()
        return after(_status(lambda: dpsur.cli.main(list(arguments))))

    return forked(work, cwd=cwd, timeout=timeout)


def forked(work: Callable[[], int], *, cwd: Path, timeout: float = 60.0) -> Outcome:
    """Run a function in a forked process and report how that ended."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.perf_counter()
        child = start(work, cwd=cwd, stdout=out.fileno(), stderr=err.fileno())
        interrupted = False
        if not wait(child, timeout):
            interrupted = True
            os.kill(child, signal.SIGINT)
            if not wait(child, PATIENCE):
                os.kill(child, signal.SIGKILL)
        _, code = os.waitpid(child, 0)
        seconds = time.perf_counter() - started
        texts = [_text(file) for file in (out, err)]
    ended = os.WIFEXITED(code)
    return Outcome(
        status=os.WEXITSTATUS(code) if ended else None,
        number=None if ended else os.WTERMSIG(code),
        stdout=texts[0],
        stderr=texts[1],
        seconds=seconds,
        interrupted=interrupted,
    )


def start(work: Callable[[], int], *, cwd: Path, stdout: int, stderr: int) -> int:
    """Fork a process that runs a function; returns its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = UNCAUGHT
    try:
        os.chdir(cwd)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
            os.dup2(source, target)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _limit()
        status = _status(work)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def wait(child: int, timeout: float) -> bool:
    """Whether a process ends in time. It is not reaped."""
    descriptor = os.pidfd_open(child)
    try:
        return bool(select.select([descriptor], [], [], timeout)[0])
    finally:
        os.close(descriptor)


def _status(work: Callable[[], int]) -> int:
    """What the interpreter would have exited with."""
    try:
        return work()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return UNCAUGHT


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + EXTRA_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def unreachable(*_: Any) -> None:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    socket.socket.connect = unreachable  # type: ignore[method-assign, assignment]
    socket.getaddrinfo = unreachable  # type: ignore[assignment]


def _text(file: Any) -> str:
    file.seek(0)
    content: bytes = file.read()
    return content.decode("utf-8", "replace")


def fault_of(outcome: Outcome) -> Fault | None:
    """What is wrong with the way a command ended, whatever it was asked to do."""
    if outcome.number is not None:
        if outcome.interrupted and outcome.number == signal.SIGKILL:
            return Fault(HANG, "it did not end, nor stop on Ctrl-C")
        return Fault(CRASH, f"{signal.Signals(outcome.number).name}: {outcome.stderr[-500:]}")
    if outcome.status == UNCAUGHT or TRACEBACK in outcome.stderr:
        if outcome.interrupted and "KeyboardInterrupt" in outcome.stderr.splitlines()[-1]:
            return Fault(TRACE, f"on Ctrl-C: {_raised_at(outcome.stderr)}")
        return Fault(TRACE, _raised_at(outcome.stderr))
    if outcome.status not in STATUSES:
        return Fault(UNCLEAR, f"exit status {outcome.status}: {outcome.stderr[-300:]}")
    if outcome.status in {2, 3}:
        if not outcome.error.startswith("dpsur: error: "):
            return Fault(UNCLEAR, f"status {outcome.status} without an error: {outcome.stderr!r}")
        if "\n" in outcome.error or len(outcome.error) > LONGEST_MESSAGE:
            return Fault(UNCLEAR, f"not one line of a message: {outcome.error[:500]!r}")
    return None


def _raised_at(stderr: str) -> str:
    """The exception, and the innermost line of this package that it came from."""
    places = re.findall(r'File "([^"]*/dpsur/[^"]*)", line (\d+)', stderr)
    last = stderr.strip().splitlines()[-1] if stderr.strip() else "nothing was printed"
    if not places:
        return last[:300]
    file, line = places[-1]
    return f"{last[:300]} (at {file.rpartition('/dpsur/')[2]}:{line})"


# Operations on files, seen by an audit hook: whichever way a file is opened, renamed or deleted.
_EVENTS = {
    "open": "open",
    "os.rename": "rename",  # os.replace too
    "os.mkdir": "mkdir",
    "os.remove": "remove",
    "os.rmdir": "rmdir",
    "os.chmod": "chmod",
    "os.link": "link",
    "os.truncate": "truncate",
    "os.listdir": "list",
    "os.scandir": "list",
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass
class FileOperations:
    """Counts the operations on files below some folders, and lets something happen at one of them.

    `at` is called before operation number `number`, counted from 1, with its name and path.
    `reads` counts opening a file to read it, and listing a folder, as well.
    """

    folders: Sequence[Path]
    number: int = 0
    at: Callable[[str, str], None] = lambda name, path: None
    reads: bool = False
    seen: list[tuple[str, str]] = field(default_factory=list)
    unsynced: dict[str, None] = field(default_factory=dict)

    def install(self) -> None:
        """Watch this process from now on. Hooks cannot be removed: only for forked children."""
        roots = tuple(str(folder.absolute()) for folder in self.folders)
        busy = False

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal busy
            if busy or event not in _EVENTS:
                return
            name, path = _EVENTS[event], arguments[0]
            if not isinstance(path, (str, bytes, os.PathLike)):
                return
            # Relative to an open folder, as rmtree deletes: only ever below ours here.
            relative = event in {"os.remove", "os.rmdir"} and arguments[1] != -1
            place = str(Path(os.fsdecode(path)).absolute())
            if not (relative or place.startswith(roots)):
                return
            writes = event != "open" or (arguments[2] or 0) & _WRITING
            if name == "list" or not writes:
                if not self.reads:
                    return
                name = "read" if event == "open" else name
            busy = True
            try:
                self._happens(name, place)
                if event == "open" and writes:
                    self.unsynced[place] = None
                elif event == "os.rename" and place in self.unsynced:
                    del self.unsynced[place]
                    self.unsynced[str(Path(os.fsdecode(arguments[1])).absolute())] = None
            finally:
                busy = False

        plain_fsync = os.fsync

        def fsync(file: Any) -> None:
            nonlocal busy
            descriptor = file if isinstance(file, int) else file.fileno()
            place = str(Path(f"/proc/self/fd/{descriptor}").readlink())
            if place.startswith(roots):
                busy = True
                try:
                    self._happens("fsync", place)
                    self.unsynced.pop(place, None)
                finally:
                    busy = False
            plain_fsync(descriptor)

        os.fsync = fsync
        sys.addaudithook(hook)

    def _happens(self, name: str, path: str) -> None:
        self.seen.append((name, path))
        if len(self.seen) == self.number:
            self.at(name, path)

    def cut_short(self) -> None:
        """Cut every file that was not synced to half its length, as a power failure may."""
        for place in map(Path, self.unsynced):
            if place.is_file():
                os.truncate(place, place.stat().st_size // 2)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for everything, which is the home, the cache and the current folder meanwhile."""
    with tempfile.TemporaryDirectory(prefix="dpsur-robustness-") as name:
        folder = Path(name).resolve()
        before, place = dict(os.environ), Path.cwd()
        for variable in ("DPSUR_DATA", "XDG_CACHE_HOME", "WORLD_SIZE"):
            os.environ.pop(variable, None)
        os.environ |= {"HOME": name, "DPSUR_CACHE": str(folder / "cache")}
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(place)
            os.environ.clear()
            os.environ.update(before)
