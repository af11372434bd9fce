"""One run from its first trial, or its last checkpoint, to its end."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from torch import nn

from dpsur import checks
from dpsur.errors import InterruptedRunError
from dpsur.functional.problem import Problem
from dpsur.functional.process_settings import precision, repeatable
from dpsur.functional.records import Examples, HostExamples
from dpsur.functional.side_effects import Unchanged, check_fixed_parts, fixed_parts
from dpsur.mechanism import cuda_graph_loop as captured
from dpsur.mechanism import loop
from dpsur.mechanism.loop import Progress
from dpsur.mechanism.state import Procedure, Verdict
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.turns import Turns, finished
from dpsur.methods import Method, Nonprivate
from dpsur.per_example import EngineChoice, engine_choice, log_choice
from dpsur.privacy.events import Trial
from dpsur.privacy.plans import AnyPlan, FilteredPlan, Plan
from dpsur.privacy.plans.hiding import NOT_HIDDEN, duration, elapsed
from dpsur.runs.checkpoint import (
    FIXED_PARTS,
    Fingerprint,
    Statistics,
    digest_of,
    load_checkpoint,
    restore,
    save_checkpoint,
)
from dpsur.runs.evaluation import evaluate
from dpsur.runs.files import RunFolder, sha256, to_json
from dpsur.runs.fingerprint import loss_identity, model_identity

EVALUATIONS_PER_RUN = 20
# Captured trials between two looks at them. The last block goes on beyond the end of the plan.
LONGEST_BLOCK = 100

OnTrials = Callable[[Progress, Sequence[Verdict]], None]


class Observer(Protocol):
    """Someone who watches a run. What is seen here is private unless said otherwise."""

    def started(self, plan: AnyPlan, progress: Progress) -> None:
        """The run begins, or goes on from a checkpoint."""
        ...

    def trials(self, progress: Progress, verdicts: Sequence[Verdict]) -> None:
        """Trials were made; `progress` is where the last of them led.

        No verdicts: a figure was released that later trials are steered by.
        """
        ...

    def evaluated(self, progress: Progress, scores: dict[str, float], epsilon: float) -> None:
        """The released weights so far were tried on the public test set."""
        ...


@dataclass(frozen=True, repr=False)
class Pace(checks.NamedArguments):
    """How often things happen that cannot change the result: in trials, and in updates.

    Captured trials are made in blocks, and what is due comes when a block is done.
    """

    checkpoint_every: int = 25
    evaluate_every: int | None = None

    def __post_init__(self) -> None:
        checks.at_least_one_each(self, "checkpoint_every", "evaluate_every")


@dataclass(frozen=True, repr=False)
class Speed(checks.NamedArguments):
    """How fast things happen. None of it changes what is computed, but for rounding.

    `capture` replays whole trials as a CUDA graph where that is possible. `tf32` lets matrix
    products and convolutions round their inputs to 10 bits; `bf16` has the layers of a training
    pass compute with 8 bits; norms, sums and noise keep float32, and so do tests of candidates.
    The privacy statement records both. `data_bytes` is what the records may take of the device
    (default: half of what is free on a card): where they take more they stay on the host, their
    batches are fetched, and trials are not captured. `repeatable` makes seeded runs on CUDA use
    slower kernels that give the same bits every time.
    """

    capture: bool = True
    tf32: bool = False
    repeatable: bool = True
    bf16: bool = False
    data_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.data_bytes is not None:
            checks.at_least_one("data_bytes", self.data_bytes)


@dataclass(frozen=True, repr=False)
class Session:
    """A method bound to its data, ready to run.

    `original` is the model as it was before any record reached it. It is never called.
    """

    method: Method
    plan: AnyPlan
    problem: Problem
    original: nn.Module
    test: Examples | None
    streams: Streams
    procedure: Procedure
    pace: Pace
    speed: Speed
    layers: nn.Sequential = field(default_factory=nn.Sequential)
    layer_descriptions: tuple[Mapping[str, Any], ...] = ()
    statistics: Statistics = field(default_factory=dict)
    hide_rejections: str = NOT_HIDDEN

    def __repr__(self) -> str:
        return f"Session({self.method!r}, {len(self.problem.train)} records)"

    def engine(self) -> EngineChoice:
        """How gradients are found, and why."""
        if isinstance(self.method, Nonprivate):
            return EngineChoice("batch", f"method {self.method.name} needs no gradient per example")
        return engine_choice(self.problem)

    def run(
        self,
        observers: Sequence[Observer] = (),
        folder: RunFolder | None = None,
        resume: bool = False,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> Progress:
        """Make the planned trials, saving checkpoints where there is a folder."""
        with self.arithmetic():
            return finished(self.turns(observers, folder, resume, stop_requested))

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """The kernels and the precision of this run: settings of the whole process."""
        exact = self.streams.seeded and self.speed.repeatable
        with repeatable(self.streams.device, exact), precision(self.speed.tf32):
            yield

    def turns(
        self,
        observers: Sequence[Observer] = (),
        folder: RunFolder | None = None,
        resume: bool = False,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> Turns[Progress]:
        """The same in turns: yields while trials are under way on the device.

        Every turn has to be taken with the `arithmetic` of the run, and on the same stream.
        """
        fingerprint = Fingerprint("", {}) if folder is None else self.fingerprint()
        progress = loop.start(self.procedure)
        if folder is not None and resume:
            saved = load_checkpoint(folder.checkpoint, fingerprint)
            progress = restore(saved, progress, self.streams)

        log_choice(self.engine())
        unchanged = Unchanged(self.problem.model, self.problem.loss)

        def save(progress: Progress) -> None:
            check_fixed_parts(self.problem.model, self.original)
            unchanged.check()
            if folder is not None:
                path = folder.checkpoint
                save_checkpoint(path, progress, self.streams, fingerprint, self.statistics)

        saved_at = progress.ledger.trials
        evaluated_at = elapsed(self.plan, progress.ledger)

        def on_trials(progress: Progress, verdicts: Sequence[Verdict]) -> None:
            nonlocal saved_at, evaluated_at
            for observer in observers:
                observer.trials(progress, verdicts)
            position = elapsed(self.plan, progress.ledger)
            if self._evaluation_is_due(evaluated_at, position):
                evaluated_at = position
                self._evaluate(progress, observers)
            stop = stop_requested()
            every = self.pace.checkpoint_every
            if stop or progress.ledger.trials // every > saved_at // every:
                saved_at = progress.ledger.trials
                save(progress)
            if stop:
                raise InterruptedRunError("stopped between two trials; the checkpoint is saved")

        save(progress)
        for observer in observers:
            observer.started(self.plan, progress)
        progress = yield from self._train(progress, on_trials)
        save(progress)
        return progress

    def _train(self, progress: Progress, on_trials: OnTrials) -> Turns[Progress]:
        """Captured where the device and the procedure allow it, else trial by trial."""
        padded = self.procedure.padded() if self._may_capture() else None
        if padded is None or not isinstance(self.plan, (Plan, FilteredPlan)):
            return loop.train(
                self.procedure, self.plan, progress, lambda p, v: on_trials(p, _verdicts(p, v))
            )

        def exactly(progress: Progress, count: int) -> Progress:
            for _ in range(count):
                if loop.goes_on(self.procedure, self.plan, progress):
                    progress, verdict = loop.make_trial(self.procedure, self.plan, progress)
                    on_trials(progress, _verdicts(progress, verdict))
            return progress

        progress = yield from captured.train(
            padded,
            self.plan,
            progress,
            self.streams,
            exactly,
            on_trials,
            block=min(self.pace.checkpoint_every, LONGEST_BLOCK),
        )
        return progress

    def _may_capture(self) -> bool:
        fits = not isinstance(self.problem.train, HostExamples)
        return self.speed.capture and fits and self.streams.device.type == "cuda"

    def _evaluation_is_due(self, last: int, position: int) -> bool:
        if self.test is None or position == last:
            return False
        length = duration(self.plan)
        every = self.pace.evaluate_every or max(1, length // EVALUATIONS_PER_RUN)
        return position // every > last // every or position == length

    def _evaluate(self, progress: Progress, observers: Sequence[Observer]) -> None:
        if self.test is None or not observers:
            return
        scores = evaluate(self.problem, progress.state.released_params, self.test)
        spent = self.plan.spent(progress.ledger)
        for observer in observers:
            observer.evaluated(progress, scores, spent)

    def fingerprint(self) -> Fingerprint:
        """Tells this run from any other: its settings, records, loss, network and fixed parts."""
        trained = self.problem.initial_params()
        records = {"inputs": self.problem.train.inputs, "targets": self.problem.train.targets}
        facts: dict[str, Any] = {
            "method": self.method.name,
            "settings": asdict(self.method),
            "plan": self.plan.to_json(),
            "hide_rejections": self.hide_rejections,
            "seeded": self.streams.seeded,
            "device": self.streams.device.type,
            "tf32": self.speed.tf32,
            "bf16": self.speed.bf16,
            "model": model_identity(self.original),
            "loss": loss_identity(self.problem.loss),
            "shapes": {name: list(value.shape) for name, value in trained.items()},
            "records": digest_of(records),
            "fixed": digest_of(fixed_parts(self.original)),
        }
        return Fingerprint(
            sha256(to_json(facts)),
            {
                FIXED_PARTS: facts["fixed"],
                "network": facts["model"],
                "loss": facts["loss"],
                "records": facts["records"],
            },
        )


def _verdicts(progress: Progress, verdict: Verdict) -> list[Verdict]:
    """The verdict on the last step, if that was a trial."""
    return [verdict] if isinstance(progress.ledger.entries[-1].step, Trial) else []
