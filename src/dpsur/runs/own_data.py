"""What `fit` makes of a user's records: a task, where they are a file, texts, images or a table.

Tensors and data sets of tensors need nothing of this; they go to the model as they are.
"""

import os
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpsur.errors import InvalidInputError
from dpsur.features import words
from dpsur.features.words import WORDS_DIMENSION
from dpsur.functional.records import Examples
from dpsur.runs.data import as_examples, generators_restored
from dpsur.tasks import OWN, TASKS, Declared, Task, task_named
from dpsur.tasks.declared import image_shape
from dpsur.tasks.images import read_images
from dpsur.tasks.npz import array_task
from dpsur.tasks.schema import AUTO, Schema
from dpsur.tasks.tables import memory_task

# Columns of a Hugging Face data set that are read without a schema.
INPUTS, LABELS = ("image", "img", "text"), ("label", "labels")


@dataclass(frozen=True)
class Given:
    """The arguments of `fit` that say what its records are."""

    schema: Any = None
    classes: Any = None
    image_size: Any = None
    groups: Any = None

    @property
    def count(self) -> int | None:
        """The number of classes, if it was declared."""
        return self.classes if isinstance(self.classes, int) else None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes, if they were declared."""
        if self.classes is None or isinstance(self.classes, int):
            return ()
        if isinstance(self.classes, str) or not isinstance(self.classes, (Sequence, np.ndarray)):
            raise InvalidInputError(
                f"classes must be their number or a list of their names, got {self.classes!r}"
            )
        return tuple(str(name) for name in self.classes)

    @property
    def size(self) -> str | None:
        """The size of images as the command line writes it."""
        if isinstance(self.image_size, int):
            return f"{self.image_size}x{self.image_size}"
        if isinstance(self.image_size, (tuple, list)):
            return "x".join(map(str, self.image_size))
        found: str | None = self.image_size
        return found


def own_task(model: Any, train_set: Any, test_set: Any, given: Given) -> Task | None:
    """The task of a user's records; None for tensors and data sets with a model of their own."""
    if isinstance(train_set, (str, os.PathLike)):
        return _named(str(train_set), test_set, given)
    if given.schema is not None:
        return memory_task(_schema(given.schema), train_set, test_set, given.groups)
    raw = _raw(train_set)
    if raw is not None:
        return _featured(raw, None if test_set is None else _raw(test_set), given)
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
    return array_task(train, test, _count(given, train_set), names=given.names)


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


def _named(name: str, test_set: Any, given: Given) -> Task:
    """A task by name: a user's file, or a public data set."""
    if test_set is not None and not isinstance(test_set, (str, os.PathLike)):
        raise InvalidInputError(
            f"test_set of {name} must be a file or folder of the same form, got "
            f"{type(test_set).__name__}"
        )
    if not name.startswith(OWN) and name not in TASKS:
        task_named(name)  # says what to write instead
    if given.groups is not None and not isinstance(given.groups, str):
        raise InvalidInputError(
            f"groups of {name} must be the name of a column, got {type(given.groups).__name__}"
        )
    values = {
        "schema": given.schema,
        "classes": given.count,
        "labels": given.names or None,
        "image_size": given.size,
        "test": test_set,
        "group_by": given.groups,
    }
    return task_named(
        name, declared=Declared(**{key: v for key, v in values.items() if v is not None})
    )


def _schema(schema: Any) -> Schema:
    if isinstance(schema, Schema):
        return schema
    if isinstance(schema, (str, os.PathLike)):
        return Schema.load(schema)
    raise InvalidInputError(
        f"schema must be a dpsur.Schema, got {type(schema).__name__}; read one with "
        "dpsur.Schema.load(FILE)"
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
    """Whether these are texts, or images of Pillow."""
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


def _featured(train: _Raw, test: _Raw | None, given: Given) -> Task:
    names = given.names or tuple(train.names or ())
    count = len(names) or _count(given, None)
    texts, shape = train.texts, image_shape(given.size)

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


def _count(given: Given, data: Any) -> int:
    if given.names or given.count is not None:
        return len(given.names) or int(given.count or 0)
    del data
    raise InvalidInputError(
        "the number of classes must be declared, since labels are private: pass classes=K or "
        "classes=[...] with their names"
    )


def _places(labels: Sequence[Any], names: Sequence[str], count: int) -> Tensor:
    """The numbers of classes, of labels that are numbers or names."""
    known = {name: place for place, name in enumerate(names)}
    found = [
        known.get(str(one), -1) if isinstance(one, str) else (one if _is_whole(one) else -1)
        for one in labels
    ]
    wrong = [place for place, one in enumerate(found) if not 0 <= one < count]
    if wrong:
        remedy = "; pass classes=[...] with their names" if not names else ""
        raise InvalidInputError(
            f"a label is none of the {count} declared classes{remedy}",
            private=f"{len(wrong)} records, the first is number {wrong[0]}: {labels[wrong[0]]!r}",
        )
    return torch.tensor(found)


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
