"""Runs on tasks by name: data, features, network and method put together."""

import hashlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpsur import checks
from dpsur.config import RunConfig
from dpsur.errors import InvalidInputError, ModelInputError
from dpsur.features import compute, features_named
from dpsur.functional.persons import DEFAULT_RECORDS, Groups
from dpsur.functional.problem import Problem
from dpsur.functional.process_settings import seeded_globally
from dpsur.functional.records import Examples
from dpsur.mechanism.streams import INIT, SETUP, Streams
from dpsur.networks import build_network, takes
from dpsur.per_example.model_check import check_model
from dpsur.runs.build_session import build_session, choose_device
from dpsur.runs.files import RunFolder, to_json, write_atomically
from dpsur.runs.holdout import check_target, split_off
from dpsur.runs.input_features import InputFeatures
from dpsur.runs.release import Origin
from dpsur.runs.session import Session
from dpsur.tasks import TASKS, Task, task_named

# The key of the draws of `subset`: they are the same on every machine.
SUBSET_KEY = b"dpsur-subset/1"
HOLD_OUT_SEED = 2025
# Features that leave inputs alone.
AS_THEY_ARE = "pixels"
# Rows of a sample problem.
SAMPLE = 3


@dataclass(frozen=True)
class TaskRecords:
    """Training and test records; `featured` says that their features were computed already.

    `holdout` are private records that noisy figures are released of, `groups` whom the training
    records belong to.
    """

    train: Examples
    test: Examples | None
    featured: bool = False
    holdout: Examples | None = None
    groups: Groups | None = None


def load_records(config: RunConfig) -> TaskRecords:
    """The records of a run, as the task has them."""
    task = task_of(config)
    train, test = task.load(config.data_dir)
    if task.persons is not None:
        if config.hold_out:
            raise InvalidInputError("hold_out parts the records of a person; leave it out")
        most = config.records_per_person or DEFAULT_RECORDS
        return TaskRecords(train, test, groups=Groups(task.persons, most))
    if config.hold_out:
        train, test = held_out(train, config.hold_out)
    train, holdout = subset(train, config.keep_fraction), None
    if config.holdout is not None:
        check_target(task.loss)
        train, holdout = split_off(train, config.holdout)
    return TaskRecords(train, test, holdout=holdout)


def task_of(config: RunConfig) -> Task:
    if config.task is None:
        raise InvalidInputError("the config names no task; set task, or use dpsur.fit")
    return task_named(config.task, declared=config.declared)


def with_features(config: RunConfig, records: TaskRecords, device: torch.device) -> TaskRecords:
    """The records of a run with their features computed, on a device, for several runs to share."""
    features, scale = features_named(features_of(config)), task_of(config).pixel_scale
    train, test = (
        None
        if part is None
        else Examples(compute(features, part.inputs, device=device, scale=scale), part.targets)
        for part in (records.train, records.test)
    )
    assert train is not None
    return replace(
        records,
        train=train.to(device),
        test=None if test is None else test.to(device),
        featured=True,
    )


def features_of(config: RunConfig) -> str:
    """The features that were asked for, or the method's, or the task's.

    A method that changes the network takes the task's first that has a network to change.
    """
    if config.features or config.method.features:
        return config.features or config.method.features or ""
    task, changes = task_of(config), config.method.network_changes()
    networks = task.networks
    suited = (name for name in networks if config.model or takes(networks[name], changes))
    return next(suited, task.default_features)


def build_task_session(
    config: RunConfig,
    records: TaskRecords | None = None,
    **earlier: Any,
) -> tuple[Session, Origin]:
    """A session for a run on a task, and where its model comes from.

    `records` are loaded unless they are given. `earlier` are arguments of `build_session` that come
    from a run which is resumed or replayed: `released`, `booking`, `positions`.
    """
    task, config = task_of(config), replace(config, features=features_of(config))
    description, build = _network_of(task, config)
    records = load_records(config) if records is None else records
    if records.featured:
        kind = _features(task, config).kind
        config = replace(config, features=AS_THEY_ARE, normalisation=kind)
    shape = _features(task, config).check(_shape(records))
    model = _initialised(config, build)
    with _features_named(config, shape != _shape(records)):
        session = build_session(
            config,
            model,
            records.train,
            loss=task.loss,
            test_set=records.test,
            pixel_scale=task.pixel_scale,
            table=task.table,
            holdout=records.holdout,
            groups=records.groups,
            **earlier,
        )
    return session, origin_of(task, description, session, config.keep_fraction)


def sample_problem(config: RunConfig) -> Problem:
    """The model of a run on a task, with zeros in the shape of its features: to inspect, not train.

    Of the records only shape and type are used.
    """
    task, config = task_of(config), replace(config, features=features_of(config))
    _, build = _network_of(task, config)
    records = load_records(config)
    shape = _features(task, config).check(_shape(records))
    model = config.method.adapt(_initialised(config, build))
    few = records.train.part(slice(SAMPLE))
    inputs = torch.zeros_like(few.inputs)
    if shape != _shape(records):
        inputs = torch.zeros(len(few), *shape)
    zeros = Examples(inputs, torch.zeros_like(few.targets))
    device = choose_device(config.device)
    problem = Problem(model.to(device), task.loss, zeros.to(device), bf16=config.performance.bf16)
    with _features_named(config, shape != _shape(records)):
        check_model(problem.model, zeros.part(slice(1)).to(device))
    return problem


def _features(task: Task, config: RunConfig) -> InputFeatures:
    return InputFeatures(config.features, config.normalisation, table=task.table)


@contextmanager
def _features_named(config: RunConfig, computed: bool) -> Iterator[None]:
    """Where a custom model does not take its inputs, say that they are features, if they are."""
    try:
        yield
    except ModelInputError as error:
        if config.model is None or not computed:
            raise
        raise ModelInputError(
            f"{error}; these are {config.features} features: choose --features {AS_THEY_ARE} for "
            f"the images themselves, or write {config.model} for the features"
        ) from error


def _shape(records: TaskRecords) -> tuple[int, ...]:
    return records.train.record_shape


def _network_of(
    task: Task, config: RunConfig
) -> tuple[dict[str, Any] | None, Callable[[], nn.Module]]:
    """The description of the task's network, if it is that, and what builds the network."""
    if config.model is not None and config.model in task.models:
        description: dict[str, Any] | None = dict(task.models[config.model])
    else:
        description = None if config.model is not None else _network(task, config)
    return description, _builder(description, config.model)


def _initialised(config: RunConfig, build: Callable[[], nn.Module]) -> nn.Module:
    """The network with its initial weights."""
    device = choose_device(config.device)
    with _initialisation(config, device):
        return build()


def _initialisation(config: RunConfig, device: torch.device) -> AbstractContextManager[None]:
    """Where the initial weights are drawn from."""
    if config.seed is None and config.network_seed is not None:
        return seeded_globally(config.network_seed, device)
    return Streams(config.seed, device).at(SETUP).global_randomness(INIT)


def subset(train: Examples, fraction: float | None) -> Examples:
    """About this fraction of the records, the same ones every time.

    Guarantee: whether a record is kept follows from its own values and the fraction alone, by a
    keyed hash. Adding or removing one record changes the subset by that record at most, wherever it
    stands, so what is private for the subset is as private for all records. The number of records
    that are kept takes the place of N: like N, it counts as public.
    """
    if fraction is None:
        return train
    checks.sample_rate("keep_fraction", fraction)
    if fraction == 1:
        return train
    kept = [draw < fraction for draw in _draws(train)]
    if not any(kept):
        raise InvalidInputError(
            f"keep_fraction {fraction} keeps none of the records; choose a larger one"
        )
    return train.select(torch.tensor(kept).nonzero().flatten())


def _draws(records: Examples) -> Iterator[float]:
    """A number in [0, 1) for every record, from its values alone."""
    parts = [_rows(records.inputs), _rows(records.targets)]
    for values, target in zip(*parts, strict=True):
        digest = hashlib.blake2b(values, digest_size=8, key=SUBSET_KEY)
        digest.update(target)
        yield (int.from_bytes(digest.digest(), "little") >> 11) / 2**53


def _rows(values: Tensor) -> Iterator[memoryview]:
    array = np.ascontiguousarray(values.detach().cpu().numpy()).reshape(len(values), -1)
    return (row.data for row in array.view(np.uint8))


def held_out(train: Examples, count: int) -> tuple[Examples, Examples]:
    """Training records without some that are kept back, and those, drawn once for all."""
    if not 0 < count < len(train):
        raise InvalidInputError(
            f"hold_out must be above 0 and below the {len(train)} records, got {count}"
        )
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(HOLD_OUT_SEED))
    order = order.to(train.targets.device)
    return train.select(order[count:]), train.select(order[:count])


def _network(task: Task, config: RunConfig) -> dict[str, Any]:
    features = features_of(config)
    if features not in task.networks:
        known = ", ".join(task.networks)
        raise InvalidInputError(
            f"task {task.name} has no network for the features {features}, only for {known}; "
            "choose another method or features, or bring a network with --model"
        )
    network, changes = task.networks[features], config.method.network_changes()
    if not takes(network, changes):
        suited = [name for name, other in task.networks.items() if takes(other, changes)]
        remedy = f"choose --features {suited[0]}" if suited else "choose another method"
        raise InvalidInputError(
            f"method {config.method.name} sets the {', '.join(changes)} of a network, which "
            f"{network['name']} (task {task.name}, features {features}) does not have; {remedy}, "
            "or bring a network with --model"
        )
    activation = {} if config.activation is None else {"activation": config.activation}
    return {**network, **config.network, **activation, **changes}


def origin_of(
    task: Task,
    network: Mapping[str, Any] | None,
    session: Session,
    keep_fraction: float | None = None,
) -> Origin:
    """Where the model of a session on a task comes from."""
    # The task of a user's file is not named: the path of private records is not released.
    name = task.name if task.name in TASKS else None
    public = dict(task.public)
    if keep_fraction not in (None, 1):  # all records are kept
        public["keep_fraction"] = keep_fraction
    return Origin(name, network, public).behind(session.layer_descriptions)


def note_privately(task: Task, folder: RunFolder) -> list[Path]:
    """Write what was counted of the training records into the private folder of a run."""
    noted = []
    for name, counts in task.private.items():
        noted.append(folder.private / f"{name}.json")
        write_atomically(noted[-1], to_json(counts), mode=0o600)
    return noted


def _builder(description: Mapping[str, Any] | None, name: str | None) -> Callable[[], nn.Module]:
    if description is not None:
        return lambda: build_network(description)
    assert name is not None
    module, separator, function = name.partition(":")
    if not separator or not module or not function:
        raise InvalidInputError(f"model {name!r} must have the form module:function")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InvalidInputError(
            f"model {name} cannot be imported ({error}); the module must be on PYTHONPATH"
        ) from error
    if not callable(found):
        raise InvalidInputError(f"model {name} is not a function that builds a network")
    return lambda: _built(found, name)


def _built(function: Callable[[], Any], name: str) -> nn.Module:
    try:
        model = function()
    except Exception as error:  # a custom function may raise anything
        raise InvalidInputError(
            f"model {name} cannot be built ({type(error).__name__}: {error}); it must be a "
            "function without arguments that returns a torch.nn.Module"
        ) from error
    if isinstance(model, nn.Module):
        return model
    raise InvalidInputError(
        f"model {name} must return a torch.nn.Module, it returned {type(model).__name__}"
    )
