"""Observers of a run: metrics, evaluations, curves, and a progress bar."""

import io
import json
import math
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from dpsur.display import NotebookLine, in_notebook
from dpsur.errors import DiagnosticsWarning, describe_os_error
from dpsur.mechanism.state import Verdict
from dpsur.mechanism.trial import Progress
from dpsur.privacy.plan import Plan
from dpsur.privacy.statement import format_epsilon, metric_text
from dpsur.runs.evaluation import shown_scores
from dpsur.runs.files import METRICS, finite, write_atomically
from dpsur.status import is_silenced


class Recorder:
    """Keeps rows in memory and, where there is a folder, in a file as long as it can be written.

    What goes wrong here is a warning: a run does not depend on its record.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.rows: list[dict[str, Any]] = []
        self._path = None if folder is None else folder / METRICS
        self._clock = time.perf_counter()

    def started(self, plan: Plan, progress: Progress) -> None:  # noqa: ARG002
        """Forget rows of trials after the checkpoint: those trials are repeated."""
        if self._path is None:
            return
        self._on_disk(self._reload)
        self.rows = [row for row in self.rows if row["trial"] <= progress.ledger.trials]
        self._on_disk(self._rewrite)
        self._clock = time.perf_counter()

    def trials(self, progress: Progress, verdicts: Sequence[Verdict]) -> None:
        """Note trials; those of a block share its time."""
        seconds = (time.perf_counter() - self._clock) / max(1, len(verdicts))
        accepted = [bool(verdict.accept) for verdict in verdicts]
        trial = progress.ledger.trials - len(verdicts)
        updates = progress.ledger.updates - sum(accepted)
        for verdict, accept in zip(verdicts, accepted, strict=True):
            trial, updates = trial + 1, updates + accept
            private = {name: float(value) for name, value in verdict.private.items()}
            self._add(
                {
                    "kind": "trial",
                    "trial": trial,
                    "updates": updates,
                    "accepted": accept,
                    **private,
                    "seconds": round(seconds, 6),
                }
            )
        self._clock = time.perf_counter()

    def evaluated(self, progress: Progress, scores: dict[str, float], epsilon: float) -> None:
        """Note an evaluation on public records."""
        self._add(
            {
                "kind": "evaluation",
                "trial": progress.ledger.trials,
                "updates": progress.ledger.updates,
                "epsilon": epsilon,
                **scores,
            }
        )
        self._clock = time.perf_counter()

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self._on_disk(lambda path: _append(path, _line(row)))

    def _on_disk(self, action: Callable[[Path], None]) -> None:
        """Do something with the file; leave it alone for the rest of the run if that fails."""
        if self._path is None:
            return
        try:
            action(self._path)
        except OSError as error:
            warn_of_diagnostics(self._path, describe_os_error(error))
            self._path = None

    def _reload(self, path: Path) -> None:
        lines = path.read_bytes().splitlines() if path.exists() else []
        self.rows = [row for row in map(_parse, lines) if row is not None]

    def _rewrite(self, path: Path) -> None:
        write_atomically(path, "".join(map(_line, self.rows)).encode(), mode=0o600)


def warn_of_diagnostics(path: Path, reason: str) -> None:
    """Say that a private record is incomplete, and that nothing else is."""
    warnings.warn(
        f"{path} is incomplete ({reason}); the run and its release are not affected",
        DiagnosticsWarning,
        stacklevel=2,
    )


def _append(path: Path, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(line)


def _line(row: dict[str, Any]) -> str:
    return json.dumps(finite(row), allow_nan=False) + "\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    # The last line may be cut off by a crash; its trial is repeated after the checkpoint.
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and _is_row(row) else None


def _is_row(row: dict[str, Any]) -> bool:
    """Whether a row has what the curves are drawn from."""
    if type(row.get("trial")) is not int or type(row.get("updates")) is not int:
        return False
    if row.get("kind") == "trial":
        return True
    figures = (row.get(name) for name in ("epsilon", "accuracy", "micro_f1", "r2", "loss"))
    numbers = all(isinstance(x, (int, float, type(None))) for x in figures)
    return row.get("kind") == "evaluation" and numbers


def draw_curves(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw accuracy and acceptance over the run; a failure is a warning."""
    try:
        write_atomically(path, _curves(rows), mode=0o600)
    except OSError as error:
        warn_of_diagnostics(path, describe_os_error(error))
    except Exception as error:  # whatever a plotting library may raise; its text may quote rows
        warn_of_diagnostics(path, type(error).__name__)


def _curves(rows: list[dict[str, Any]]) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    trials = [row for row in rows if row["kind"] == "trial"]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    known = ("accuracy", "micro_f1", "r2", "loss")
    score = next(name for name in known if name == "loss" or any(name in r for r in evaluations))
    if evaluations:
        left.plot(
            [r.get("epsilon") for r in evaluations], [r.get(score) for r in evaluations], "o-", ms=3
        )
    left.set(xlabel="epsilon spent", ylabel=f"test {score}", title="Public test set")
    right.plot([r["trial"] for r in trials], [r["updates"] for r in trials], label="accepted")
    if trials:
        right.plot([0, trials[-1]["trial"]], [0, trials[-1]["trial"]], ":", label="all trials")
    right.set(xlabel="trials", ylabel="accepted updates", title="Private: do not publish")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    image = io.BytesIO()
    figure.savefig(image, dpi=120, format="png")
    return image.getvalue()


class RandomDelays:
    """An observer that waits after every accepted update, before the observers after it are called.

    A delay takes as long as a search for another update would where candidates are accepted least
    often: a geometric number of trials. It is not drawn from the streams of the run, which it
    leaves as they are.
    """

    def __init__(
        self,
        wait: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._wait, self._clock = wait, clock
        self._random = random.SystemRandom()
        self._accept = 1.0
        self._worked, self._made = 0.0, 0
        self._since = clock()

    def started(self, plan: Plan, progress: Progress) -> None:  # noqa: ARG002
        """Note how rarely a candidate may be accepted."""
        assert plan.typical.gate is not None
        self._accept = plan.typical.gate.accept_min
        self._since = self._clock()

    def trials(self, progress: Progress, verdicts: Sequence[Verdict]) -> None:  # noqa: ARG002
        """Wait once for every accepted update of a block, in units of what a trial took so far."""
        self._worked += self._clock() - self._since
        self._made += len(verdicts)
        for verdict in verdicts:
            if verdict.accept:
                self._wait(self._search() * self._worked / self._made)
        self._since = self._clock()

    def _search(self) -> int:
        """Trials until one is accepted, with the least probability there is."""
        if self._accept == 1:
            return 1
        return math.ceil(self._random.expovariate(-math.log1p(-self._accept)))

    def evaluated(self, progress: Progress, scores: dict[str, float], epsilon: float) -> None:
        """Nothing."""


PRIVATE_WARNING = (
    "rejections, loss differences and timings below depend on private records: do not share them"
)


_NOTEBOOK_SECONDS = 0.5  # between two pictures of the bar
_SECONDS = 2.0  # between two figures of what is spent, each of which takes some arithmetic


class ProgressBar:
    """An observer of `dpsur.fit`: a live bar on a terminal or in a notebook, else lines.

    The bar shows updates, the epsilon spent so far, updates per second and the time left. Elsewhere
    there is a line for each evaluation.
    """

    def __init__(self, quiet: bool = False, show_private: bool = False) -> None:
        self._quiet = quiet
        self._show_private = show_private and not quiet
        self._plan: Plan | None = None
        self._bar: Any = None
        self._task: Any = None
        self._clock = time.perf_counter()
        self._begun = self._due = 0.0
        self._first = 0
        self._spent = self._score = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def started(self, plan: Plan, progress: Progress) -> None:
        """Show the plan and start the bar."""
        self._plan = plan
        if self._quiet:
            return
        self._say(plan.describe())
        if self._show_private:
            self._say(f"warning: {PRIVATE_WARNING}")
        if in_notebook():
            self._bar = _NotebookBar(plan)
            self._begun, self._first = time.perf_counter(), plan.elapsed(progress.ledger)
        elif sys.stderr.isatty():
            self._start_bar(plan, progress)

    def trials(self, progress: Progress, verdicts: Sequence[Verdict]) -> None:
        """Advance."""
        if self._plan is None:
            return
        if self._show_private:
            self._show(progress, verdicts)
        if self._bar is None:
            return
        now, plan = time.perf_counter(), self._plan
        passed = plan.elapsed(progress.ledger)
        if now >= self._due and not plan.run_all_trials and progress.ledger.updates:
            spent = format_epsilon(plan.spent(progress.ledger))
            self._spent = f"epsilon {spent} of {plan.budget.epsilon:g}"
            self._due = time.perf_counter() + _SECONDS
        rate = (passed - self._first) / max(now - self._begun, 1e-9)
        status = ", ".join(text for text in (self._spent, self._score) if text)
        self._bar.update(self._task, completed=passed, status=status, rate=f"{rate:.1f}/s")
        if passed >= plan.duration:
            self._bar.stop()

    def _show(self, progress: Progress, verdicts: Sequence[Verdict]) -> None:
        seconds = (time.perf_counter() - self._clock) / max(1, len(verdicts))
        first = progress.ledger.trials - len(verdicts) + 1
        for number, verdict in enumerate(verdicts, first):
            figures = ", ".join(f"{n} {float(v):+.4f}" for n, v in verdict.private.items())
            outcome = "accepted" if verdict.accept else "rejected"
            self._say(f"trial {number}: {outcome}, {figures}, {seconds:.3f} s")
        rejected = progress.ledger.trials - progress.ledger.updates
        self._say(f"{rejected} rejected so far")
        self._clock = time.perf_counter()

    def evaluated(self, progress: Progress, scores: dict[str, float], epsilon: float) -> None:
        """Show the budget spent and the accuracy on public records."""
        if self._quiet or self._plan is None:
            return
        passed = f"{self._plan.elapsed(progress.ledger)}/{self._plan.duration}"
        if self._plan.run_all_trials:  # accuracy at a given trial reveals rejections
            if self._bar is None:
                self._say(f"{passed} trials")
            return
        name, figure = shown_scores(scores)[0]
        base = f" (most frequent class {scores['base_rate']:.2%})" if "base_rate" in scores else ""
        score = f"test {name} {figure}{base}"
        spent = f"epsilon {format_epsilon(epsilon)} of {self._plan.budget.epsilon:g}"
        if self._bar is not None:
            self._spent, self._score = spent, score
            self._bar.update(self._task, status=f"{spent}, {score}")
        else:
            self._say(f"{passed}: {spent}, {score}")

    def measured(self, progress: Progress, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show noisy values of the training records, which are paid for."""
        if self._quiet or self._plan is None:
            return
        passed = f"{self._plan.elapsed(progress.ledger)}/{self._plan.duration}"
        shown = ", ".join(metric_text(row) for row in rows)
        if self._bar is not None:
            self._bar.update(self._task, status=shown)
        else:
            self._say(f"{passed}: {shown} (noisy, paid)")

    def _start_bar(self, plan: Plan, progress: Progress) -> None:
        try:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                TextColumn,
                TimeRemainingColumn,
            )
            from rich.progress import Progress as RichProgress
        except ImportError:
            return
        self._bar = RichProgress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("trials" if plan.run_all_trials else plan.unit),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[status]}"),
            console=Console(stderr=True),
        )
        self._begun, self._first = time.perf_counter(), plan.elapsed(progress.ledger)
        self._task = self._bar.add_task(
            "training", total=plan.duration, completed=self._first, status="", rate=""
        )
        self._bar.start()

    def _say(self, text: str) -> None:
        if self._bar is not None and not isinstance(self._bar, _NotebookBar):
            self._bar.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)


class _NotebookBar:
    """What is used of rich's progress bar, as one line of a notebook."""

    def __init__(self, plan: Plan) -> None:
        self._total, self._done = plan.duration, 0
        self._unit = "trials" if plan.run_all_trials else plan.unit
        self._status = self._rate = ""
        self._line, self._due = NotebookLine(), 0.0

    def update(
        self, task: Any, completed: int | None = None, status: str = "", rate: str = ""
    ) -> None:
        """Advance; the notebook is told twice a second."""
        del task
        self._done = self._done if completed is None else completed
        self._status, self._rate = status or self._status, rate or self._rate
        if time.perf_counter() >= self._due:
            self._show()

    def _show(self) -> None:
        parts = (f"{self._done}/{self._total} {self._unit}", self._rate, self._status)
        self._line.show(self._done, self._total, ", ".join(part for part in parts if part))
        self._due = time.perf_counter() + _NOTEBOOK_SECONDS

    def stop(self) -> None:
        self._show()


def default_progress(observers: Sequence[Any]) -> "ProgressBar | None":
    """A bar where someone watches: on a terminal or in a notebook, unless there is one already."""
    watched = in_notebook() or (sys.stderr is not None and sys.stderr.isatty())
    if is_silenced() or not watched or any(isinstance(one, ProgressBar) for one in observers):
        return None
    return ProgressBar()
