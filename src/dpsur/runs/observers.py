"""Observers of a run: metrics, evaluations, and a progress bar.

Observers of `dpsur.fit` that pass figures on to `logging` and to experiment trackers.

    dpsur.fit(..., observers=[Tracker.wandb(run)])

    dpsur.fit(..., track="tensorboard")         # or --track tensorboard: opens and closes it too

They pass on what the privacy accounting covers: updates, epsilon spent so far, scores on public
records, noisy values that are paid for. Rejections, loss differences and timings are private, and
are passed on only with `private=True`. A tracker notes the time of every entry. Where the time
tells how many updates were rejected and that number is private, `track` is refused.
"""

import html
import json
import logging
import math
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, Self

from dpsur import checks
from dpsur.errors import DiagnosticsWarning, InvalidInputError, describe_os_error
from dpsur.mechanism.state import Verdict
from dpsur.mechanism.trial import Progress
from dpsur.privacy.plan import Plan
from dpsur.privacy.statement import format_epsilon, metric_text
from dpsur.runs.evaluation import shown_scores
from dpsur.runs.files import METRICS, finite, write_atomically
from dpsur.status import in_notebook, is_silenced


class Observer(Protocol):
    """Someone who watches a run. What is seen here is private unless said otherwise.

    Later trials may overwrite the tensors of a `progress`: copy what is to be kept.
    """

    def started(self, plan: Plan, progress: Progress) -> None:
        """The run begins, or resumes from a checkpoint."""

    def trials(self, progress: Progress, verdicts: Sequence[Verdict]) -> None:
        """Trials were made; `progress` is where the last of them led.

        No verdicts: a figure was released that later trials are steered by.
        """

    def evaluated(self, progress: Progress, scores: dict[str, float], epsilon: float) -> None:
        """The weights that would be released now were evaluated on the public test set.

        An observer may also have `measured(progress, rows)`: a test has released noisy values of
        the training records, which epsilon covers.
        """


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

        def repeat_from_here(path: Path) -> None:
            rows = read_rows(path) if path.exists() else []
            self.rows = [row for row in rows if row["trial"] <= progress.ledger.trials]
            write_atomically(path, "".join(map(_line, self.rows)).encode(), mode=0o600)

        self._on_disk(repeat_from_here)
        self._clock = time.perf_counter()

    def trials(self, progress: Progress, verdicts: Sequence[Verdict]) -> None:
        seconds = (time.perf_counter() - self._clock) / max(1, len(verdicts))
        accepted = [bool(verdict.accept) for verdict in verdicts]
        trial = progress.ledger.trials - len(verdicts)
        updates = progress.ledger.updates - sum(accepted)
        for verdict, accept in zip(verdicts, accepted, strict=True):
            trial, updates = trial + 1, updates + accept
            private = {name: float(value) for name, value in verdict.private.items()}
            place = {"kind": "trial", "trial": trial, "updates": updates, "accepted": accept}
            self._add({**place, **private, "seconds": round(seconds, 6)})
        self._clock = time.perf_counter()

    def evaluated(self, progress: Progress, scores: dict[str, float], epsilon: float) -> None:
        ledger = progress.ledger
        place = {"kind": "evaluation", "trial": ledger.trials, "updates": ledger.updates}
        self._add({**place, "epsilon": epsilon, **scores})
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
            warnings.warn(
                f"{self._path} is incomplete ({describe_os_error(error)}); the run and its release "
                "are not affected",
                DiagnosticsWarning,
                stacklevel=2,
            )
            self._path = None


def _append(path: Path, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(line)


def _line(row: dict[str, Any]) -> str:
    return json.dumps(finite(row), allow_nan=False) + "\n"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a run, as far as they have what plots are drawn from.

    The last line may be cut off by a crash; its trial is repeated after the checkpoint.
    """
    rows = []
    for line in path.read_bytes().splitlines():
        with suppress(ValueError, RecursionError, AttributeError):
            row = json.loads(line)
            figures = (row.get(name) for name in ("epsilon", "accuracy", "micro_f1", "r2", "loss"))
            numbers = all(isinstance(x, (int, float, type(None))) for x in figures)
            placed = type(row.get("trial")) is type(row.get("updates")) is int
            kind = row.get("kind")
            if placed and (kind == "trial" or (kind == "evaluation" and numbers)):
                rows.append(row)
    return rows


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
        self._accept = 1.0
        self._worked, self._made = 0.0, 0
        self._since = clock()

    def started(self, plan: Plan, progress: Progress) -> None:  # noqa: ARG002
        assert plan.typical.gate is not None
        self._accept = plan.typical.gate.accept_min
        self._since = self._clock()

    def trials(self, progress: Progress, verdicts: Sequence[Verdict]) -> None:  # noqa: ARG002
        """Wait once for every accepted update of a block, in units of what a trial took so far."""
        self._worked += self._clock() - self._since
        self._made += len(verdicts)
        for verdict in verdicts:
            if verdict.accept:
                trials = 1  # until one is accepted, with the least probability there is
                if self._accept < 1:
                    rate = -math.log1p(-self._accept)
                    trials = math.ceil(random.SystemRandom().expovariate(rate))
                self._wait(trials * self._worked / self._made)
        self._since = self._clock()

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
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

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
        from IPython import display  # there is a kernel, so it is installed

        shown: Any = display
        self._html = shown.HTML
        self._handle = shown.display(self._html(""), display_id=True)
        self._total, self._done = plan.duration, 0
        self._unit = "trials" if plan.run_all_trials else plan.unit
        self._status = self._rate = ""
        self._due = 0.0

    def update(
        self, task: Any, completed: int | None = None, status: str = "", rate: str = ""
    ) -> None:
        del task
        self._done = self._done if completed is None else completed
        self._status, self._rate = status or self._status, rate or self._rate
        if time.perf_counter() >= self._due:
            self._show()

    def _show(self) -> None:
        parts = (f"{self._done}/{self._total} {self._unit}", self._rate, self._status)
        bar = f'<progress value="{self._done}" max="{self._total}" style="width:16em"></progress>'
        text = html.escape(", ".join(part for part in parts if part))
        self._handle.update(self._html(f"{bar} {text}"))
        self._due = time.perf_counter() + _NOTEBOOK_SECONDS

    def stop(self) -> None:
        self._show()


def default_progress(observers: Sequence[Any]) -> "ProgressBar | None":
    """A bar where someone watches: on a terminal or in a notebook, unless there is one already."""
    watched = in_notebook() or (sys.stderr is not None and sys.stderr.isatty())
    if is_silenced() or not watched or any(isinstance(one, ProgressBar) for one in observers):
        return None
    return ProgressBar()


# Figures of one moment, and the number of updates that it comes after.
Log = Callable[[Mapping[str, float], int], None]


class Tracker:
    """Calls a function with figures after every evaluation.

    With `private` set it is also called after every trial, with figures that depend on private
    records and must not be published.
    """

    def __init__(self, log: Log, *, private: bool = False) -> None:
        """Take a function of (figures by name, number of updates)."""
        self._log, self._private = log, private
        self._plan: Plan | None = None
        self._clock = time.perf_counter()

    @classmethod
    def wandb(cls, run: Any, *, private: bool = False) -> "Tracker":
        """For what `wandb.init()` returns: `run.log(figures, step=updates)`."""
        return cls(lambda figures, step: run.log(dict(figures), step=step), private=private)

    @classmethod
    def tensorboard(cls, writer: Any, *, private: bool = False) -> "Tracker":
        """For a `SummaryWriter`: `writer.add_scalar(name, value, updates)`."""

        def log(figures: Mapping[str, float], step: int) -> None:
            for name, value in figures.items():
                writer.add_scalar(name, value, step)

        return cls(log, private=private)

    @classmethod
    def mlflow(cls, client: Any, *, private: bool = False) -> "Tracker":
        """For the module `mlflow`: `mlflow.log_metrics(figures, step=updates)`."""
        return cls(lambda found, step: client.log_metrics(dict(found), step=step), private=private)

    @classmethod
    def logging(
        cls, logger: logging.Logger | str = "dpsur.progress", *, private: bool = False
    ) -> "Tracker":
        """For a logger of the standard library, at the level INFO."""
        to = logging.getLogger(logger) if isinstance(logger, str) else logger

        def log(figures: Mapping[str, float], step: int) -> None:
            text = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
            to.info("dpsur: update %d: %s", step, text)

        return cls(log, private=private)

    def started(self, plan: Plan, progress: Progress) -> None:  # noqa: ARG002
        """Note the plan."""
        self._plan, self._clock = plan, time.perf_counter()

    def trials(self, progress: Progress, verdicts: Sequence[Verdict]) -> None:
        """Pass on what trials did, if private figures are wanted."""
        if not self._private or not verdicts:
            return
        seconds = (time.perf_counter() - self._clock) / len(verdicts)
        self._clock = time.perf_counter()
        last = verdicts[-1]
        ledger = progress.ledger
        figures = {f"private/{name}": float(value) for name, value in last.private.items()}
        figures["private/rejections"] = float(ledger.trials - ledger.updates)
        figures["private/seconds_per_trial"] = seconds
        self._log(figures, ledger.updates)

    def evaluated(self, progress: Progress, scores: dict[str, float], epsilon: float) -> None:
        """Pass on public scores and the epsilon spent so far."""
        assert self._plan is not None
        if self._plan.run_all_trials and not self._private:
            return  # how good the model is at a given trial tells of rejections
        public = {f"test/{name}": value for name, value in scores.items()}
        self._log({"epsilon": epsilon, **public}, progress.ledger.updates)

    def measured(self, progress: Progress, rows: Sequence[Mapping[str, Any]]) -> None:
        """Pass on noisy values of the training records, which epsilon covers."""
        paid = {f"paid/{row['quantity'].replace(' ', '_')}": row["value"] for row in rows}
        self._log(paid, progress.ledger.updates)


# What `track` opens; each is also the name of the package that it needs.
TRACKERS = ("tensorboard", "mlflow", "wandb")
PROJECT = "dpsur"


def check_track(name: str) -> None:
    """Refuse a tracker that is not known or not installed, before anything else is done."""
    checks.one_of("track", name, TRACKERS)
    try:
        import_module(name)
    except ImportError:
        raise InvalidInputError(
            f"track {name} needs the package {name}; run: pip install {name}"
        ) from None


@contextmanager
def tracked(name: str, plan: Plan, method: str, folder: Path | None) -> Iterator[Tracker]:
    """Open a tracker for one run, note its budget, and close it.

    TensorBoard writes into the folder of the run, or below `runs`; the other two log to where they
    are set up to, wandb without the terminal's text, code, git and figures of the machine.
    """
    check_track(name)
    if plan.typical.gate is not None and plan.charges_accepted:
        raise InvalidInputError(
            "track notes the time of every figure, and how long updates take tells how many "
            f"candidates were rejected, which is private under accounting {plan.accounting}; leave "
            "track out, or use accounting every-trial or another gate"
        )
    noted = {
        "method": method,
        "budget_epsilon": plan.budget.epsilon,
        "delta": plan.budget.delta,
        "accounting": plan.accounting,
    }
    run_name = None if folder is None else folder.name
    with ExitStack() as at_the_end:
        if name == "wandb":
            wandb = import_module("wandb")
            settings = wandb.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                x_disable_stats=True,
                x_disable_meta=True,
            )
            run = wandb.init(project=PROJECT, name=run_name, config=noted, settings=settings)
            at_the_end.callback(run.finish)
            yield Tracker.wandb(run)
        elif name == "mlflow":
            mlflow = import_module("mlflow")
            mlflow.start_run(run_name=run_name)
            at_the_end.callback(mlflow.end_run)
            mlflow.log_params(noted)
            yield Tracker.mlflow(mlflow)
        else:
            from torch.utils.tensorboard import SummaryWriter

            opened: list[Any] = []

            def log(figures: Mapping[str, float], step: int) -> None:
                if not opened:  # not before the run has made its folder
                    place = None if folder is None else str(folder / "tensorboard")
                    opened.append(SummaryWriter(place))
                    at_the_end.callback(opened[0].close)
                    text = "\n".join(f"- {key}: {one}" for key, one in noted.items())
                    opened[0].add_text("run", text)
                for name, value in figures.items():
                    opened[0].add_scalar(name, value, step)

            yield Tracker(log)
