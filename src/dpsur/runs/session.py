"""A session: a method bound to its records, and its run.

`build_session` checks everything and fixes the privacy of a run. `ActiveRun` makes its trials, from
the first one, or the last checkpoint, to its end.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur.config import Performance, RunConfig
from dpsur.distributed import Ranks, connect
from dpsur.distributed.ranks import local_device, unwrap
from dpsur.errors import InterruptedRunError, InvalidInputError
from dpsur.features import MEAN, PRIVATE
from dpsur.functional.model_loss import is_transformers_model, model_loss
from dpsur.functional.persons import (
    Groups,
    PersonLoss,
    check_by_record,
    choose_records,
    record_loss,
    record_rows,
)
from dpsur.functional.problem import (
    LossFunction,
    Problem,
    check_fixed_parts,
    drop_weights,
    fixed_parts,
)
from dpsur.functional.process_settings import precision, repeatable
from dpsur.functional.records import Examples, HostExamples, StreamedExamples, place
from dpsur.functional.tree import flatten, tensors_of
from dpsur.mechanism.blocks import released_metrics
from dpsur.mechanism.captured_batches import capture_obstacle
from dpsur.mechanism.cuda_graph_loop import CudaGraphLoop, Loop
from dpsur.mechanism.state import Procedure
from dpsur.mechanism.streams import Streams, prepare_kernels
from dpsur.mechanism.trial import EagerLoop, Progress, check_completed, start
from dpsur.methods import Dpsgd, Dpsur, Method, Nonprivate
from dpsur.methods.gradient_method import GradientMethod
from dpsur.per_example import EngineReport, check_model, engine_report, log_engine
from dpsur.per_example.clipping import Augment, check_augmentation
from dpsur.privacy.accountants.noise_tail import MOST_WEIGHTS
from dpsur.privacy.data_ledger import DataLedger
from dpsur.privacy.events import NonPrivate, Trial
from dpsur.privacy.plan import Plan
from dpsur.privacy.statement import (
    DECLARED_SIZE,
    GROUP_SIZE,
    PERSON,
    RECORD,
    RECORDS_PER_PERSON,
    SAMPLED_BY,
)
from dpsur.runs.checkpoint import (
    FIXED_PARTS,
    STREAM,
    Fingerprint,
    Statistics,
    digest_of,
    load_checkpoint,
    load_statistics,
    loss_identity,
    model_identity,
    save_checkpoint,
)
from dpsur.runs.data import (
    as_examples,
    check_alike,
    check_is_loss,
    check_labels,
    check_loss,
    check_module,
    check_targets,
    check_tokens,
    check_values,
    checked_parts,
    identifying,
    is_classification,
    is_one_of,
    loss_on,
    with_indices,
)
from dpsur.runs.evaluation import LABEL_LOSSES, NUMBER_LOSSES, evaluate
from dpsur.runs.files import RunFolder, sha256, to_json
from dpsur.runs.input_features import InputFeatures, compute_inputs, like_features
from dpsur.runs.observers import Observer
from dpsur.runs.release import CLASSES, LABELS, NUMBERS, Origin
from dpsur.status import status
from dpsur.tasks import TASKS, Task

EVALUATIONS_PER_RUN = 20
# Captured trials between two looks at them. The last block continues beyond the end of the plan.
LONGEST_BLOCK = 100


@dataclass(frozen=True, repr=False)
class Session:
    """A method bound to its data, ready to run.

    `config` is what was asked for; `method` has what it left open filled in. `original` is the
    model as it was before any record reached it. It is never called. `holdout` are private records
    that noisy figures are released of, `records` those of the problem before their features were
    computed, where a release commits to them. `origin` is what a release says of the model, and
    `booking` the id of the run in the ledger of its data.
    """

    config: RunConfig
    method: Method
    plan: Plan
    problem: Problem
    original: nn.Module
    test: Examples | None
    streams: Streams
    procedure: Procedure
    origin: Origin
    layers: nn.Sequential = field(default_factory=nn.Sequential)
    statistics: Statistics = field(default_factory=dict)
    holdout: Examples | None = None
    records: Examples | None = None
    booking: str | None = None

    def __repr__(self) -> str:
        return f"Session({self.method!r}, {len(self.problem.train)} records)"

    @property
    def ranks(self) -> Ranks:
        return self.streams.ranks

    def engine(self) -> EngineReport:
        if isinstance(self.method, Nonprivate):
            reason = f"method {self.method.name} needs no gradient per example"
            report = EngineReport("batch", reason)
        else:
            report = engine_report(self.problem)
        return replace(report, not_captured=self._captured_trials[1])

    def run(
        self,
        observers: Sequence[Observer] = (),
        folder: RunFolder | None = None,
        resume: bool = False,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> Progress:
        with self.arithmetic():
            active = ActiveRun(self, observers, folder, resume, stop_requested)
            try:
                while not active.loop.finished:
                    active.loop.launch()
                    active.collect()
                return active.finish()
            finally:
                active.loop.close()

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
        if not self.streams.on_device:
            return None, "no kernel that draws random numbers can be compiled here"
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
            saved = load_checkpoint(folder.checkpoint, self._fingerprint, ranks)
            progress = saved.progress(progress)
            session.streams.restore(saved.under(STREAM))
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
        self.loop = session.loop(progress)

    def collect(self) -> None:
        """Wait for the block; report, evaluate and save what is due."""
        found = self.loop.collect()
        progress = self.loop.progress
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
        session = self._session
        position = session.plan.elapsed(progress.ledger)
        if self._evaluation_is_due(self._evaluated_at, position):
            self._evaluated_at = position
            if session.test is not None and self._observers:
                scores = evaluate(session.problem, progress.state.released_params, session.test)
                spent = session.plan.spent(progress.ledger)
                for observer in self._observers:
                    observer.evaluated(progress, scores, spent)
        stop = session.ranks.any(self._stop_requested())
        every = session.config.intervals.checkpoint_every
        if stop or progress.ledger.trials // every > self._saved_at // every:
            self._saved_at = progress.ledger.trials
            self._save(progress)
        if stop:
            raise InterruptedRunError("stopped; the checkpoint is saved")

    def finish(self) -> Progress:
        """Where the run ended, saved. Raises if it hit its cap on trials."""
        progress = self.loop.progress
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


RECORDS_READ = 1024  # at a time, for a digest


def choose_device(device: str | torch.device) -> torch.device:
    """Resolve "auto", and refuse a device that is not there.

    Of several processes on a machine each gets its own CUDA device.
    """
    if device == "auto":
        return local_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidInputError(f"unknown device {device!r}; use cpu, cuda or auto") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError(
            f"device {device} was asked for, but this machine has no usable CUDA device; "
            "use --device cpu"
        )
    return local_device(chosen)


def build_session(
    config: RunConfig,
    model: nn.Module,
    train_set: Any,
    *,
    loss: LossFunction,
    test_set: Any = None,
    task: Task | None = None,
    network: Mapping[str, Any] | None = None,
    holdout: Examples | None = None,
    augment: Augment | None = None,
    views: int = 1,
    groups: Groups | None = None,
    resumed: RunFolder | None = None,
    replayed: RunFolder | None = None,
) -> Session:
    """Check everything and fix the privacy of the run, then compute features. Nothing is trained.

    The `task` says what images were standardised with, and where the numbers of a table are;
    `network` describes the model, if it can be built by name.
    `holdout` are private records that are not trained on. `groups` say to whom each record belongs:
    then persons are sampled, clipped and counted in place of records. A run that is `resumed` draws
    the statistics of its features no second time, and stays in its place in the ledger of its data.
    One that is `replayed` has all random numbers of the run in that folder.
    Under `torchrun` every process builds the same session, from the weights of rank 0.
    """
    check_is_loss(loss)
    check_module(model)
    model = unwrap(model)
    if loss is F.cross_entropy and is_transformers_model(model):
        loss = model_loss(model)  # of one record alone, where the model's own is of a batch
    device = choose_device(config.device)
    ranks = connect(device, config.intervals.rank_timeout)
    stored = config.to_json()
    for name in ("device", "data_dir"):  # differ between machines; the records are compared later
        stored.pop(name, None)
    ranks.check_same({"settings": to_json(stored).decode()})
    released = None if resumed is None else load_statistics(resumed.checkpoint, ranks)
    sets = _records(train_set, test_set, model, loss, config.performance)
    train, test = sets["train_set"], sets.get("test_set")
    # while records are checked and noise is calibrated
    prepare_kernels(device, secret=config.seed is None)
    # a method may bring its features
    asked = config.features or config.method.features
    scale, table = (None, None) if task is None else (task.pixel_scale, task.table)
    features = InputFeatures(asked, config.normalisation, config.budget, scale, table)
    if holdout is not None and features.charges != features.setup:
        raise InvalidInputError(
            "holdout is for records that nothing was learned from, and the schema was learned from "
            "all of them; leave holdout out, or declare a schema"
        )
    features.check_held(sets)
    if groups is not None:
        _refuse(
            {
                "augment": augment is not None,
                "holdout": config.holdout is not None,
                "keep_fraction": config.keep_fraction not in (None, 1),
                f"normalisation {PRIVATE}": features.kind == PRIVATE,
                "a schema that was learned": features.charges != features.setup,
            },
            "works on records, not on persons, and cannot be used with groups; leave it out",
        )
    if config.sampling == RECORD:
        most = None if groups is None else groups.records_each
        config = replace(config, method=drawing_records(config, most))
    if config.records is not None:
        name = config.method.name
        _refuse(
            {
                f"method {name}": name not in (Dpsgd.name, Dpsur.name),
                "holdout": config.holdout is not None,
                f"normalisation {features.kind}": features.kind in (PRIVATE, MEAN),
            },
            "uses the true number of records, and cannot be used with records=..., which says that "
            "it is not public; leave one of them out",
        )
    original = copy.deepcopy(config.method.adapt(model))
    ranks.broadcast_module(original)
    model = copy.deepcopy(original).to(device)
    shape = features.check(train.record_shape)
    tested = getattr(config.method, "gate", None) != "none"
    few = like_features(train, shape).part(slice(1)).to(device)
    outputs = check_model(model, few, tested=tested)
    if augment is not None and features.features not in (None, "none"):
        raise InvalidInputError(
            "augment works on the model's inputs, which features are computed for once; train "
            "without features=, or without augment="
        )
    check_augmentation(augment, views)
    for name, examples in sets.items():
        # of those that are not held one is looked at before all are
        first = examples.part(slice(1)) if isinstance(examples, StreamedExamples) else examples
        check_labels(first, outputs, loss, name)
    applied = loss_on(loss, device)
    check_loss(applied, outputs, train.targets)
    for name, examples in sets.items():
        # a record that would end the run halfway would reveal itself
        for part in checked_parts(examples):
            check_values(part, name)
            check_labels(part, outputs, loss, name)
            features.check_pixels(part.inputs, name)
            if shape == part.record_shape:
                check_tokens(model, part, name)
            if examples is train:
                check_targets(applied, outputs, part.targets, name)
    loss = applied
    count = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    if count > MOST_WEIGHTS:
        raise InvalidInputError(
            f"the model has {count} trainable weights, and guarantees are computed for at most "
            f"{MOST_WEIGHTS}; freeze some of them with requires_grad_(False)"
        )
    persons = None
    if groups is not None:
        train, persons = choose_records(train, groups)
    by_record = config.sampling == RECORD
    held = len(train if persons is None or by_record else persons)
    budget = config.budget
    words = f"a {config.method.label} run, epsilon {budget.epsilon:g}"
    with status(f"choosing noise and length of {words}"):
        method, plan = config.method.resolve(
            config.records or held, budget, config.charged_by, features.charges
        )
    if config.max_updates is not None:  # ends it early; a filter promises its allowance even so
        plan = plan.limited(config.max_updates)
    plan = plan.hide_rejections(config.hide_rejections)
    booking = None if resumed is None else resumed.booking
    if config.ledger is not None:
        unit = RECORD if groups is None else PERSON
        booking = ranks.from_main(lambda: _book(config, plan, unit, train, booking)).decode()
    streams = Streams(config.seed, device, ranks)
    if replayed is not None:
        streams.restore(load_checkpoint(replayed.checkpoint, None).under(STREAM))
    inputs = compute_inputs(features, train, test, streams, released, persons)
    test = None if inputs.test is None else inputs.test.to(device)
    units = inputs.train
    if persons is not None and not by_record:
        units, loss = persons.gather(units), PersonLoss(loss)
    records = place(units, device, config.performance.data_bytes)
    problem = Problem(
        model,
        loss,
        records,
        config.records,
        bf16=config.performance.bf16,
        augment=augment,
        views=views,
        original=original,
    )
    procedure = method.build(problem, plan)  # calls the model
    drop_weights(model)
    return Session(
        config=config,
        method=method,
        plan=plan,
        problem=problem,
        original=original,
        test=test,
        streams=streams,
        procedure=procedure,
        origin=_origin(config, task, network, inputs.descriptions, problem, groups),
        layers=inputs.layers,
        statistics=inputs.statistics,
        holdout=holdout,
        booking=booking,
        records=train if config.intervals.replayable else None,
    )


def _origin(
    config: RunConfig,
    task: Task | None,
    network: Mapping[str, Any] | None,
    layers: Sequence[Mapping[str, Any]],
    problem: Problem,
    groups: Groups | None,
) -> Origin:
    """Where the model comes from, what it predicts, and what was declared of the records."""
    public: dict[str, Any] = {} if task is None else dict(task.public)
    if task is not None and config.keep_fraction not in (None, 1):
        public["keep_fraction"] = config.keep_fraction
    if groups is not None:
        public[RECORDS_PER_PERSON] = groups.records_each
        if config.sampling == RECORD:
            public[SAMPLED_BY] = RECORD
    if config.records is not None:
        public[DECLARED_SIZE] = True
    if config.group_size is not None:
        public[GROUP_SIZE] = config.group_size
    targets = record_rows(problem.train.part(slice(1)).targets)
    loss = record_loss(problem.loss)
    predicts: str | None = None
    if isinstance(targets, Tensor):
        if is_one_of(loss, LABEL_LOSSES):
            predicts = LABELS
        elif is_one_of(loss, NUMBER_LOSSES):
            predicts = NUMBERS
        elif is_classification(loss) or not (targets.dim() > 1 or targets.is_floating_point()):
            predicts = CLASSES
    features = [dict(layer) for layer in layers]
    if network is not None and features:
        network = {"name": "with-features", "features": features, "network": network}
    # The task of a user's file is not named: the path of private records is not released.
    name = task.name if task is not None and task.name in TASKS else None
    return Origin(name, network, public, features if network is None else (), predicts)


def drawing_records(config: RunConfig, records_each: int | None) -> Method:
    """The method of a run that draws records of persons, of whom this many may join at once."""
    method = config.method
    updates_alone = isinstance(method, GradientMethod) and method.gate == "none"
    plain = updates_alone and getattr(method, "metrics_budget", None) is None
    check_by_record(records_each, config.records, plain=plain)
    joining: dict[str, Any] = {"records_joining": records_each}
    return replace(method, **joining)


def _book(config: RunConfig, plan: Plan, unit: str, train: Examples, booked: str | None) -> bytes:
    """Book a run before anything is drawn from its records; returns the id of its booking."""
    assert config.ledger is not None
    ledger = DataLedger(config.ledger)
    if booked is not None and ledger.holds(booked):
        return booked.encode()  # a run that is resumed
    digest = hashlib.blake2b(str(len(train)).encode())
    for part in train.parts(RECORDS_READ):
        for value in tensors_of((part.inputs, part.targets)):
            digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    whole = config.holdout is not None  # figures of held-out records are within the same epsilon
    return ledger.book(plan, unit, digest.digest(), config.method.label, whole=whole).encode()


def _refuse(asked: Mapping[str, bool], why: str) -> None:
    for name, given in asked.items():
        if given:
            raise InvalidInputError(f"{name} {why}")


def _records(
    train_set: Any, test_set: Any, model: nn.Module, loss: LossFunction, performance: Performance
) -> dict[str, Examples]:
    """Both sets as tensors of the types that model and loss take, alike in shape."""
    fraction = next((p.dtype for p in model.parameters()), torch.get_default_dtype())

    limits = {"workers": performance.workers, "held_bytes": performance.data_bytes}
    found = {
        name: with_indices(as_examples(given, name, fraction, **limits), loss)
        for name, given in (("train_set", train_set), ("test_set", test_set))
        if given is not None or name == "train_set"
    }
    if "test_set" in found:
        check_alike(found["test_set"], found["train_set"])
    return found
