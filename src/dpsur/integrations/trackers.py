"""Observers of `dpsur.fit` that pass figures on to `logging` and to experiment trackers.

    dpsur.fit(..., observers=[Tracker.wandb(run)])

They pass on what the privacy accounting covers: updates, epsilon spent so far, scores on public
records. Rejections, loss differences and timings are private, and are passed on only with
`private=True`.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
