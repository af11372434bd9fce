"""Train a model under a privacy budget.

Several runs at once in one process, for seeds of one experiment.

A small network does not fill a GPU. Runs take turns, a block of trials each; those on CUDA graphs
are replayed on separate streams. Every run ends as it would alone.
"""

import os
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dpsur import checks
from dpsur.config import Intervals, Performance, RunConfig, check_budget, choose_method, uses_gpu
from dpsur.distributed import connect, restarted
from dpsur.errors import InvalidInputError, NothingReleasedError, PrivacyWarning, ReplayError
from dpsur.functional.persons import DEFAULT_RECORDS, Groups, called, number_persons
from dpsur.functional.problem import LossFunction
from dpsur.functional.records import Examples
from dpsur.methods import METHODS, Method
from dpsur.networks import build_network
from dpsur.presets import DataFacts
from dpsur.privacy.accounting import DEFAULT_ACCOUNTING
from dpsur.privacy.budget import Budget
from dpsur.privacy.plan import DELAY, NOT_HIDDEN
from dpsur.privacy.statement import PERSON, RECORD, planned_warnings
from dpsur.runs.data import Collated, check_observers
from dpsur.runs.evaluation import check_target, split_off
from dpsur.runs.files import BOOKING, RunFolder, to_json, write_atomically
from dpsur.runs.observers import (
    Observer,
    RandomDelays,
    Recorder,
    check_track,
    default_progress,
    tracked,
)
from dpsur.runs.release import write_release
from dpsur.runs.replay import commitments, stated_commitments
from dpsur.runs.replay import replay as replay_run
from dpsur.runs.result import Run, finish_run
from dpsur.runs.session import ActiveRun, Session, build_session, choose_device
from dpsur.runs.tasks import better_for_images, note_privately, own_task, task_network
from dpsur.status import notes, silenced
from dpsur.tasks import Task
from dpsur.tasks.schema import AUTO, Schema

# Arguments that `fit` does not have, and where they belong.
_BUDGET = "budget=dpsur.Budget(epsilon=..., delta=...)"
_ELSEWHERE = {"epsilon": _BUDGET, "delta": _BUDGET} | {
    each.name: f"method=dpsur.{kind.__name__}({each.name}=...)"
    for kind in [*METHODS.values(), METHODS["dpsgd"]]
    for each in fields(kind)
}


@partial(checks.arguments, elsewhere=_ELSEWHERE)
def fit(
    model: nn.Module | str,
    train_set: Any = None,
    *,
    loss: LossFunction | None = None,
    budget: Budget,
    method: Method | None = None,
    test_set: Any = None,
    schema: Schema | str | os.PathLike[str] | None = None,
    classes: int | Sequence[Any] | None = None,
    image_size: int | Sequence[int] | str | None = None,
    accounting: str | None = None,
    features: str | None = None,
    normalisation: str | None = None,
    max_updates: int | None = None,
    holdout: float | None = None,
    hide_rejections: str = NOT_HIDDEN,
    seed: int | None = None,
    device: str | torch.device = "auto",
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    intervals: Intervals | None = None,
    performance: Performance | None = None,
    collate: Callable[[Any], Any] | None = None,
    augment: Callable[[Any], Any] | None = None,
    views: int = 1,
    groups: Any = None,
    records_per_person: int | None = None,
    sampling: str = PERSON,
    group_size: int | None = None,
    records: int | None = None,
    ledger: str | os.PathLike[str] | None = None,
    observers: Sequence[Observer] = (),
    progress: bool = True,
    track: str | None = None,
    replay: int | None = None,
) -> Run:
    """Train a copy of `model` on `train_set` within `budget`.

    Args:
        model: any module that maps a batch of inputs to a batch of outputs, row by row. It is left
            as it is; `Run.model` is a trained copy, in evaluation mode. "auto" is a network that
            suits the records; with a schema also "linear" or "mlp". The records may stand in this
            place, for a model "auto": fit("images:DIR", budget=...).
        train_set: the private records: a pair (inputs, targets) of tensors, arrays or lists, or a
            map-style data set of such pairs. A data set is read once: one that augments its records
            at random is refused. Also the name of your files ("images:DIR", "csv:FILE",
            "parquet:FILE", "jsonl:FILE", "npz:FILE"), a data frame or a Hugging Face data set with
            a schema, and texts or images of Pillow with their labels.
        loss: maps (outputs, targets) of a batch to a number; it is applied to each record alone, so
            that class weights of a cross entropy count for each record, without a mean over them.
            By default F.cross_entropy, or the loss of the schema.
        budget: the epsilon and delta that may be spent.
        method: by default chosen from public facts, with the reasons on stderr: the gate `block`,
            which finds a learning rate and a clip norm, or, for a linear layer on `features` of
            norm 1, plain DP-SGD by rule. What a given method leaves open is chosen to fit.
        test_set: public records to measure on, in the same form. Figures on them are not noisy and
            not charged.
        schema: declares the columns of a table, or the file of such a schema.
        classes: how many classes there are, or the list of their names: for texts, images and
            "auto", where nothing else says it. They become public.
        image_size: height and width, with channels before them or not, that files of images are
            scaled to (default: 3 x 32 x 32, which the encoder sees).
        accounting: how privacy loss is counted, by name (default: "proven"; "proven-pld", which is
            tighter, behind the gates loss and coin).
        features: "scattering" or "encoder" trains on such features of images instead of pixels;
            `model` must take those, `Run.model` takes images. A method may bring its own
            (`DpsgdHf`).
        normalisation: of features: "none", "group" (free), "private" (channel statistics, charged)
            or "mean" (of the encoder's features, charged); by default "group" for scattering.
        max_updates: ends the planned run after this many updates, to try things out; noise stays as
            planned, and less than the budget is spent.
        holdout: hold out about this fraction of the private records, each by its own values, and
            release noisy test figures of them within epsilon, in `Run.statement["holdout"]`. For
            tables, and pairs of tensors.
        hide_rejections: "constant" continues, after the last update, to a number of trials that is
            fixed before the run, so that its duration does not reveal how many were rejected;
            "delay" waits a random time after every accepted update, which only blurs it.
        seed: makes the run repeatable, and void against anyone who knows the seed.
        device: "cpu", "cuda", or "auto" for CUDA where there is one.
        out: folder for checkpoints, diagnostics and, at the end, the release.
        resume: continue the interrupted run in `out`.
        intervals: how often to save and to evaluate.
        performance: whether to capture trials on CUDA, and whether to round to TF32 or bfloat16.
        collate: makes tensors of the records of a data set, as a `DataLoader` would, but of each
            record alone: it must pad to a length that does not depend on other records, and
            remember nothing of them.
        augment: changes a batch of inputs at random, each record on its own, as the model is to see
            it in training: flips, shifts, noise. Shapes stay as they are.
        views: number of augmented views of a record, averaged inside its one clipped gradient:
            no cost in privacy, and as many times the computation.
        groups: whom each record belongs to: an array with a name or number per record, a column of
            the table, or a function of a record's input and target, or of a row. The unit of
            privacy is then one person with all of their records. Persons are drawn in place of
            records, and a person adds one gradient, the mean over their records, clipped once.
        records_per_person: how many records of a person are used at most (default: 16); a public
            number. Which they are follows from that person's records alone.
        sampling: with `groups`, "person" draws persons for a batch, "record" draws records, of
            which a person has at most `records_per_person`; the noise then hides as many of
            theirs as may join. It needs `records` and `Dpsgd(gate="none")`.
        group_size: state the guarantee for groups of this many records too, as those of a person
            whom nothing names; it is converted from the guarantee for one record, by the exact
            privacy losses where these compose.
        records: a public size of the data set, where the true number of records (or of persons) is
            not public. Rates, noise and delta follow from it alone.
        ledger: the ledger of the data set, in which the run books what it may spend before it
            starts; a run above the ledger's total is refused.
        observers: are called after every trial. What they see is private.
        progress: show a bar on a terminal and in a notebook, with public figures only.
        track: "tensorboard", "mlflow" or "wandb" gets public figures of the run, and no others.
        replay: hold the finished run in `out` against these arguments in place of training: so many
            steps, chosen at random, are computed again. Raises `ReplayError` where they, the
            commitments or the weights of its release differ. The run must have been made with
            `Intervals(replayable=True)`.

    Formal guarantee: `Run.model` is (epsilon, delta)-differentially private for adding or removing
    one record of `train_set`, with `groups` one person and all of their records, as `Run.statement`
    says, if the accounting is a proved one.
    """
    check_observers(observers)
    check_budget(budget)
    if track is not None:
        check_track(track)
    if replay is not None:
        checks.at_least_one("replay", replay)
        intervals, ledger = replace(intervals or Intervals(), replayable=True), None
    if callable(groups) and schema is None and train_set is not None:
        groups = called(groups, "an input and a target", _pairs(train_set))
    if collate is not None:
        train_set = Collated(train_set, collate)
        test_set = None if test_set is None else Collated(test_set, collate)
    if train_set is None and isinstance(model, (str, os.PathLike)):
        model, train_set = AUTO, model
    task = own_task(
        *(model, train_set, test_set),
        schema=schema,
        classes=classes,
        image_size=image_size,
        groups=groups,
    )
    if task is not None:
        train_set, test_set = task.load(None)
        loss = task.loss if loss is None else loss
        for text in task.warnings:
            warnings.warn(text, UserWarning, stacklevel=_caller())
    loss = F.cross_entropy if loss is None else loss
    grouped = _groups(groups, records_per_person, train_set, task)
    units = records or (_count(train_set) if grouped is None else grouped.count)
    unit = RECORD if grouped is None or sampling == RECORD else PERSON
    held = None
    if holdout is not None:
        check_target(loss)
        train_set, held = split_off(_pair_of_tensors(train_set), holdout)
    network: dict[str, Any] | None = None
    known = accounting or DEFAULT_ACCOUNTING
    reasons: tuple[str, ...] = ()
    facts = DataFacts(
        records=units,
        shape=None,
        classes=None,
        gpu=uses_gpu(str(device)),
        features=features,
        short=max_updates is not None,
        target=None if task is None else task.target,
        budget=(budget.epsilon, budget.delta),
        unit=unit,
    )
    if task is not None and isinstance(model, str):
        asked = features or (method.features if method else None)
        network = task_network(task, model, asked or task.auto_features)
        if model == AUTO:
            features = asked or task.auto_features
        if model == AUTO and method is None:
            facts = replace(
                facts, shape=task.shape, classes=task.classes, kind=task.kind, features=asked
            )
            method, preset, reasons = choose_method(
                facts, features, normalisation, known, own_model=False
            )
            features, normalisation = preset.features, preset.normalisation
            assert features is not None
            network = {**task.networks[features], **preset.network}
    elif isinstance(model, str):
        raise InvalidInputError(
            f"model {model!r} is the name of a network for a table; pass schema, or a module"
        )
    if network is not None:
        model = build_network(network)
    assert not isinstance(model, str)
    if method is None:
        # all that is trained is one linear layer, without a bias, of zeros
        weights = list(model.parameters()) if isinstance(model, nn.Module) else []
        layers = [one for one in model.modules() if isinstance(one, nn.Linear)] if weights else []
        linear = len(weights) == len(layers) == 1 and not weights[0].any()
        facts = replace(facts, own_model=not linear, features=features)
        method, preset, reasons = choose_method(
            facts, features, normalisation, known, own_model=True
        )
        normalisation = preset.normalisation
        reasons = (*reasons, *better_for_images(train_set, features, network))
    config = RunConfig(
        task=None,
        method=method,
        budget=budget,
        accounting=accounting,
        features=features,
        normalisation=normalisation,
        max_updates=max_updates,
        holdout=holdout,
        sampling=sampling,
        group_size=group_size,
        records=records,
        ledger=ledger,
        hide_rejections=hide_rejections,
        seed=seed,
        device=str(device) if isinstance(device, torch.device) else device,
        out=out,
        intervals=Intervals() if intervals is None else intervals,
        performance=Performance() if performance is None else performance,
    )
    folder = None if config.out is None else RunFolder(config.out)
    if folder is None and (resume or replay is not None):
        raise InvalidInputError("resume and replay need the folder of the run; set out")
    if folder is not None and replay is not None:
        stated_commitments(folder)
    ranks = connect(choose_device(config.device), config.intervals.rank_timeout)
    with ranks.ends_together(), silenced(not ranks.is_main):
        if folder is not None:
            again = resume or replay is not None
            resume = ranks.decided(lambda: resumes(folder, asked=again))
        session = build_session(
            config,
            model,
            train_set,
            loss=loss,
            test_set=test_set,
            augment=augment,
            views=views,
            task=task,
            network=network,
            holdout=held,
            groups=grouped,
            resumed=folder if resume and replay is None else None,
            replayed=None if replay is None else folder,
        )
        notes(reasons)  # after all checks, which end in one line
        bar = default_progress(observers) if progress and ranks.is_main else None
        observers = (*([] if bar is None else [bar]), *observers)
        if folder is not None and replay is not None:
            found = replay_run(session, folder, replay)
            if found.faults:
                raise ReplayError("; ".join(found.faults))
            notes([found.describe()])
            return found.run
        with ExitStack() as open_until_the_end:
            if track is not None and ranks.is_main:
                place = None if folder is None else folder.root
                following = tracked(track, session.plan, session.method.label, place)
                observers = (*observers, open_until_the_end.enter_context(following))
            if bar is not None:
                open_until_the_end.enter_context(bar)
            run = execute(
                session,
                folder=folder,
                resume=resume,
                observers=observers if ranks.is_main else (),
            )
        if folder is not None and task is not None and ranks.is_main:
            note_privately(task, folder)
        return run


def resumes(folder: RunFolder, *, asked: bool) -> bool:
    """Whether a run resumes the one in its folder: if asked to, or after an elastic restart.

    A process that `torchrun` starts again gets the arguments of the first start. A new run would
    spend the budget once more.
    """
    if asked or (restarted() and folder.checkpoint.exists()):
        return True
    folder.check_new()
    return False


def _groups(groups: Any, most: int | None, train_set: Any, task: Task | None) -> Groups | None:
    if most is not None:
        checks.at_least_one("records_per_person", most)
    if groups is None:
        if most is not None:
            raise InvalidInputError(
                f"records_per_person {most} needs groups=..., which name the person of each record"
            )
        return None
    records = _count(train_set)
    if task is not None and task.persons is not None:
        person = task.persons
    elif records is None:
        raise InvalidInputError("groups need records in memory; pass train_set as tensors")
    else:
        person = number_persons(groups, records)
    return Groups(person, DEFAULT_RECORDS if most is None else most)


def _pairs(train_set: Any) -> Iterable[tuple[Any, ...]]:
    """The records as they were given, one by one; names of files say nothing of persons."""
    if isinstance(train_set, (str, os.PathLike)):
        raise InvalidInputError(
            "groups as a function are for records in memory; name a column of the file, or pass an "
            "array with one name or number per record"
        )
    if isinstance(train_set, (tuple, list)) and len(train_set) == 2:
        return zip(*train_set, strict=True)
    return (train_set[row] for row in range(len(train_set)))


def _count(train_set: Any) -> int | None:
    """The number of records, if it is known before they are read."""
    if isinstance(train_set, (tuple, list)) and len(train_set) == 2:
        train_set = train_set[1]
    while isinstance(train_set, Mapping) and train_set:  # columns, all of one length
        train_set = next(iter(train_set.values()))
    try:
        return len(train_set)
    except TypeError:
        return None


def _pair_of_tensors(train_set: Any) -> Examples:
    if isinstance(train_set, Examples):
        return train_set
    if isinstance(train_set, (tuple, list)) and len(train_set) == 2:
        try:
            return Examples(*(torch.as_tensor(part) for part in train_set))
        except (TypeError, ValueError, RuntimeError):
            pass
    raise InvalidInputError(
        "holdout needs a table with a schema, or train_set as a pair of tensors; leave it out"
    )


def execute(
    session: Session,
    *,
    folder: RunFolder | None = None,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    stop_requested: Callable[[], bool] = lambda: False,
    store_config: bool = False,
) -> Run:
    """Run a prepared session and, where there is a folder, write its release at the end.

    `stop_requested` is called after every trial, or block of captured trials; if it returns True,
    the run saves a checkpoint and stops. `store_config` writes the config of a new run into its
    private folder, so that the command line can resume it. Of several ranks only the first writes.
    """
    ranks = session.ranks
    if ranks.is_main:
        for text in _objections(session):
            warnings.warn(text, PrivacyWarning, stacklevel=_caller())
        delays = [RandomDelays()] if session.config.hide_rejections == DELAY else []
        observers = [*delays, *observers]
    written = folder if ranks.is_main else None
    recorder, committed = Recorder(None if written is None else written.private), None
    with ExitStack() as locked:
        if written is not None:
            written.create()
            locked.enter_context(written.lock())
            if not resume and not written.unstarted:
                raise InvalidInputError(
                    f"another run has started in the folder {written.root}; choose another folder"
                )
            written.clean()
            if session.booking is not None:
                write_atomically(written.private / BOOKING, session.booking.encode(), mode=0o600)
            if store_config and not resume:
                write_atomically(written.config, to_json(session.config.to_json()), mode=0o600)
        progress = session.run([recorder, *observers], folder, resume, stop_requested)
        if written is not None and session.config.intervals.replayable:
            committed, _ = commitments(session, written, progress)
        run = finish_run(session, progress, recorder.rows, committed)
        if written is not None:
            write_release(written.release, run.model, run.statement, run.origin)
        if folder is None:
            return run
        ranks.wait_for_all()  # until the release is written
    return replace(run, saved=folder.release)


def _objections(session: Session) -> list[str]:
    return planned_warnings(session.plan, session.problem.size, seeded=session.streams.seeded)


def _caller() -> int:
    """The `stacklevel` of the first caller of the calling function outside this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("dpsur."):
        level, frame = level + 1, frame.f_back
    return level


# A run, or why nothing may be released from it: the others are not to suffer from that.
Outcome = Run | NothingReleasedError


def run_together(sessions: Sequence[Session]) -> list[Outcome]:
    """Run prepared sessions to their ends, and return what each of them came to, in their order.

    Records that are on the device already, and given to all sessions, are there only once.

    Formal guarantee: each run has its own, as if it were alone; together they are a composition.
    """
    for text in dict.fromkeys(text for session in sessions for text in _objections(session)):
        warnings.warn(text, PrivacyWarning, stacklevel=2)
    outcomes: dict[int, Outcome] = {}
    runs = dict(enumerate(map(_in_turns, sessions)))
    try:
        while runs:
            for number, run in list(runs.items()):
                try:
                    next(run)
                except StopIteration as ended:
                    outcomes[number] = ended.value
                    del runs[number]
    finally:
        for run in runs.values():
            run.close()
    return [outcomes[number] for number in range(len(sessions))]


def _in_turns(session: Session) -> Generator[None, None, Outcome]:
    """One of several runs, with a CUDA stream to itself. It stops where others may go on.

    Whatever it computes comes after what was on the device before, and before what comes after.
    """
    device, recorder = session.streams.device, Recorder()
    own: Any = None
    if device.type == "cuda":
        own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        own.wait_stream(torch.cuda.current_stream(device))

    def stream() -> Any:
        return nullcontext() if own is None else torch.cuda.stream(own)

    with session.arithmetic(), stream():
        active = ActiveRun(session, [recorder])
    try:
        while not active.loop.finished:
            for take_turn in (active.loop.launch, active.collect):
                yield
                with session.arithmetic(), stream():
                    take_turn()
        with session.arithmetic(), stream():
            try:
                return finish_run(session, active.finish(), recorder.rows)
            except NothingReleasedError as error:
                return error
    finally:
        if own is not None:
            torch.cuda.current_stream(device).wait_stream(own)
        active.loop.close()
