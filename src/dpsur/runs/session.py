"""One run from its first trial, or its last checkpoint, to its end."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from dpsur.config import RunConfig
from dpsur.distributed import Ranks
from dpsur.errors import InterruptedRunError, InvalidInputError
from dpsur.functional.problem import Problem, check_fixed_parts, fixed_parts
from dpsur.functional.process_settings import precision, repeatable
from dpsur.functional.records import Examples, HostExamples
from dpsur.functional.tree import flatten
from dpsur.mechanism.blocks import released_metrics
from dpsur.mechanism.cuda_graph_loop import CudaGraphLoop
from dpsur.mechanism.host_batches import capture_obstacle
from dpsur.mechanism.state import Procedure, Verdict
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.trial import EagerLoop, Loop, Progress, check_completed, start
from dpsur.methods import Method, Nonprivate
from dpsur.per_example import EngineReport, engine_report, log_engine
from dpsur.privacy.events import NonPrivate, Trial
from dpsur.privacy.plan import Plan
from dpsur.privacy.statement import BY_CONSTRUCTION, WAS_CHECKED
from dpsur.runs.checkpoint import (
    FIXED_PARTS,
    Fingerprint,
    Statistics,
    digest_of,
    load_checkpoint,
    loss_identity,
    model_identity,
    read_checkpoint,
    restore,
    save_checkpoint,
)
from dpsur.runs.data import identifying
from dpsur.runs.evaluation import evaluate
from dpsur.runs.files import RunFolder, sha256, to_json

EVALUATIONS_PER_RUN = 20
# Captured trials between two looks at them. The last block continues beyond the end of the plan.
LONGEST_BLOCK = 100


class Observer(Protocol):
    """Someone who watches a run. What is seen here is private unless said otherwise.

    Later trials may overwrite the tensors of a `progress`: copy what is to be kept.
    """

    def started(self, plan: Plan, progress: Progress) -> None:
        """The run begins, or resumes from a checkpoint."""
        ...

    def trials(self, progress: Progress, verdicts: Sequence[Verdict]) -> None:
        """Trials were made; `progress` is where the last of them led.

        No verdicts: a figure was released that later trials are steered by.
        """
        ...

    def evaluated(self, progress: Progress, scores: dict[str, float], epsilon: float) -> None:
        """The weights that would be released now were evaluated on the public test set.

        An observer may also have `measured(progress, rows)`: a test has released noisy values of
        the training records, which epsilon covers.
        """
        ...


@dataclass(frozen=True, repr=False)
class Session:
    """A method bound to its data, ready to run.

    `config` is what was asked for; `method` has what it left open filled in. `original` is the
    model as it was before any record reached it. It is never called. `holdout` are private records
    that noisy figures are released of, `records` those of the problem before their features were
    computed, where a release commits to them. With `records_per_person` the rows of the problem are
    persons. `booking` is the id of the run in the ledger of its data.
    """

    config: RunConfig
    method: Method
    plan: Plan
    problem: Problem
    original: nn.Module
    test: Examples | None
    streams: Streams
    procedure: Procedure
    layers: nn.Sequential = field(default_factory=nn.Sequential)
    layer_descriptions: tuple[Mapping[str, Any], ...] = ()
    statistics: Statistics = field(default_factory=dict)
    holdout: Examples | None = None
    records: Examples | None = None
    records_per_person: int | None = None
    booking: str | None = None

    def __repr__(self) -> str:
        return f"Session({self.method!r}, {len(self.problem.train)} records)"

    @property
    def ranks(self) -> Ranks:
        return self.streams.ranks

    def engine(self) -> EngineReport:
        """How gradients are found, and why."""
        if isinstance(self.method, Nonprivate):
            reason = f"method {self.method.name} needs no gradient per example"
            report = EngineReport("batch", reason)
        else:
            report = engine_report(self.problem)
        return replace(report, not_captured=self._captured_trials[1])

    @property
    def independence(self) -> str:
        """Whether records are kept apart by construction, or looked after one at a time."""
        alone = self.engine().is_slow
        return WAS_CHECKED if alone else BY_CONSTRUCTION

    def run(
        self,
        observers: Sequence[Observer] = (),
        folder: RunFolder | None = None,
        resume: bool = False,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> Progress:
        """Make the planned trials, saving checkpoints where there is a folder."""
        with self.arithmetic():
            active = ActiveRun(self, observers, folder, resume, stop_requested)
            try:
                while not active.finished:
                    active.launch()
                    active.collect()
                return active.finish()
            finally:
                active.close()

    @property
    def tf32(self) -> bool:
        """Whether layers may round to TF32: as asked for, else as PyTorch is set for CUDA."""
        wanted = self.config.performance.tf32
        if wanted is not None:
            return wanted
        settings = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        return self.streams.device.type == "cuda" and any(settings)

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """The kernels and the precision of this run: settings of the whole process."""
        exact = self.config.intervals.replayable
        exact |= self.streams.seeded and self.config.performance.repeatable
        with (
            repeatable(self.streams.device, exact),
            precision(self.config.performance.tf32, whole_run=True),
        ):
            yield

    def loop(self, progress: Progress) -> Loop:
        """CUDA graphs where the device and the procedure allow it, else one trial at a time.

        The loop takes the progress over, and may overwrite its tensors.
        """
        padded, _ = self._captured_trials
        if padded is None:
            return EagerLoop(self.procedure, self.plan, self.streams, progress, owned=True)
        block = min(self.config.intervals.checkpoint_every, LONGEST_BLOCK)
        if isinstance(self.problem.train, HostExamples) and self.plan.updates is not None:
            block = max(1, min(block, self.plan.updates))  # records are not read in vain
        return CudaGraphLoop(
            self.procedure, padded, self.plan, self.streams, progress, block, owned=True
        )

    @cached_property
    def _captured_trials(self) -> tuple[Procedure | None, str | None]:
        """The procedure whose trials are captured, or None and on CUDA why there is none."""
        if not self._may_capture():
            if self.streams.device.type != "cuda":
                return None, None
            several = "several processes make this run together"
            return None, several if self.config.performance.capture else "capture is switched off"
        if self.config.intervals.replayable:
            return None, "the run is replayable, and keeps its state after every update"
        # the rates at which a typical trial draws its batches
        if isinstance(self.method, Nonprivate) and self.method.batch_size is not None:
            rates = [self.method.batch_size / len(self.problem.train)]
        else:
            drawn = (self.plan.typical.update, self.plan.typical.test)
            rates = [
                p.sample_rate for p in drawn if p is not None and not isinstance(p, NonPrivate)
            ]
        obstacle = capture_obstacle(self.problem.train, rates)
        if obstacle is not None:
            return None, obstacle
        padded = self.procedure.padded()
        if padded is None:
            return None, "layers draw random numbers, or batches must have their exact size"
        return padded, None

    def _may_capture(self) -> bool:
        on_cuda = self.streams.device.type == "cuda"
        return on_cuda and self.config.performance.capture and self.ranks.size == 1

    def fingerprint(self) -> Fingerprint:
        """Tells this run from any other: its settings, records, loss, network and fixed parts."""
        trained = self.problem.initial_params()
        records = identifying(self.problem.train)
        facts: dict[str, Any] = {
            "method": self.method.name,
            "settings": asdict(self.method),
            "plan": self.plan.to_json(),
            "hide_rejections": self.config.hide_rejections,
            "seeded": self.streams.seeded,
            "device": self.streams.device.type,
            "tf32": self.tf32,
            "bf16": self.config.performance.bf16,
            "model": model_identity(self.original),
            "loss": loss_identity(self.problem.loss),
            "shapes": {name: list(value.shape) for name, value in trained.items()},
            "records": digest_of(flatten(records)),
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


class ActiveRun:
    """A run under way: blocks of trials, with checkpoints and evaluations between them.

    It has to be driven with the `arithmetic` of the session, on one CUDA stream.
    """

    def __init__(
        self,
        session: Session,
        observers: Sequence[Observer] = (),
        folder: RunFolder | None = None,
        resume: bool = False,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        if session.config.intervals.replayable and (folder is None or session.ranks.size > 1):
            raise InvalidInputError(
                "replayable is for a run of one process that has a folder; set out, or leave it out"
            )
        self._session, self._observers = session, observers
        self._folder, self._stop_requested = folder, stop_requested
        ranks, needed = session.ranks, folder is not None or session.ranks.size > 1
        self._fingerprint = session.fingerprint() if needed else Fingerprint("", {})
        ranks.check_same({**self._fingerprint.parts, "settings": self._fingerprint.total})
        log_engine(session.engine())  # before there is a state: trying engines takes memory too
        progress = start(session.procedure)
        if folder is not None and resume:
            path = folder.checkpoint
            content = ranks.from_main(lambda: read_checkpoint(path))  # one file for all ranks
            saved = load_checkpoint(path, self._fingerprint, content)
            progress = restore(saved, progress, session.streams)
            if session.config.intervals.replayable and not folder.update(0).exists():
                raise InvalidInputError(
                    f"the run in {folder.root} did not begin as a replayable one; resume it "
                    "without replayable"
                )
        self._saved_at = progress.ledger.trials
        self._evaluated_at = session.plan.elapsed(progress.ledger)
        self._save(progress)
        self._kept = -1
        self._keep(progress)
        for observer in observers:
            observer.started(session.plan, progress)
        self._loop = session.loop(progress)

    @property
    def finished(self) -> bool:
        return self._loop.finished

    def launch(self) -> None:
        self._loop.launch()

    def collect(self) -> None:
        """Wait for the block; report, evaluate and save what is due."""
        found = self._loop.collect()
        progress = self._loop.progress
        self._keep(progress)
        is_trial = isinstance(progress.ledger.entries[-1].step, Trial)
        verdicts = found if is_trial else []  # a released norm is no trial
        for observer in self._observers:
            observer.trials(progress, verdicts)
        if not is_trial:  # a test released what is paid for
            rows = released_metrics(self._session.procedure, progress.state) or []
            last = [row for row in rows if row["test"] == rows[-1]["test"]]
            for observer in self._observers:
                if last and hasattr(observer, "measured"):
                    observer.measured(progress, last)
        position = self._session.plan.elapsed(progress.ledger)
        if self._evaluation_is_due(self._evaluated_at, position):
            self._evaluated_at = position
            session = self._session
            if session.test is not None and self._observers:
                scores = evaluate(session.problem, progress.state.released_params, session.test)
                spent = session.plan.spent(progress.ledger)
                for observer in self._observers:
                    observer.evaluated(progress, scores, spent)
        stop = self._session.ranks.any(self._stop_requested())
        every = self._session.config.intervals.checkpoint_every
        if stop or progress.ledger.trials // every > self._saved_at // every:
            self._saved_at = progress.ledger.trials
            self._save(progress)
        if stop:
            raise InterruptedRunError("stopped; the checkpoint is saved")

    def close(self) -> None:
        """Stop what is done in the background, at the end of the run or after an error."""
        self._loop.close()

    def finish(self) -> Progress:
        """Where the run ended, saved. Raises if it hit its cap on trials."""
        progress = self._loop.progress
        check_completed(self._session.plan, progress)
        self._save(progress)
        return progress

    def _save(self, progress: Progress) -> None:
        session = self._session
        check_fixed_parts(session.problem.model, session.original)
        ledger = progress.ledger
        session.ranks.check_state(flatten(progress.state), f"after trial {ledger.trials}")
        if self._folder is not None and session.ranks.is_main:
            path = self._folder.checkpoint
            save_checkpoint(path, progress, session.streams, self._fingerprint, session.statistics)

    def _keep(self, progress: Progress) -> None:
        """Keep the state of a replayable run, unless the last trial was rejected."""
        session, kept = self._session, progress.ledger.kept
        if not session.config.intervals.replayable or kept == self._kept:
            return
        assert self._folder is not None
        self._kept, path = kept, self._folder.update(kept)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        save_checkpoint(path, progress, session.streams, self._fingerprint, session.statistics)

    def _evaluation_is_due(self, last: int, position: int) -> bool:
        session = self._session
        if session.test is None or position == last:
            return False
        length = session.plan.duration
        every = session.config.intervals.evaluate_every or max(1, length // EVALUATIONS_PER_RUN)
        return position // every > last // every or position == length
