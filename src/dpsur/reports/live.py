"""A page about a run that is under way: it reloads itself, and stops doing so when the run ends.

    with LivePage(Path("run/report.html"), "run") as page:
        ...                                   # page is an observer of the run

The page shows what the progress bar does: how far the run is, the budget spent and scores on public
records. How often it changes is a figure of time, so only its owner can read it, until the report
of the finished run takes its place.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from dpsur.mechanism.state import Verdict
from dpsur.mechanism.trial import Progress
from dpsur.privacy.plan import Plan
from dpsur.privacy.statement import metric_text
from dpsur.reports.html import chart_section, page, two_columns
from dpsur.reports.officer import epsilon_text
from dpsur.runs.evaluation import shown_scores
from dpsur.runs.files import write_atomically
from dpsur.runs.plots import Curve

# Seconds between two pages, and after which a browser reads the next.
SECONDS, RELOAD = 2.0, 3


class LivePage:
    """An observer that keeps a page of the run; leaving the context ends its reloading."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self._plan: Plan | None = None
        self._passed = 0
        self._due = 0.0
        self._spent = self._scores = self._paid = ""
        self._evaluated: list[tuple[float, float]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._plan is not None:
            self._write("stopped before its end" if kind else "finished")

    def started(self, plan: Plan, progress: Progress) -> None:
        """Show the plan."""
        self._plan, self._passed = plan, plan.elapsed(progress.ledger)
        self._write()

    def trials(self, progress: Progress, verdicts: Sequence[Verdict]) -> None:
        """Advance."""
        del verdicts
        assert self._plan is not None
        self._passed = self._plan.elapsed(progress.ledger)
        if time.perf_counter() < self._due:
            return
        if not self._plan.run_all_trials and progress.ledger.updates:
            self._note_spent(self._plan.spent(progress.ledger))
        self._write()

    def evaluated(self, progress: Progress, scores: dict[str, float], epsilon: float) -> None:
        """Show the budget spent and the scores on public records."""
        del progress
        assert self._plan is not None
        if self._plan.run_all_trials:  # accuracy at a given trial reveals rejections
            return
        self._note_spent(epsilon)
        self._scores = ", ".join(f"{name} {figure}" for name, figure in shown_scores(scores))
        if "accuracy" in scores:
            self._evaluated.append((self._passed, scores["accuracy"]))
        self._write()

    def measured(self, progress: Progress, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show noisy values of the training records, which are paid for."""
        del progress
        self._paid = ", ".join(metric_text(row) for row in rows)
        self._write()

    def _note_spent(self, epsilon: float) -> None:
        assert self._plan is not None
        self._spent = f"{epsilon_text(epsilon)} of {self._plan.budget.epsilon:g}"

    def _write(self, ended: str | None = None) -> None:
        plan = self._plan
        assert plan is not None
        unit = "trials" if plan.run_all_trials else plan.unit
        rows = [
            ("Progress", f"{self._passed:,} of {plan.duration:,} {unit}"),
            ("Epsilon spent so far", self._spent or "not yet known"),
            ("Plan", plan.describe()),
        ]
        rows += [("Public test records", self._scores)] if self._scores else []
        rows += [("Training records (noisy, paid)", self._paid)] if self._paid else []
        words = f"The run has {ended}." if ended else "The run is under way; this page follows it."
        bar = f'<progress value="{self._passed}" max="{plan.duration}"></progress>'
        parts = [f"<section><p>{words}</p>{bar}</section>", two_columns("So far", rows)]
        if len(self._evaluated) > 1:
            updates, accuracies = zip(*self._evaluated, strict=True)
            curve = Curve("accuracy", updates, accuracies)
            note = "Accuracy of the kept weights, on public test records."
            chart = chart_section("Accuracy", curve, unit, "accuracy", note, percent=True)
            parts.append(f'<div class="grid">{chart}</div>')
        reload = None if ended else RELOAD
        text = page(f"Privacy report: {self._name}", parts, "Written by dpsur.", reload=reload)
        write_atomically(self._path, text.encode("utf-8"), mode=0o600)
        self._due = time.perf_counter() + SECONDS
