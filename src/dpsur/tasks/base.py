"""What every task is, and what a user declares about files of records.

Nothing that becomes public is read off the records: it is declared.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any, Self, TypeVar

import torch.nn.functional as F
from torch import Tensor

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.features import TABLE, PixelScale
from dpsur.features.encoder import DIMENSION, SCATTERING_DIMENSION, SIZE
from dpsur.features.table import TableLayout
from dpsur.functional.problem import LossFunction
from dpsur.functional.records import Examples
from dpsur.options import DATA, build, check_options, declared, option
from dpsur.tasks.schema import Schema

Read = TypeVar("Read")
MOST_PIXELS = 4096
# Kind of records that are rows of norm 1, of weighted words.
WORD_ROWS = "words"
# Names of what a network sees.
PIXELS, SCATTERING, TOKENS, VECTORS = "pixels", "scattering", "tokens", "vectors"
ENCODER, ZOOMED = "encoder", "encoder-zoom"
WHITENED, SCATTERING_ENCODER = "whitened-scattering", "scattering+encoder"


def linear_heads(shape: tuple[int, int, int], classes: int) -> dict[str, dict[str, Any]]:
    """Linear models for the features of the encoder, for images of a shape."""
    times = 1 if shape[0] in (1, 3) else shape[0]
    encoder, scattering = DIMENSION * times, SCATTERING_DIMENSION * times
    inputs = {
        ENCODER: encoder,
        ZOOMED: encoder,
        WHITENED: scattering,
        SCATTERING_ENCODER: scattering + encoder,
    }
    return {
        name: {"name": "linear-head", "inputs": count, "classes": classes}
        for name, count in inputs.items()
    }


@dataclass(frozen=True)
class Task:
    """A data set with the networks and settings that suit it.

    `networks` maps a kind of features to the description of the network for them; the first is the
    default. `load` takes the folder of the data, or None for the usual places, and returns the
    training records and the test records, or None where a user's own data has no test records.
    `settings` maps a method's name to hyper-parameters that suit its default features better than
    the method's own defaults do. `public` is what the user declared to be public about the records,
    such as the number of classes; a release states it. `pixel_scale` is what images were
    standardised with, None for images in [0, 1]. `records`, `shape` and `classes` are the number of
    training records, the shape of one and the number of classes, where they are known beforehand.
    `kind` says what the records are where their shape does not: `words` are rows of norm 1.
    `models` are networks that can be chosen by name instead of the default. Of a table, `target` is
    what is predicted
    (`classes`, `labels` or `number`) and by how many outputs, and `table` where its numbers are.
    `private` are counts of the training records for the private folder, `warnings` what the public
    test records show. `persons` are numbers of the persons whom the training records belong to,
    where a column names them; `records` then counts persons.
    """

    name: str
    networks: Mapping[str, Mapping[str, Any]]
    load: Callable[[Path | None], tuple[Examples, Examples | None]]
    summary: str = ""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    loss: LossFunction = F.cross_entropy
    public: Mapping[str, Any] = field(default_factory=dict)
    pixel_scale: PixelScale | None = None
    records: int | None = None
    shape: tuple[int, ...] | None = None
    classes: int | None = None
    kind: str | None = None
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    target: tuple[str, int] | None = None
    table: TableLayout | None = None
    private: Mapping[str, Any] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    persons: Tensor | None = None

    @property
    def default_features(self) -> str:
        """The kind of features that is used unless another is asked for."""
        return next(iter(self.networks))

    @property
    def auto_features(self) -> str:
        """The kind of features of the model `auto`: of a table rows of soft bins."""
        return TABLE if TABLE in self.networks else self.default_features


def named_file(name: str) -> Path:
    prefix, _, file = name.partition(":")
    path = Path(file).expanduser()
    if not path.is_file():
        raise InvalidInputError(f"task {name}: there is no file {path}; write {prefix}:FILE")
    return path


def existing(test: str | PathLike[str]) -> Path:
    path = Path(test).expanduser()
    if not path.exists():
        raise InvalidInputError(f"there is no {path} to test on; correct --test")
    return path


def kept(most: int) -> Callable[[Callable[..., Read]], Callable[..., Read]]:
    """Keep what a function read from files last (so many times), until one of them changes.

    The files are its first argument; the others can be hashed.
    """

    def decorate(read: Callable[..., Read]) -> Callable[..., Read]:
        @lru_cache(most)
        def once(files: tuple[Path, ...], _: tuple[tuple[int, int], ...], *others: Any) -> Read:
            return read(files, *others)

        def look(files: Sequence[Path], *others: Any) -> Read:
            found = map(os.stat, files)
            changes = tuple((one.st_size, one.st_mtime_ns) for one in found)
            return once(tuple(files), changes, *others)

        return look

    return decorate


def _are_labels(name: str, value: Any) -> None:
    found = split_labels(value)
    if len(found) < 2 or len(set(found)) < len(found) or not all(found):
        raise InvalidInputError(
            f"{name} must be two or more different names, such as no,yes, got {checks.shown(value)}"
        )


def split_labels(value: Any) -> tuple[str, ...]:
    """Names of classes, given as a list or separated by commas."""
    listed = value.split(",") if isinstance(value, str) else list(value or ())
    return tuple(str(name).strip() for name in listed)


def _is_schema(name: str, value: Any) -> None:
    if not isinstance(value, (str, PathLike, Schema)):
        raise InvalidInputError(
            f"{name} must be a dpsur.Schema or its file, got {checks.shown(value)}; read one with "
            "dpsur.Schema.load(FILE)"
        )


def image_shape(value: str | None, name: str = "image_size") -> tuple[int, int, int]:
    """Channels, height and width of `HxW` or `CxHxW`; colour images by default."""
    if value is None:
        return 3, SIZE, SIZE  # what the encoder sees
    parts = value.lower().split("x") if isinstance(value, str) else []
    numbers = [int(part) for part in parts if part.isdecimal() and len(part) < 6]
    if len(numbers) != len(parts) or len(numbers) not in (2, 3):
        raise InvalidInputError(
            f"{name} must be HxW or CxHxW, such as 64x64 or 1x28x28, got {checks.shown(value)}"
        )
    channels, height, width = numbers if len(numbers) == 3 else (3, *numbers)
    if channels not in (1, 3) or not (1 <= height <= MOST_PIXELS and 1 <= width <= MOST_PIXELS):
        raise InvalidInputError(
            f"{name} must have 1 or 3 channels and sides of 1 to {MOST_PIXELS} pixels, got {value}"
        )
    return channels, height, width


@dataclass(frozen=True)
class Declared:
    """Public facts about a file of records; None where they are not given.

    A number of `classes` is for arrays, a `schema` (or its file) for tables. `labels` names the
    classes, `columns` the column of texts and the column of classes. `image_size` is what images
    are scaled to: by default what the encoder sees. `test` are public records of the same form.
    `group_by` is the column of a table that names persons.
    """

    classes: int | None = option(
        None,
        "number of classes of npz:FILE; becomes public (default: the array classes of the file)",
        metavar="K",
        group=DATA,
    )
    schema: Path | None = option(
        None,
        "JSON file that declares the columns of csv:FILE, parquet:FILE or jsonl:FILE; it becomes "
        "public",
        check=_is_schema,
        metavar="FILE",
        group=DATA,
        common=True,
    )
    labels: str | None = option(
        None,
        "names of the classes, separated by commas, which become public: of texts in jsonl:FILE, "
        "csv:FILE or parquet:FILE; of images:DIR (default: its folders)",
        check=_are_labels,
        metavar="A,B",
        group=DATA,
        common=True,
    )
    columns: str | None = option(
        None,
        "the columns of texts and of classes, with --labels (default: text,label)",
        metavar="TEXT,LABEL",
        group=DATA,
    )
    image_size: str | None = option(
        None,
        "height and width that images of images:DIR are scaled to, and channels before them; "
        "public (default: 3x32x32)",
        check=lambda name, value: image_shape(value, name),
        metavar="[Cx]HxW",
        group=DATA,
    )
    test: Path | None = option(
        None,
        "public records to test on, of the same form as the task's; figures on them are published "
        "without noise",
        metavar="PATH",
        group=DATA,
        common=True,
    )

    group_by: str | None = option(
        None,
        "column of csv:FILE, parquet:FILE or jsonl:FILE that names the person whom a record "
        "belongs to: the unit of privacy becomes one person with all of their records",
        metavar="COLUMN",
        group=DATA,
    )

    def __post_init__(self) -> None:
        check_options(self)

    @classmethod
    def among(cls, values: Mapping[str, Any]) -> Self:
        """From plain values by name, of which others are left alone."""
        return build(cls, {name: values[name] for name in declared(cls) if name in values})

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes; empty where they are not given."""
        return split_labels(self.labels)

    def refuse(self, task: str, *allowed: str) -> None:
        for name in declared(type(self)):
            if getattr(self, name) is not None and name not in allowed:
                owners = ", ".join(FOR[name])
                raise InvalidInputError(
                    f"{name} {getattr(self, name)} is for {owners}; task {task} has no such option"
                )


# What each is for, in errors.
FOR = {
    "classes": ("npz:FILE",),
    "schema": ("csv:FILE", "parquet:FILE", "jsonl:FILE"),
    "labels": ("images:DIR", "texts in jsonl:FILE, csv:FILE or parquet:FILE"),
    "columns": ("texts in jsonl:FILE, csv:FILE or parquet:FILE",),
    "image_size": ("images:DIR",),
    "group_by": ("csv:FILE", "parquet:FILE", "jsonl:FILE"),
    "test": ("images:DIR", "csv:FILE", "parquet:FILE", "jsonl:FILE"),
}
NOTHING = Declared()
