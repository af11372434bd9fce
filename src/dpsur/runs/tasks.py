"""Runs on tasks by name: data, features, network and method put together.

What `fit` makes of a user's records: a task, where they are a file, texts, images or a table.

Tensors and data sets of tensors need nothing of this; they go to the model as they are.
"""

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpsur import checks
from dpsur.config import RunConfig
from dpsur.errors import InvalidInputError, ModelInputError
from dpsur.features import words
from dpsur.features.table import WORDS_DIMENSION
from dpsur.functional.persons import DEFAULT_RECORDS, Groups
from dpsur.functional.problem import Problem
from dpsur.functional.process_settings import seeded_globally
from dpsur.functional.records import Examples
from dpsur.mechanism.streams import INIT, SETUP, Streams
from dpsur.networks import build_network, takes
from dpsur.per_example.check_and_fix import check_model
from dpsur.runs.data import as_examples, generators_restored, keyed_draws
from dpsur.runs.evaluation import check_target, split_off
from dpsur.runs.files import RunFolder, to_json, write_atomically
from dpsur.runs.input_features import InputFeatures
from dpsur.runs.release import INPUTS
from dpsur.runs.session import Session, build_session, choose_device
from dpsur.tasks import OWN, TASKS, Declared, Task, task_named
from dpsur.tasks.base import image_shape
from dpsur.tasks.images import read_images
from dpsur.tasks.npz import array_task
from dpsur.tasks.schema import AUTO, Schema
from dpsur.tasks.tables import memory_task

# The key of the draws of `subset`: they are the same on every machine.
SUBSET_KEY = b"dpsur-subset/1"
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
    task = task_of(config)
    train, test = task.load(config.data_dir)
    if task.persons is not None:
        most = config.records_per_person or DEFAULT_RECORDS
        return TaskRecords(train, test, groups=Groups(task.persons, most))
    train, holdout = subset(train, config.keep_fraction), None
    if config.holdout is not None:
        check_target(task.loss)
        train, holdout = split_off(train, config.holdout)
    return TaskRecords(train, test, holdout=holdout)


def task_of(config: RunConfig) -> Task:
    if config.task is None:
        raise InvalidInputError("the config names no task; set task, or use dpsur.fit")
    return task_named(config.task, declared=config.declared)


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
    *,
    resumed: RunFolder | None = None,
    replayed: RunFolder | None = None,
) -> Session:
    """A session for a run on a task.

    `records` are loaded unless they are given.
    """
    task, config = task_of(config), replace(config, features=features_of(config))
    description = _network_of(task, config)
    records = load_records(config) if records is None else records
    asked = InputFeatures(config.features, config.normalisation, table=task.table)
    if records.featured:
        config = replace(config, features=AS_THEY_ARE, normalisation=asked.kind)
        asked = InputFeatures(config.features, config.normalisation, table=task.table)
    shape = asked.check(records.train.record_shape)
    model = _initialised(config, description)
    with _features_named(config, shape != records.train.record_shape):
        return build_session(
            config,
            model,
            records.train,
            loss=task.loss,
            test_set=records.test,
            task=task,
            network=description,
            holdout=records.holdout,
            groups=records.groups,
            resumed=resumed,
            replayed=replayed,
        )


def sample_problem(config: RunConfig) -> Problem:
    """The model of a run on a task, with zeros in the shape of its features: to inspect, not train.

    Of the records only shape and type are used.
    """
    task, config = task_of(config), replace(config, features=features_of(config))
    description = _network_of(task, config)
    train = load_records(config).train
    asked = InputFeatures(config.features, config.normalisation, table=task.table)
    shape = asked.check(train.record_shape)
    model = config.method.adapt(_initialised(config, description))
    few = train.part(slice(SAMPLE))
    inputs = few.inputs if shape == train.record_shape else torch.empty(len(few), *shape)
    zeros = Examples(torch.zeros_like(inputs), torch.zeros_like(few.targets))
    device = choose_device(config.device)
    problem = Problem(model.to(device), task.loss, zeros.to(device), bf16=config.performance.bf16)
    with _features_named(config, shape != train.record_shape):
        check_model(problem.model, zeros.part(slice(1)).to(device))
    return problem


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


def _initialised(config: RunConfig, description: Mapping[str, Any] | None) -> nn.Module:
    """The network with its initial weights, which are drawn here."""
    device, name = choose_device(config.device), config.model
    drawn = Streams(config.seed, device).at(SETUP).global_randomness(INIT)
    if config.seed is None and config.network_seed is not None:
        drawn = seeded_globally(config.network_seed, device)
    with drawn:
        if description is not None:
            return build_network(description)
        assert name is not None
        function = imported(name)
        try:
            model = function()
        except Exception as error:  # a custom function may raise anything
            raise InvalidInputError(
                f"model {name} cannot be built ({type(error).__name__}: {error}); it must be a "
                "function without arguments that returns a torch.nn.Module"
            ) from error
        if not isinstance(model, nn.Module):
            raise InvalidInputError(
                f"model {name} must return a torch.nn.Module, it returned {type(model).__name__}"
            )
        return model


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
    kept = [draw < fraction for draw in keyed_draws(train, SUBSET_KEY)]
    if not any(kept):
        raise InvalidInputError(
            f"keep_fraction {fraction} keeps none of the records; choose a larger one"
        )
    return train.select(torch.tensor(kept).nonzero().flatten())


def _network_of(task: Task, config: RunConfig) -> dict[str, Any] | None:
    """The description of a network of the task; None where a function of the user builds it."""
    if config.model is not None and config.model in task.models:
        return dict(task.models[config.model])
    if config.model is not None:
        imported(config.model)  # refused before records are read
        return None
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


def note_privately(task: Task, folder: RunFolder) -> list[Path]:
    """Write what was counted of the training records into the private folder of a run."""
    noted = []
    for name, counts in task.private.items():
        noted.append(folder.private / f"{name}.json")
        write_atomically(noted[-1], to_json(counts), mode=0o600)
    return noted


def imported(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    if not (module and function):
        raise InvalidInputError(f"model {name!r} must have the form module:function")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InvalidInputError(
            f"model {name} cannot be imported ({error}); the module must be on PYTHONPATH"
        ) from error
    if not callable(found):
        raise InvalidInputError(f"model {name} is not a function that builds a network")
    return found


# Columns of labels of a data set that is read without a schema.
LABELS = ("label", "labels")


def own_task(
    model: Any,
    train_set: Any,
    test_set: Any = None,
    *,
    schema: Any = None,
    classes: Any = None,
    image_size: Any = None,
    groups: Any = None,
) -> Task | None:
    """The task of a user's records; None for tensors and data sets with a model of their own."""
    if isinstance(image_size, (int, tuple, list)):  # as the command line writes it
        sides = (image_size, image_size) if isinstance(image_size, int) else image_size
        image_size = "x".join(map(str, sides))
    if isinstance(train_set, (str, os.PathLike)):
        declared = {
            "schema": schema,
            "classes": classes if isinstance(classes, int) else None,
            "labels": _names_of(classes) or None,
            "image_size": image_size,
            "group_by": groups,
        }
        return _named(str(train_set), test_set, declared)
    if schema is not None:
        if isinstance(schema, (str, os.PathLike)):
            schema = Schema.load(schema)
        if not isinstance(schema, Schema):
            raise InvalidInputError(
                f"schema must be a dpsur.Schema, got {type(schema).__name__}; read one with "
                "dpsur.Schema.load(FILE)"
            )
        return memory_task(schema, train_set, test_set, groups)
    raw = _raw(train_set)
    if raw is not None:
        return _featured(raw, None if test_set is None else _raw(test_set), classes, image_size)
    if model != AUTO:
        return None
    if hasattr(train_set, "column_names"):
        raise InvalidInputError(
            f"train_set has the columns {', '.join(map(str, train_set.column_names))}; a table "
            "must be declared: pass schema=dpsur.Schema(...); texts and images need the columns "
            "text or image, and label"
        )
    train = as_examples(train_set, "train_set")
    test = None if test_set is None else as_examples(test_set, "test_set")
    return array_task(train, test, _how_many(classes), names=_names_of(classes))


def _names_of(classes: Any) -> tuple[str, ...]:
    if classes is None or isinstance(classes, int):
        return ()
    if isinstance(classes, str) or not isinstance(classes, (Sequence, np.ndarray)):
        raise InvalidInputError(
            f"classes must be their number or a list of their names, got {classes!r}"
        )
    return tuple(str(name) for name in classes)


def _how_many(classes: Any) -> int:
    names = _names_of(classes)
    if not names and not isinstance(classes, int):
        raise InvalidInputError(
            "the number of classes must be declared, since labels are private: pass classes=K or "
            "classes=[...] with their names"
        )
    return len(names) or int(classes)


def task_network(task: Task, model: str, features: str | None) -> dict[str, Any]:
    """The description of a network by name, or the task's for these features."""
    if model != AUTO:
        if model not in task.models:
            known = ", ".join((AUTO, *task.models))
            raise InvalidInputError(
                f"unknown model {model!r} for these records; choose {known}, or pass a module"
            )
        return dict(task.models[model])
    if features is None or features not in task.networks:
        raise InvalidInputError(
            f"there is no network for the features {features} of these records, only for "
            f"{', '.join(task.networks)}; pass a module"
        )
    return dict(task.networks[features])


def better_for_images(train_set: Any, features: str | None, network: Any) -> tuple[str, ...]:
    """A hint for those who train a network of their own on pixels of small images."""
    inputs = train_set[0] if isinstance(train_set, tuple) and train_set else None
    inputs = train_set.inputs if isinstance(train_set, Examples) else inputs
    shape = tuple(getattr(inputs, "shape", ()))[1:]
    images = len(shape) == 3 and shape[0] in (1, 3) and 8 <= min(shape[1:]) <= max(shape[1:]) <= 64
    if network is not None or features is not None or not images:
        return ()
    return (
        'images this small are mostly learned better on features: model="auto", classes=K trains a '
        "linear model on those of an encoder that needs no training data",
    )


def _named(name: str, test_set: Any, declared: Mapping[str, Any]) -> Task:
    if test_set is not None and not isinstance(test_set, (str, os.PathLike)):
        raise InvalidInputError(
            f"test_set of {name} must be a file or folder of the same form, got "
            f"{type(test_set).__name__}"
        )
    if not name.startswith(OWN) and name not in TASKS:
        task_named(name)  # says what to write instead
    groups, values = declared["group_by"], {**declared, "test": test_set}
    if groups is not None and not isinstance(groups, str):
        raise InvalidInputError(
            f"groups of {name} must be the name of a column, got {type(groups).__name__}"
        )
    return task_named(
        name, declared=Declared(**{key: v for key, v in values.items() if v is not None})
    )


@dataclass(frozen=True)
class _Raw:
    """Texts or images of Pillow, and their labels. `names` are those that the data set declares."""

    inputs: Sequence[Any]
    labels: Sequence[Any]
    names: Sequence[str] | None = None

    @property
    def texts(self) -> bool:
        return isinstance(self.inputs[0], str)


def _raw(data: Any) -> _Raw | None:
    """Texts or images with their labels, of a pair of lists or of a data set; None for numbers."""
    if isinstance(data, (tuple, list)) and len(data) == 2 and _is_raw(data[0]):
        return _Raw(list(data[0]), _listed(data[1]))
    hugging_face = hasattr(data, "column_names") and hasattr(data, "features")
    if hugging_face or hasattr(data, "iloc"):  # or a data frame
        columns = data.column_names if hugging_face else getattr(data, "columns", ())
        inputs = next((name for name in INPUTS if name in columns), None)
        labels = next((name for name in LABELS if name in columns), None)
        if inputs is None or labels is None:
            return None
        named = getattr(data.features[labels], "names", None) if hugging_face else None
        return _Raw(list(data[inputs]), _listed(data[labels]), named)
    if isinstance(data, torch.utils.data.Dataset) and isinstance(data, Sized) and len(data):
        with generators_restored():
            first = data[0]
        if isinstance(first, (tuple, list)) and len(first) == 2 and _is_raw([first[0]]):
            pairs = [data[place] for place in range(len(data))]
            classes = getattr(data, "classes", None)  # of torchvision
            return _Raw([one for one, _ in pairs], _listed([two for _, two in pairs]), classes)
    return None


def _is_raw(values: Any) -> bool:
    if isinstance(values, np.ndarray) and values.dtype.kind == "U":
        return values.ndim == 1 and len(values) > 0
    if (
        not hasattr(values, "__len__")
        or isinstance(values, (str, Tensor, Mapping))
        or not len(values)
    ):
        return False
    first = values.iloc[0] if hasattr(values, "iloc") else values[0]
    return isinstance(first, str) or hasattr(first, "convert")


def _listed(labels: Any) -> list[Any]:
    return labels.tolist() if hasattr(labels, "tolist") else list(labels)


def _featured(train: _Raw, test: _Raw | None, classes: Any, image_size: Any) -> Task:
    names = _names_of(classes) or tuple(train.names or ())
    count = len(names) or _how_many(classes)
    texts, shape = train.texts, image_shape(image_size)

    def examples(raw: _Raw) -> Examples:
        found = words(raw.inputs) if texts else read_images(raw.inputs, shape)
        return Examples(found, _places(raw.labels, names, count))

    inputs = (
        {"kind": "texts", "dimension": WORDS_DIMENSION}
        if texts
        else {"kind": "images", "shape": list(shape)}
    )
    task = array_task(
        examples(train), None if test is None else examples(test), count, texts=texts, names=names
    )
    return replace(task, public={**task.public, "inputs": inputs})


def _places(labels: Sequence[Any], names: Sequence[str], count: int) -> Tensor:
    """The numbers of classes, of labels that are numbers or names."""
    known = {name: place for place, name in enumerate(names)}

    def place_of(label: Any) -> int:
        if isinstance(label, str):
            return known.get(label, -1)
        whole = isinstance(label, (int, np.integer)) and not isinstance(label, bool)
        return int(label) if whole else -1

    found = [place_of(label) for label in labels]
    wrong = [place for place, one in enumerate(found) if not 0 <= one < count]
    if wrong:
        remedy = "; pass classes=[...] with their names" if not names else ""
        raise InvalidInputError(
            f"a label is none of the {count} declared classes{remedy}",
            private=f"{len(wrong)} records, the first is number {wrong[0]}: {labels[wrong[0]]!r}",
        )
    return torch.tensor(found)
