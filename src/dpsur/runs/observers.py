"""Observers of a run: the private record of its trials, and random delays."""

import io
import json
import math
import os
import random
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dpsur.errors import DiagnosticsWarning, describe_os_error
from dpsur.mechanism.state import Verdict
from dpsur.mechanism.trial import Progress
from dpsur.privacy.plan import Plan
from dpsur.runs.files import METRICS, finite, write_atomically


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
