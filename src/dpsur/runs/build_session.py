"""From a config, a model and records to a session that is ready to run."""

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur.config import Performance, RunConfig
from dpsur.distributed import connect
from dpsur.distributed.ranks import local_device, unwrap
from dpsur.errors import InvalidInputError
from dpsur.features import MEAN, PRIVATE, PixelScale
from dpsur.features.table import TableLayout
from dpsur.functional.model_loss import is_transformers_model, model_loss
from dpsur.functional.persons import Groups, PersonLoss, check_by_record, choose_records
from dpsur.functional.problem import LossFunction, Problem, drop_weights
from dpsur.functional.records import Examples, StreamedExamples, place
from dpsur.functional.tree import tensors_of
from dpsur.mechanism.streams import Streams, prepare_kernels
from dpsur.methods import Dpsgd, Dpsur, Method
from dpsur.methods.gradient_method import GradientMethod
from dpsur.per_example import check_model
from dpsur.per_example.clipping import Augment, check_augmentation
from dpsur.privacy.accountants.noise_tail import MOST_WEIGHTS
from dpsur.privacy.data_ledger import DataLedger
from dpsur.privacy.plan import Plan
from dpsur.privacy.statement import PERSON, RECORD
from dpsur.runs.checkpoint import Statistics
from dpsur.runs.data import (
    as_examples,
    check_alike,
    check_labels,
    check_values,
    checked_parts,
    with_indices,
)
from dpsur.runs.files import to_json
from dpsur.runs.input_features import InputFeatures, compute_inputs, like_features
from dpsur.runs.session import Session
from dpsur.runs.validation import (
    check_is_loss,
    check_loss,
    check_module,
    check_targets,
    check_tokens,
    loss_on,
)
from dpsur.status import status

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
    released: Statistics | None = None,
    pixel_scale: PixelScale | None = None,
    table: TableLayout | None = None,
    holdout: Examples | None = None,
    augment: Augment | None = None,
    views: int = 1,
    groups: Groups | None = None,
    booking: str | None = None,
    positions: Mapping[str, Tensor] | None = None,
) -> Session:
    """Check everything and fix the privacy of the run, then compute features. Nothing is trained.

    `released` are the statistics of a run that is resumed (see `load_statistics`), so that they are
    drawn once for one run. `pixel_scale` is what images were standardised with, `table` where the
    numbers of a table are. `holdout` are private records that are not trained on. `groups` say to
    whom each record belongs: then persons are sampled, clipped and counted in place of records.
    `booking` is the id of a run that is resumed in the ledger of its data. With the `positions` of
    the streams of another run all random numbers are its own (see `load_positions`).
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
    train, test = _records(train_set, test_set, model, loss, config.performance)
    # while records are checked and noise is calibrated
    prepare_kernels(device, secret=config.seed is None)
    # a method may bring its features
    asked = config.features or config.method.features
    features = InputFeatures.within(
        asked, config.normalisation, config.budget, scale=pixel_scale, table=table
    )
    if holdout is not None and features.charges != features.setup:
        raise InvalidInputError(
            "holdout is for records that nothing was learned from, and the schema was learned from "
            "all of them; leave holdout out, or declare a schema"
        )
    features.check_held(train, test)
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
    for name, examples in (("train_set", train), ("test_set", test)):
        if examples is not None:
            check_labels(_first(examples), outputs, loss, name)
    applied = loss_on(loss, device)
    check_loss(applied, outputs, train.targets)
    for name, examples in (("train_set", train), ("test_set", test)):
        # a record that would end the run halfway would reveal itself
        for part in () if examples is None else checked_parts(examples):
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
    if config.ledger is not None:
        unit = RECORD if groups is None else PERSON
        booking = ranks.from_main(lambda: _book(config, plan, unit, train, booking)).decode()
    streams = Streams(config.seed, device, ranks)
    if positions is not None:
        streams.restore(positions)
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
        layers=inputs.layers,
        layer_descriptions=inputs.descriptions,
        statistics=inputs.statistics,
        holdout=holdout,
        records_per_person=None if groups is None else groups.records_each,
        booking=booking,
        records=train if config.intervals.replayable else None,
    )


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
    """Refuse by name what was asked for and cannot be combined."""
    for name, given in asked.items():
        if given:
            raise InvalidInputError(f"{name} {why}")


def _first(examples: Examples) -> Examples:
    """A record that is looked at before all are: the first of those that are not held."""
    return examples.part(slice(1)) if isinstance(examples, StreamedExamples) else examples


def _records(
    train_set: Any, test_set: Any, model: nn.Module, loss: LossFunction, performance: Performance
) -> tuple[Examples, Examples | None]:
    """Both sets as tensors of the types that model and loss take, alike in shape."""
    fraction = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
    reading: dict[str, int | None] = {
        "workers": performance.workers,
        "held_bytes": performance.data_bytes,
    }
    train = with_indices(as_examples(train_set, "train_set", fraction, **reading), loss)
    if test_set is None:
        return train, None
    test = with_indices(as_examples(test_set, "test_set", fraction, **reading), loss)
    check_alike(test, train)
    return train, test
