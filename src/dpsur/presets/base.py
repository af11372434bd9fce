"""What a preset is.

Presets that are tables: the settings of a method on a task at one epsilon.

A table is a CSV file with the columns

    method, task, epsilon    what the row is for
    features, normalisation  how records are prepared; empty: as the task has them
    network                  changes of the task's network, a JSON object
    given, chosen            hyper-parameters, two JSON objects: those that stand in a paper, and
                             those that were chosen by trying several

`paper`, `tramer-boneh` and `tuned` are such files beside this module. They are written by
`python -m reproduction.presets` in the repository, which also says where each number is from. A
file of yours is named by its path: `--preset settings.csv`.
"""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from dpsur.errors import InvalidInputError
from dpsur.features import NONE


@dataclass(frozen=True)
class DataFacts:
    """What is public about a run before it starts; None is what is not known.

    The number of records, the shape of one, the number of classes, the kind of records (`words`)
    where the shape does not say it; whether there is a GPU, whether the model is the user's own,
    the features that were asked for, whether the run is a short try (`max_updates`), epsilon and
    delta. Of a table also what is predicted (`classes`, `labels` or `number`) and by how many
    outputs. `whole` says that `records` is the exact number, `unit` what it counts: a record
    or a person.
    """

    records: int | None
    shape: tuple[int, ...] | None
    classes: int | None
    kind: str | None = None
    gpu: bool = True
    own_model: bool = False
    features: str | None = None
    short: bool = False
    target: tuple[str, int] | None = None
    whole: bool = True
    budget: tuple[float, float] | None = None
    unit: str = "record"


@dataclass(frozen=True)
class Preset:
    """What a run is asked to do: hyper-parameters, features and changes of the network.

    `chosen` are the hyper-parameters among the options that were chosen by trying several, and
    `given` those that hold where others are tried.
    """

    given: Mapping[str, Any]
    features: str | None
    normalisation: str | None = NONE
    network: Mapping[str, Any] = field(default_factory=dict)
    chosen: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        return {**self.given, **self.chosen}

    def tuned(self, chosen: Mapping[str, Any]) -> "Preset":
        """The preset with hyper-parameters that were chosen by trying several."""
        return replace(self, chosen={**self.chosen, **chosen})

    def changed(self, changes: Mapping[str, Any]) -> "Preset":
        """The preset with hyper-parameters that hold whatever is chosen."""
        rest = {name: value for name, value in self.chosen.items() if name not in changes}
        return replace(self, given={**self.given, **changes}, chosen=rest)


TABLES = ("paper", "tramer-boneh", "tuned")
COLUMNS = (
    *("method", "task", "epsilon", "features", "normalisation"),
    *("network", "given", "chosen"),
)
Rows = dict[tuple[str, str, float], Preset]


def table_preset(name: str, method: str, task: str, epsilon: float) -> Preset:
    """The row of a table, or an error that says what the table has."""
    text, shown = _text(name)
    rows = _rows(text, shown)
    wanted = (method, task, epsilon)
    if wanted in rows:
        return rows[wanted]
    methods, tasks = [row[0] for row in rows], [row[1] for row in rows]
    for kind, value, known in (("task", task, tasks), ("method", method, methods)):
        if value not in known:
            raise InvalidInputError(
                f"preset {shown} has no settings for {kind} {value}; it has {_list(known)}. "
                f"Without a preset: dpsur train --method {method} --task {task}"
            )
    epsilons = [row[2] for row in rows if row[:2] == (method, task)]
    if not epsilons:
        known = [row[1] for row in rows if row[0] == method]
        raise InvalidInputError(
            f"preset {shown} has no settings for method {method} on task {task}; it has "
            f"{_list(known)}"
        )
    raise InvalidInputError(
        f"preset {shown} has no settings for epsilon {epsilon:g}; choose one of "
        f"{', '.join(f'{value:g}' for value in epsilons)}, or leave the preset out"
    )


def _list(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def is_table(name: str) -> bool:
    """Whether this names a table, of the library or in a file."""
    return name in TABLES or name.endswith(".csv")


def _text(name: str) -> tuple[str, str]:
    if name in TABLES:
        return (files("dpsur.presets") / f"{name}.csv").read_text(encoding="utf-8"), name
    try:
        return Path(name).read_text(encoding="utf-8"), name
    except (OSError, UnicodeError) as error:
        raise InvalidInputError(f"cannot read preset {name}: {error}") from None


@cache
def _rows(text: str, shown: str) -> Rows:
    table = csv.DictReader(text.splitlines())
    if missing := [column for column in COLUMNS if column not in (table.fieldnames or ())]:
        raise InvalidInputError(f"preset {shown} lacks the column {missing[0]}")
    rows: Rows = {}
    for row in table:
        try:
            rows[row["method"], row["task"], float(row["epsilon"])] = _preset(row)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(
                f"preset {shown}, line {table.line_num}: {error or 'a value is missing'}"
            ) from None
    return rows


def _preset(row: dict[str, Any]) -> Preset:
    network, given, chosen = (
        json.loads(row[column] or "{}") for column in ("network", "given", "chosen")
    )
    if not all(isinstance(values, dict) for values in (network, given, chosen)):
        raise ValueError("network, given and chosen must be JSON objects")
    return Preset(given, row["features"] or None, row["normalisation"] or None, network, chosen)
