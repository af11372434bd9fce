"""The learning tasks, by name. A task is registered by being listed here."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from dpsur.errors import InvalidInputError
from dpsur.functional.problem import LossFunction
from dpsur.functional.records import Examples
from dpsur.tasks.base import Task
from dpsur.tasks.cifar10 import CIFAR10_TASK
from dpsur.tasks.imdb import IMDB_TASK, IMDB_WORDS_TASK
from dpsur.tasks.mnist import FMNIST_TASK, MNIST_TASK
from dpsur.tasks.mnist_5k import MNIST_5K
from dpsur.tasks.npz import PREFIX as NPZ
from dpsur.tasks.npz import npz_task, npz_test_records
from dpsur.tasks.schema import Schema
from dpsur.tasks.tables import (
    CSV,
    PREFIXES,
    read_table,
    table_path,
    table_task,
    table_test_records,
)

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        MNIST_5K,
        MNIST_TASK,
        FMNIST_TASK,
        CIFAR10_TASK,
        IMDB_TASK,
        IMDB_WORDS_TASK,
    )
}
DEFAULT_TASK = MNIST_5K.name


def task_named(
    name: str, classes: int | None = None, schema: str | PathLike[str] | None = None
) -> Task:
    """Look a task up by name; `npz:FILE`, `csv:FILE` and `parquet:FILE` are tasks of your file.

    `classes` is the declared number of classes of an npz file, `schema` the file that declares the
    columns of a table. Both are public.
    """
    if name.startswith(PREFIXES):
        if classes is not None:
            raise InvalidInputError(
                f"classes {classes} is for {NPZ}FILE; the classes of {name} are in its schema"
            )
        return table_task(name, schema)
    if schema is not None:
        raise InvalidInputError(f"schema {schema} is for {CSV}FILE; task {name} has none")
    if name.startswith(NPZ):
        return npz_task(name, classes)
    if classes is not None and name in TASKS:
        raise InvalidInputError(
            f"classes {classes} is for {NPZ}FILE; task {name} has its own number of classes"
        )
    try:
        return TASKS[name]
    except KeyError:
        known = ", ".join(TASKS)
        raise InvalidInputError(
            f"unknown task {name!r}; choose one of {known}, or npz:FILE, csv:FILE or parquet:FILE "
            "for your own data"
        ) from None


def load_test_records(
    name: str,
    data_dir: Path | None,
    schema: str | PathLike[str] | None = None,
    public: Mapping[str, Any] | None = None,
) -> tuple[Examples, LossFunction]:
    """The public test records of a task, and its loss. An npz file needs no declared classes.

    Of a table, the test part that the file `schema` declares. Without that file all records, as
    the schema in `public` declares them, what a release states to be public.
    """
    test: Examples | None
    loss: LossFunction = F.cross_entropy
    if name.startswith(PREFIXES) and schema is None and "schema" in (public or {}):
        assert public is not None
        released = Schema.from_json(public["schema"])
        return read_table(table_path(name), released), released.loss
    if name.startswith(PREFIXES):
        test, declared = table_test_records(name, schema)
        if test is None:
            raise InvalidInputError(
                f"the schema of {name} names no test records; add test to it, with a file or a "
                "share of public records"
            )
        return test, declared.loss
    if name.startswith(NPZ):
        test = npz_test_records(name)
    else:
        task = task_named(name)
        (_, test), loss = task.load(data_dir), task.loss
    if test is None:
        raise InvalidInputError(f"task {name} has no test records; add x_test and y_test")
    return test, loss


__all__ = ["DEFAULT_TASK", "TASKS", "Task", "load_test_records", "task_named"]
