"""The learning tasks, by name. A custom task is registered by adding it to `TASKS`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from dpsur.errors import InvalidInputError
from dpsur.functional.problem import LossFunction
from dpsur.functional.records import Examples
from dpsur.tasks.base import NOTHING, named_file
from dpsur.tasks.base import Declared as Declared
from dpsur.tasks.base import Task as Task
from dpsur.tasks.images import PREFIX as IMAGES
from dpsur.tasks.images import images_task, images_to_test
from dpsur.tasks.mnist_5k import MNIST_5K
from dpsur.tasks.npz import PREFIX as NPZ
from dpsur.tasks.npz import npz_task, npz_test_records
from dpsur.tasks.schema import Schema
from dpsur.tasks.tables import PREFIXES, read_table, table_task

TASKS: dict[str, Task] = {MNIST_5K.name: MNIST_5K}
DEFAULT_TASK = MNIST_5K.name
# Prefixes of tasks that are a user's own files.
OWN = (NPZ, *PREFIXES, IMAGES)
# What a file with this ending is likely to be.
ENDINGS = {
    ".npz": NPZ,
    ".csv": "csv:",
    ".parquet": "parquet:",
    ".jsonl": "jsonl:",
    ".ndjson": "jsonl:",
}


def task_named(name: str, declared: Declared = NOTHING) -> Task:
    """Look a task up by name; `npz:FILE`, `csv:FILE`, `images:DIR` and so on are your own data."""
    if name.startswith(PREFIXES):
        return table_task(name, declared)
    if name.startswith(IMAGES):
        return images_task(name, declared)
    if name.startswith(NPZ):
        declared.refuse(name, "classes")
        return npz_task(name, declared.classes)
    if name not in TASKS:
        raise InvalidInputError(_unknown(name), code="unknown-name")
    declared.refuse(name)
    return TASKS[name]


def _unknown(name: str) -> str:
    """What to write instead of a name that is none; of a file or folder, what it seems to be."""
    path = Path(name).expanduser()
    prefix = IMAGES if path.is_dir() else ENDINGS.get(path.suffix.lower())
    if path.exists() and prefix is not None:
        return f"{name} is the name of no task; did you mean --task {prefix}{name}?"
    return (
        f"unknown task {name!r}; choose one of {', '.join(TASKS)}, or npz:FILE, csv:FILE, "
        "parquet:FILE, jsonl:FILE or images:DIR for your own data"
    )


def load_test_records(
    name: str, data_dir: Path | None, schema: Any, public: Mapping[str, Any]
) -> tuple[Examples, LossFunction]:
    """The public test records of a task, and its loss. An npz file needs no declared classes.

    `public` is what the release declares that they are for. With its classes and size, all images
    of a folder are tested on. Of a table, the test part that the file `schema` declares; without
    that file all records, by the schema in `public`.
    """
    loss: LossFunction = F.cross_entropy
    if name.startswith(IMAGES):
        return images_to_test(name, public), loss
    if name.startswith(NPZ):
        test = npz_test_records(name)
    elif name.startswith(PREFIXES) and schema is None and "schema" in public:
        released = Schema.from_json(public["schema"])
        return read_table(named_file(name), released), released.loss
    else:
        task = task_named(name, Declared(schema=schema) if name.startswith(PREFIXES) else NOTHING)
        (_, test), loss = task.load(data_dir), task.loss
    if test is None and name.startswith(PREFIXES):
        raise InvalidInputError(
            f"the schema of {name} names no test records; add test to it, with a file or a share "
            "of public records"
        )
    if test is None:
        raise InvalidInputError(f"task {name} has no test records; add x_test and y_test")
    return test, loss
