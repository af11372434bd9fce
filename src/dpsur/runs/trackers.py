"""Observers of `dpsur.fit` that pass figures on to `logging` and to experiment trackers.

    dpsur.fit(..., observers=[Tracker.wandb(run)])

    dpsur.fit(..., track="tensorboard")         # or --track tensorboard: opens and closes it too

They pass on what the privacy accounting covers: updates, epsilon spent so far, scores on public
records, noisy values that are paid for. Rejections, loss differences and timings are private, and
are passed on only with `private=True`. A tracker notes the time of every entry. Where the time
tells how many updates were rejected and that number is private, `track` is refused.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.mechanism.state import Verdict
from dpsur.mechanism.trial import Progress
from dpsur.privacy.plan import Plan

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
        return cls(
            lambda figures, step: client.log_metrics(dict(figures), step=step), private=private
        )

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


def check_tracked_plan(plan: Plan) -> None:
    """Refuse a run whose pace tells how many updates were rejected, where that is private."""
    if plan.typical.gate is not None and not plan.verdicts_are_public:
        raise InvalidInputError(
            "track notes the time of every figure, and how long updates take tells how many "
            f"candidates were rejected, which is private under accounting {plan.accounting}; leave "
            "track out, or use accounting every-trial or another gate"
        )


@contextmanager
def tracked(name: str, plan: Plan, method: str, folder: Path | None) -> Iterator[Tracker]:
    """Open a tracker for one run, note its budget, and close it.

    TensorBoard writes into the folder of the run, or below `runs`; the other two log to where they
    are set up to, wandb without the terminal's text, code, git and figures of the machine.
    """
    check_track(name)
    check_tracked_plan(plan)
    noted = {
        "method": method,
        "budget_epsilon": plan.budget.epsilon,
        "delta": plan.budget.delta,
        "accounting": plan.accounting,
    }
    opened = {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}[name]
    tracker, close = opened(noted, folder)
    try:
        yield tracker
    finally:
        close()


Opened = tuple[Tracker, Callable[[], Any]]


def _tensorboard(noted: Mapping[str, Any], folder: Path | None) -> Opened:
    from torch.utils.tensorboard import SummaryWriter

    opened: list[Any] = []

    def log(figures: Mapping[str, float], step: int) -> None:
        if not opened:  # not before the run has made its folder
            opened.append(SummaryWriter(None if folder is None else str(folder / "tensorboard")))
            opened[0].add_text("run", "\n".join(f"- {key}: {one}" for key, one in noted.items()))
        for name, value in figures.items():
            opened[0].add_scalar(name, value, step)

    return Tracker(log), lambda: [writer.close() for writer in opened]


def _mlflow(noted: Mapping[str, Any], folder: Path | None) -> Opened:
    mlflow = import_module("mlflow")
    mlflow.start_run(run_name=None if folder is None else folder.name)
    mlflow.log_params(dict(noted))
    return Tracker.mlflow(mlflow), mlflow.end_run


def _wandb(noted: Mapping[str, Any], folder: Path | None) -> Opened:
    wandb = import_module("wandb")
    settings = wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        x_disable_stats=True,
        x_disable_meta=True,
    )
    name = None if folder is None else folder.name
    run = wandb.init(project=PROJECT, name=name, config=dict(noted), settings=settings)
    return Tracker.wandb(run), run.finish
