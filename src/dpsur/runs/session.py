"""One run from its first trial, or its last checkpoint, to its end."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from dpsur.core import loop
from dpsur.core.loop import Progress
from dpsur.core.problem import Problem
from dpsur.core.streams import Streams
from dpsur.core.types import Examples, Procedure, Verdict
from dpsur.errors import InterruptedRunError
from dpsur.methods import Method
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.plan import Plan
from dpsur.runs.checkpoint import (
    FILE_NAME,
    digest_of,
    load_checkpoint,
    restore,
    save_checkpoint,
)
from dpsur.runs.determinism import repeatable
from dpsur.runs.evaluation import evaluate
from dpsur.runs.files import RunFolder, sha256, to_json

EVALUATIONS_PER_RUN = 20


class Observer(Protocol):
    """Someone who watches a run. What is seen here is private unless said otherwise."""

    def started(self, plan: Plan, progress: Progress) -> None:
        """The run begins, or goes on from a checkpoint."""
        ...

    def trial(self, progress: Progress, verdict: Verdict) -> None:
        """A trial was made."""
        ...

    def evaluated(self, progress: Progress, scores: dict[str, float], epsilon: float) -> None:
        """The released weights so far were tried on the public test set."""
        ...


@dataclass(frozen=True)
class Pace:
    """How often things happen that cannot change the result."""

    checkpoint_every: int = 25
    evaluate_every: int | None = None


@dataclass(frozen=True)
class Session:
    """A method bound to its data, ready to run."""

    method: Method
    plan: Plan
    problem: Problem
    test: Examples | None
    streams: Streams
    procedure: Procedure
    pace: Pace

    def run(
        self,
        observers: Sequence[Observer] = (),
        folder: RunFolder | None = None,
        resume: bool = False,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> Progress:
        """Make the planned trials, saving checkpoints where there is a folder."""
        fingerprint = "" if folder is None else self.fingerprint()
        progress = loop.start(self.procedure)
        if folder is not None and resume:
            saved = load_checkpoint(folder.private / FILE_NAME, fingerprint)
            progress = restore(saved, progress, self.streams)

        def save(progress: Progress) -> None:
            if folder is not None:
                path = folder.private / FILE_NAME
                save_checkpoint(path, progress, self.streams, fingerprint)

        def on_trial(progress: Progress, verdict: Verdict) -> None:
            for observer in observers:
                observer.trial(progress, verdict)
            self._evaluate_if_due(progress, verdict, observers)
            stop = stop_requested()
            if stop or progress.ledger.trials % self.pace.checkpoint_every == 0:
                save(progress)
            if stop:
                raise InterruptedRunError("stopped between two trials; the checkpoint is saved")

        save(progress)
        for observer in observers:
            observer.started(self.plan, progress)
        with repeatable(self.streams.device, self.streams.seeded):
            progress = loop.train(self.procedure, self.plan, progress, on_trial)
        save(progress)
        return progress

    def _evaluate_if_due(
        self, progress: Progress, verdict: Verdict, observers: Sequence[Observer]
    ) -> None:
        if self.test is None or not observers:
            return
        moved = self.plan.updates is None or bool(verdict.accept)
        position = self.plan.position(progress.ledger)
        every = self.pace.evaluate_every or max(1, self.plan.length // EVALUATIONS_PER_RUN)
        if moved and (position % every == 0 or position == self.plan.length):
            scores = evaluate(self.problem, progress.state.released_params, self.test)
            spent = accounting_named(self.plan.accounting).spent(
                progress.ledger, self.plan.budget.delta
            )
            for observer in observers:
                observer.evaluated(progress, scores, spent)

    def fingerprint(self) -> str:
        """Tells this run from any other: its settings, its records and its model's fixed parts."""
        trained = self.problem.initial_params()
        fixed = {n: t for n, t in self.problem.model.state_dict().items() if n not in trained}
        records = {"inputs": self.problem.train.inputs, "targets": self.problem.train.targets}
        facts = {
            "method": self.method.name,
            "settings": asdict(self.method),
            "plan": self.plan.to_json(),
            "seeded": self.streams.seeded,
            "device": self.streams.device.type,
            "shapes": {name: list(value.shape) for name, value in trained.items()},
            "records": digest_of(records),
            "fixed": digest_of(fixed),
        }
        return sha256(to_json(facts))
