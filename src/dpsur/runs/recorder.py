"""The private record of a run: every trial and every evaluation, as rows and as curves."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpsur.core.loop import Progress
from dpsur.core.types import Verdict
from dpsur.privacy.plans import AnyPlan
from dpsur.runs.files import finite

METRICS, CURVES = "metrics.jsonl", "curves.png"


class Recorder:
    """Keeps rows in memory and, where there is a folder, in a file."""

    def __init__(self, folder: Path | None = None) -> None:
        self.rows: list[dict[str, Any]] = []
        self._path = None if folder is None else folder / METRICS
        self._clock = time.perf_counter()

    def started(self, plan: AnyPlan, progress: Progress) -> None:  # noqa: ARG002
        """Forget rows of trials after the checkpoint: those trials are made again."""
        if self._path is None:
            return
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        rows = [row for row in map(_parse, lines) if row is not None]
        self.rows = [row for row in rows if row["trial"] <= progress.ledger.trials]
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.writelines(_line(row) for row in self.rows)
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
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(row))


def _line(row: dict[str, Any]) -> str:
    return json.dumps(finite(row), allow_nan=False) + "\n"


def _parse(line: str) -> dict[str, Any] | None:
    # The last line may be cut off by a crash; its trial is made again after the checkpoint.
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "trial" in row else None


def draw_curves(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw accuracy and acceptance over the run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    trials = [row for row in rows if row["kind"] == "trial"]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    score = "accuracy" if any("accuracy" in row for row in evaluations) else "loss"
    if evaluations:
        left.plot([r["epsilon"] for r in evaluations], [r[score] for r in evaluations], "o-", ms=3)
    left.set(xlabel="epsilon spent", ylabel=f"test {score}", title="Public test set")
    right.plot([r["trial"] for r in trials], [r["updates"] for r in trials], label="accepted")
    if trials:
        right.plot([0, trials[-1]["trial"]], [0, trials[-1]["trial"]], ":", label="all trials")
    right.set(xlabel="trials", ylabel="accepted updates", title="Private: do not publish")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    path.chmod(0o600)
