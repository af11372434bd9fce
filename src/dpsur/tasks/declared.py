"""What a user declares about files of records, so that nothing has to be read off the records."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Self

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.features.encoder import SIZE
from dpsur.options import DATA, build, check_options, declared, option
from dpsur.tasks.schema import Schema

# Colour images of the size that the encoder sees.
DEFAULT_IMAGE = (3, SIZE, SIZE)
MOST_PIXELS = 4096


def _are_labels(name: str, value: Any) -> None:
    """Refuse anything but texts, or texts that are separated by commas."""
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


def _is_size(name: str, value: Any) -> None:
    image_shape(value, name)


def image_shape(value: str | None, name: str = "image_size") -> tuple[int, int, int]:
    """Channels, height and width of `HxW` or `CxHxW`; colour images by default."""
    if value is None:
        return DEFAULT_IMAGE
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
        check=_is_size,
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
        """Refuse what is given and not meant for a task."""
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
