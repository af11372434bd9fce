"""The operator's view of a run.

By default it shows only what the privacy accounting covers: how far the run is, the budget spent
and accuracy on public records.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from dpsur.display import NotebookLine, in_notebook
from dpsur.mechanism.state import Verdict
from dpsur.mechanism.trial import Progress
from dpsur.privacy.plan import Plan
from dpsur.privacy.statement import format_epsilon, metric_text
from dpsur.runs.evaluation import shown_scores
from dpsur.status import is_silenced

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
