"""Runs that die, or whose disk or streams fail, and what can be done with what they leave.

Every experiment is made with the selective run of the site, which is seeded: whatever happened on
the way, the release at its end must be the genuine one, byte for byte. So no trial was made twice
with other draws, and none beyond the plan.
"""

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import dpsur.cli
from tests.robustness.cases import Site, new_run
from tests.robustness.harness import (
    CRASH,
    HANG,
    TRACE,
    TRACEBACK,
    UNCLEAR,
    WRONG,
    Fault,
    FileOperations,
    Outcome,
    command,
    fault_of,
    start,
    wait,
)

DIED = 77
RELEASED = ("model.safetensors", "privacy.json", "PRIVACY.md", "README.md")
DEAD_END = "dead end"


@dataclass(frozen=True)
class Ending:
    """What became of one experiment."""

    what: str
    fault: Fault | None
    continued: bool = False  # as opposed to restarted
    kills: int = 0


def difference(run: Path, site: Site) -> str | None:
    """How a finished run differs from the genuine one: its release, or what it spent."""
    for name in RELEASED:
        path = run / "release" / name
        if not path.is_file():
            return f"there is no release/{name}"
        if path.read_bytes() != (site.whole / "release" / name).read_bytes():
            return f"another release/{name}"
    if _last_checkpoint(run) != _last_checkpoint(site.whole):
        return "another ledger or state at the end"
    for path in (run / "private").iterdir():
        if path.stat().st_mode & 0o077:
            return f"others may read {path.name}"
    return None


def _leftovers(run: Path) -> str | None:
    """What a resumed run should have cleared."""
    names = [path.name for path in (*run.iterdir(), *(run / "private").iterdir())]
    hidden = sorted(name for name in names if name.startswith("."))
    return f"temporary files are left: {', '.join(hidden)}" if hidden else None


def _last_checkpoint(run: Path) -> tuple[object, bytes]:
    """The header of the last checkpoint, with the ledger, and its tensors."""
    content = (run / "private" / "checkpoint.safetensors").read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:length]), content[length:]


def recover(run: Path, site: Site) -> tuple[Fault | None, bool]:
    """Resume what a dead run left, or restart it: one of the two commands must work.

    Where resuming does not, its message must name the other, as a command that can be pasted.
    """
    if (run / "release" / RELEASED[0]).is_file():
        text = difference(run, site)
        return None if text is None else Fault(WRONG, f"finished: {text}"), True
    resumed = command("train", "--resume", str(run), "--quiet", cwd=site.root)
    if resumed.status == 0:
        text = difference(run, site) or _leftovers(run)
        return None if text is None else Fault(WRONG, f"resumed: {text}"), True
    if (fault := fault_of(resumed)) is not None:
        return fault, False
    restarted = command(*new_run(site, run), cwd=site.root)
    if (fault := fault_of(restarted)) is not None:
        return fault, False
    if restarted.status != 0:
        both = f"resume: {resumed.error}; restart: {restarted.error}"
        return Fault(DEAD_END, both), False
    if (text := difference(run, site) or _leftovers(run)) is not None:
        return Fault(WRONG, f"restarted: {text}"), False
    named = re.search(r"dpsur train .*--out .*", resumed.error)
    with suppress(ValueError):  # a quote that is not closed
        if named is not None and str(run) in shlex.split(named[0].rstrip(".;,")):
            return None, False
    return Fault(DEAD_END, f"it names no command to restart with: {resumed.error}"), False


def _operations(site: Site, *arguments: str, run: Path, reads: bool) -> list[tuple[str, str]]:
    """The operations on files of a command that nothing happens to."""
    operations = FileOperations([run], reads=reads)

    def after(status: int) -> int:
        print("seen:", json.dumps(operations.seen))
        return status

    outcome = command(*arguments, cwd=site.root, before=operations.install, after=after)
    assert outcome.status == 0, outcome.stderr
    seen: list[tuple[str, str]] = json.loads(outcome.stdout.rpartition("seen:")[2])
    return seen


def _copy(site: Site, run: Path) -> None:
    subprocess.run(["cp", "-a", str(site.halted), str(run)], check=True)


@dataclass(frozen=True)
class Point:
    """An operation of a new or a resumed run, and what happens there."""

    resumed: bool
    number: int
    name: str
    what: str  # "death", "death and files cut short", or the name of an errno

    def __str__(self) -> str:
        kind = "resumed" if self.resumed else "new"
        return f"{kind} run, operation {self.number} ({self.name}): {self.what}"


def crash_points(site: Site, reads: bool, kinds: tuple[str, ...]) -> list[Point]:
    """Every operation on files of a new run and of a resumed one."""
    points = []
    for resumed in (False, True):
        run = site.fresh("count") / "run with spaces"
        if resumed:
            _copy(site, run)
        arguments = _arguments(site, run, resumed)
        seen = _operations(site, *arguments, run=run, reads=reads)
        for number, (name, path) in enumerate(seen, 1):
            shown = f"{name} {Path(path).relative_to(run.parent)}"
            points += [Point(resumed, number, shown, kind) for kind in kinds]
    return points


def _arguments(site: Site, run: Path, resumed: bool) -> tuple[str, ...]:
    return ("train", "--resume", str(run), "--quiet") if resumed else new_run(site, run)


DEATHS = ("death", "death and files cut short")
ERRORS = ("ENOSPC", "EIO", "EACCES", "EROFS")


def death_at(point: Point, site: Site) -> Ending:
    """Die at an operation on files, then resume or restart."""
    run = site.fresh(f"death-{os.getpid()}") / "run with spaces"
    if point.resumed:
        _copy(site, run)

    def die(name: str, path: str) -> None:
        if point.what != DEATHS[0]:
            operations.cut_short()
        os._exit(DIED)

    operations = FileOperations([run], point.number, die)
    outcome = command(
        *_arguments(site, run, point.resumed), cwd=site.root, before=operations.install
    )
    if outcome.status != DIED:
        return Ending(str(point), Fault(UNCLEAR, f"did not come to it: {outcome.stderr[-300:]}"))
    fault, continued = recover(run, site)
    return Ending(str(point), fault, continued)


def error_at(point: Point, site: Site) -> Ending:
    """Let an operation on files fail, once: an error of one line, or the whole run."""
    run = site.fresh(f"error-{os.getpid()}") / "run with spaces"
    if point.resumed:
        _copy(site, run)
    number = getattr(errno, point.what)

    def fail(name: str, path: str) -> None:
        raise OSError(number, os.strerror(number), path)

    operations = FileOperations([run], point.number, fail, reads=True)
    outcome = command(
        *_arguments(site, run, point.resumed), cwd=site.root, before=operations.install
    )
    fault = fault_of(outcome)
    if fault is None and outcome.status == 0:
        text = difference(run, site)
        fault = None if text is None else Fault(WRONG, text)
        return Ending(str(point), fault, continued=True)
    if fault is None and re.search(r"metrics\.jsonl|curves\.png", point.name):
        fault = Fault(WRONG, f"diagnostics kept it from a release: {outcome.error}")
    if fault is None:
        fault, continued = recover(run, site)
        return Ending(str(point), fault, continued)
    return Ending(str(point), fault)


def killed_run(site: Site, rng: Random, number: int, duration: float) -> Ending:
    """SIGKILL at random moments until the run is done, at most five times."""
    run = site.fresh(f"killed-{os.getpid()}") / "run with spaces"
    what, kills, continued = f"run {number}", 0, False
    with open(os.devnull, "w") as null:  # noqa: PTH123
        for _ in range(5):
            resumable = (run / "private" / "checkpoint.safetensors").exists()
            arguments = _arguments(site, run, resumable)
            delay = rng.uniform(0, duration)
            child = start(
                lambda arguments=arguments: dpsur.cli.main(list(arguments)),
                cwd=site.root,
                stdout=null.fileno(),
                stderr=null.fileno(),
            )
            if not wait(child, delay):
                os.kill(child, signal.SIGKILL)
            _, code = os.waitpid(child, 0)
            if not os.WIFSIGNALED(code):
                break
            kills += 1
            what += f", killed after {delay:.3f} s"
            continued = continued or resumable
    fault, resumed = recover(run, site)
    return Ending(what, fault, continued or resumed, kills)


def interrupted_run(site: Site, rng: Random, number: int, duration: float) -> Ending:
    """Ctrl-C at a random moment: it stops and says how to resume, or is done already."""
    run = site.fresh(f"interrupted-{os.getpid()}") / "run with spaces"
    delay = rng.uniform(0.05, duration)  # later than the fork itself
    what = f"run {number}, Ctrl-C after {delay:.3f} s"
    outcome = command(*new_run(site, run), cwd=site.root, timeout=delay)
    if (fault := fault_of(outcome)) is not None:
        return Ending(what, fault)
    if outcome.status not in {0, 130}:
        return Ending(what, Fault(UNCLEAR, f"status {outcome.status}: {outcome.stderr}"))
    fault, continued = recover(run, site)
    return Ending(what, fault, continued, kills=int(outcome.status == 130))


def interrupted_process(site: Site, rng: Random, number: int) -> Ending:
    """Ctrl-C while a real process imports or sets up: no traceback through this package."""
    run = site.fresh(f"interrupted-{os.getpid()}") / "run with spaces"
    delay = rng.uniform(0, 3.0)
    what = f"process {number}, Ctrl-C after {delay:.3f} s"
    process = subprocess.Popen(
        [sys.executable, "-m", "dpsur", *new_run(site, run)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=site.root, env=_environment(),
    )  # fmt: skip
    with suppress(subprocess.TimeoutExpired):
        process.wait(delay)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    stderr = err.decode("utf-8", "replace")
    if TRACEBACK in stderr and "/dpsur/" in stderr:  # not one of the interpreter's own start
        return Ending(what, Fault(TRACE, stderr[-600:]))
    fault, continued = recover(run, site)
    return Ending(what, fault, continued, kills=int(process.returncode != 0))


def timed_run(site: Site) -> float:
    """How long an undisturbed run takes."""
    run = site.fresh("timed") / "run"
    started = time.perf_counter()
    assert command(*new_run(site, run), cwd=site.root).status == 0
    return time.perf_counter() - started


# Streams: real processes, since the interpreter itself writes to them at its end.

STREAMS = ("stdout closed", "stderr closed", "both closed", "reader of stdout gone",
           "reader of stderr gone", "disk of stdout full", "disk of stderr full", "C locale",
           "no home")  # fmt: skip


def stream_commands(site: Site, run: Path) -> dict[str, tuple[str, ...]]:
    """A command of each kind: short, with an error, and a training with progress."""
    training = tuple(argument for argument in new_run(site, run) if argument != "--quiet")
    return {
        "proof": ("proof",),
        "error": ("verify", "nowhere"),
        "train": training,
    }


def with_stream(name: str, stream: str, site: Site) -> Ending:
    """Run a command whose streams fail: no traceback, and a training makes its release."""
    run = site.fresh(f"stream-{os.getpid()}") / "run"
    arguments = stream_commands(site, run)[name]
    outcome = _with_stream([sys.executable, "-m", "dpsur", *arguments], stream, site.root)
    ending = f"{name}, {stream}"
    if outcome.number is not None and not (
        outcome.number == signal.SIGPIPE and "reader" in stream and name != "train"
    ):
        return Ending(ending, Fault(CRASH, f"signal {outcome.number}"))
    if TRACEBACK in outcome.stderr or "Exception ignored" in outcome.stderr:
        return Ending(ending, Fault(TRACE, outcome.stderr[-300:]))
    if outcome.interrupted:
        return Ending(ending, Fault(HANG, "it did not end"))
    if name == "train" and (text := difference(run, site)) is not None:
        return Ending(ending, Fault(WRONG, f"status {outcome.status}: {text} {outcome.stderr}"))
    return Ending(ending, None, continued=True)


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG"))}
    package = str(Path(dpsur.cli.__file__).parents[2])  # this very package, wherever it is run
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": package}


def _with_stream(arguments: list[str], stream: str, cwd: Path) -> Outcome:
    environment = _environment()
    redirections = {
        "stdout closed": ">&-",
        "stderr closed": "2>&-",
        "both closed": ">&- 2>&-",
        "disk of stdout full": ">/dev/full",
        "disk of stderr full": "2>/dev/full",
    }
    if stream == "C locale":
        environment |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    if stream == "no home":
        environment["HOME"] = "/proc/nowhere"
        environment.pop("DPSUR_CACHE", None)
    script = f"exec {shlex.join(arguments)} {redirections.get(stream, '')}"
    broken = {"reader of stdout gone": 1, "reader of stderr gone": 2}.get(stream)
    ends = {1: subprocess.PIPE, 2: subprocess.PIPE}
    reader = writer = -1
    if broken is not None:
        reader, writer = os.pipe()
        os.close(reader)
        ends[broken] = writer
    started = time.perf_counter()
    process = subprocess.Popen(
        ["/bin/sh", "-c", script], stdin=subprocess.DEVNULL, stdout=ends[1], stderr=ends[2],
        cwd=cwd, env=environment,
    )  # fmt: skip
    if writer >= 0:
        os.close(writer)
    interrupted = False
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        interrupted = True
        process.kill()
        out, err = process.communicate()
    code = process.returncode
    return Outcome(
        status=code if code >= 0 else None,
        number=-code if code < 0 else None,
        stdout=(out or b"").decode("utf-8", "replace"),
        stderr=(err or b"").decode("utf-8", "replace"),
        seconds=time.perf_counter() - started,
        interrupted=interrupted,
    )


# Controls: faults put in on purpose. A harness that does not report them proves nothing.


def controls(site: Site) -> Iterator[tuple[str, str, Fault | None]]:
    """What each fault must be reported as, and what was reported."""
    folder = site.fresh("controls")

    def raising() -> None:
        import dpsur.cli.verify as module

        def broken(_: object) -> int:
            raise ZeroDivisionError

        module.verification = broken  # type: ignore[assignment]

    def crashing() -> None:
        import dpsur.cli.verify as module

        module.verification = lambda _: os.abort()  # type: ignore[assignment, return-value]

    def hanging() -> None:
        import dpsur.cli.verify as module

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        module.verification = lambda _: time.sleep(60)  # type: ignore[assignment, return-value, func-returns-value]

    for name, expected, before in (
        ("an exception", TRACE, raising),
        ("an abort", CRASH, crashing),
    ):
        outcome = command("verify", str(site.whole), cwd=folder, before=before)
        yield name, expected, fault_of(outcome)
    from tests.robustness import harness

    patience, harness.PATIENCE = harness.PATIENCE, 0.2
    outcome = command("verify", str(site.whole), cwd=folder, before=hanging, timeout=0.2)
    harness.PATIENCE = patience
    yield "a command that does not stop", HANG, fault_of(outcome)
    yield "verify that accepts everything", WRONG, _accepting(site)
    yield "a checkpoint that is not written whole", DEAD_END, _torn_checkpoint(site)
    yield "fresh noise after a resume", WRONG, _redrawn(site)


def _accepting(site: Site) -> Fault | None:
    import dpsur.cli.verify as module
    from dpsur.runs.verification import Verification
    from tests.robustness.cases import run_case

    plain = module.verification
    module.verification = lambda _: Verification([], {}, [])
    try:
        reports = (run_case(site, "statement", 0, number) for number in range(10))
        return next((r.fault for r in reports if r.fault and r.fault.kind == WRONG), None)
    finally:
        module.verification = plain


def _patched(module: object, name: str, value: object, work: Callable[[], Ending]) -> Fault | None:
    plain = getattr(module, name)
    setattr(module, name, value)
    try:
        return work().fault
    finally:
        setattr(module, name, plain)


def _torn_checkpoint(site: Site) -> Fault | None:
    """The file is written in place: cut short, it is the only one there is."""
    from dpsur.runs import checkpoint

    def in_place(path: Path, content: bytes, mode: int = 0o644) -> None:
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def work() -> Ending:
        points = crash_points(site, reads=False, kinds=DEATHS[1:])
        fsyncs = [p for p in points if p.resumed and "fsync" in p.name and "checkpoint" in p.name]
        return death_at(fsyncs[0], site)

    return _patched(checkpoint, "write_atomically", in_place, work)


def _redrawn(site: Site) -> Fault | None:
    """A resumed run that draws with another key than it was started with."""
    from dpsur.mechanism.streams import Key, Streams

    def other_key(self: Streams, positions: object) -> None:
        self.key = Key(bytes(len(self.key.content)))

    def work() -> Ending:
        points = crash_points(site, reads=False, kinds=DEATHS[:1])
        middle = [p for p in points if not p.resumed and "open" in p.name and "metrics" in p.name]
        return death_at(middle[len(middle) // 2], site)

    return _patched(Streams, "restore", other_key, work)
