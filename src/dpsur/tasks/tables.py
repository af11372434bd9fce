"""Your records in a table: a CSV, Parquet or JSON Lines file, and a schema of its columns.

In a CSV file every line is a record, read alone: a stray quote in one record cannot swallow the
next, and line breaks inside a value are not supported (Parquet has them). Lines with too few or too
many values are records like any other, with missing values or without the rest. So is a line of a
JSON Lines file that is no JSON object: all of its values are missing.

Values of a table that its schema does not declare, counted, so that no mistake stays silent.

A class that is misspelt in the schema drops all its records, a category becomes "other", a number
that is none becomes the middle of its range. How often that happens is private, unless the records
are public: counts of training records go to the private folder of a run, and warnings come from
public test records alone.
"""

import csv
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dpsur.errors import InvalidInputError
from dpsur.features import TABLE
from dpsur.functional.persons import called, number_persons, numbered
from dpsur.functional.records import Examples
from dpsur.tasks.base import VECTORS, WORD_ROWS, Declared, Task, existing, kept, named_file
from dpsur.tasks.schema import (
    AUTO,
    LINEAR,
    MLP,
    Category,
    Column,
    Number,
    Schema,
    Table,
    Text,
    Values,
    column_names,
    name_of,
    numbers_of,
)

# Shares of public records from which a warning is due: of targets, and of other columns.
LARGE_FOR_TARGETS, LARGE = 0.02, 0.2
# What a value is that its column does not declare, and what becomes of it.
_EFFECTS: dict[type[Column], tuple[str, str]] = {
    Category: ("not among the declared values", "made 'other'"),
    Number: ("no numbers", "made the middle"),
    Text: ("no texts", "made empty"),
}
# Fewer public records may lack a class by chance.
ENOUGH = 100


@dataclass(frozen=True)
class Undeclared:
    """For each record and column whether its value is there and not declared, and its class."""

    schema: Schema
    flags: Values  # records x columns, the targets last
    classes: Values  # the class of each record, -1 where there is none

    @classmethod
    def of(cls, schema: Schema, table: Any) -> "Undeclared":
        columns = {**schema.columns, **schema.target}
        flags = [_not_declared(column, table[name]) for name, column in columns.items()]
        classes = np.full(len(flags[0]), -1)
        (target, *_) = schema.target
        column = schema.target[target]
        if schema.kind == "classes" and isinstance(column, Category):
            classes = column.indices(np.asarray(table[target], object))
        return cls(schema, np.stack(flags, axis=1), classes)

    def select(self, rows: Values) -> "Undeclared":
        return Undeclared(self.schema, self.flags[rows], self.classes[rows])

    @classmethod
    def join(cls, parts: list["Undeclared"]) -> "Undeclared":
        flags = np.concatenate([part.flags for part in parts])
        return cls(parts[0].schema, flags, np.concatenate([part.classes for part in parts]))

    def to_json(self) -> dict[str, Any]:
        """All counts: private, where the records are."""
        names = [*self.schema.columns, *self.schema.target]
        counts = dict(zip(names, self.flags.sum(0).tolist(), strict=True))
        found: dict[str, Any] = {"records": len(self.flags), "not_declared": counts}
        (column, *_) = self.schema.target.values()
        if self.schema.kind == "classes" and isinstance(column, Category):
            places = enumerate(column.values)
            found["classes"] = {name: int((self.classes == place).sum()) for place, name in places}
        return found

    def warnings(self) -> list[str]:
        """What to say of public test records."""
        counts, found = self.to_json(), []
        total = counts["records"]
        for name, count in counts["not_declared"].items():
            share, is_target = count / max(1, total), name in self.schema.target
            if share < (LARGE_FOR_TARGETS if is_target else LARGE):
                continue
            column = self.schema.target[name] if is_target else self.schema.columns[name]
            what, effect = _EFFECTS[type(column)]
            effect = "left out" if is_target else effect
            found.append(
                f"{share:.0%} of the test records have values of {name!r} that are {what}, and "
                f"were {effect}; check the schema: spelling, upper and lower case, units"
            )
        if total >= ENOUGH:
            (target, *_) = self.schema.target
            found += [
                f"class {name!r} of {target!r} has none of the {total:,} test records; check its "
                "spelling in the schema"
                for name, count in counts.get("classes", {}).items()
                if not count
            ]
        return found


def _not_declared(column: Column, values: Any) -> Values:
    """Which values are there and not declared; what is missing is not among them."""
    listed = np.asarray(values, object)
    if isinstance(column, Category):
        found = column.indices(listed) < 0
    elif isinstance(column, Text):
        found = np.array([not isinstance(value, str) for value in listed], bool)
    else:
        found = np.isnan(numbers_of(values))
    places = np.flatnonzero(found)
    found[places] = [name_of(listed[place]) is not None for place in places]
    return np.asarray(found)


CSV, PARQUET, JSONL = "csv:", "parquet:", "jsonl:"
PREFIXES = (CSV, PARQUET, JSONL)
# How names of JSON Lines files end.
JSON_LINES = (".jsonl", ".ndjson")
# The key of the draws that part off test records: they are the same on every machine.
TEST_KEY = b"dpsur-test/1"
ROWS_AT_ONCE = 20_000
# A longer name of a column is taken for a value.
LONGEST_NAME = 100
# The columns of texts and classes, unless others are named.
TEXT_COLUMNS = "text,label"


class _Parts(NamedTuple):
    train: Examples
    test: Examples | None
    seen: Undeclared
    tested: Undeclared | None
    persons: torch.Tensor | None = None


def table_task(name: str, declared: Declared) -> Task:
    declared.refuse(name, "schema", "labels", "columns", "test", "group_by")
    path, schema = named_file(name), declared_schema(name, declared)
    files = _files(path, declared, schema)
    return _task(name, schema, _parts(files, schema, declared.group_by))


def memory_task(schema: Schema, train: Any, test: Any = None, groups: Any = None) -> Task:
    """The task of a data frame, or of columns by name.

    `groups` name the person of every record of it, as `person_names` takes them.
    """
    persons = None
    if groups is not None:
        usable = schema.targets(train)[1]
        names = person_names(groups, train, schema)
        persons = numbered(number_persons(names, len(usable))[usable])
    records, seen = schema.records(train), Undeclared.of(schema, train)
    public, tested = None, None
    if test is not None:
        public, tested = schema.records(test), Undeclared.of(schema, test)
    return _task("", schema, _Parts(records, public, seen, tested, persons))


def person_names(groups: Any, table: Any, schema: Schema) -> Any:
    """The name of a person for every row: a column, as many names, or a function of a row."""
    if isinstance(groups, str):
        _check_group_by(groups, schema, column_names(table))
        return table[groups]
    if not callable(groups):
        return groups
    names = column_names(table)
    rows = zip(*(table[name] for name in names), strict=True)
    return called(groups, "a row by names", ((dict(zip(names, row, strict=True)),) for row in rows))


def _task(name: str, schema: Schema, parts: _Parts) -> Task:
    train, test, seen, tested, persons = parts
    # weighted words are rows of norm 1 already; other tables get rows of soft bins
    networks = {VECTORS: schema.network()}
    if not schema.is_text:
        networks[TABLE] = schema.network(AUTO)
    words = WORD_ROWS if schema.kind == "classes" else None
    return Task(
        name=name,
        networks=networks,
        load=lambda _: (train, test),
        loss=schema.loss,
        public={"schema": schema.to_public()},
        records=len(train) if persons is None else int(persons.max()) + 1,
        shape=(schema.width,),
        classes=schema.outputs if schema.kind == "classes" else None,
        kind=words if schema.is_text else TABLE,
        models={kind: schema.network(kind) for kind in (LINEAR, MLP)},
        target=(schema.kind, schema.outputs),
        table=None if schema.is_text else schema.layout,
        private={"schema": seen.to_json()},
        warnings=() if tested is None else tuple(tested.warnings()),
        persons=persons,
    )


def declared_schema(name: str, declared: Declared) -> Schema:
    """The schema that was given, or that of one text column and the classes that were named."""
    if declared.schema is None and declared.labels is None:
        raise InvalidInputError(
            f"task {name} needs a schema, since nothing is inferred from private records: write "
            "one with dpsur data schema FILE, fill it in, and pass --schema FILE; for texts with "
            "classes, --labels A,B,... is enough"
        )
    if declared.schema is None:  # one column of texts and one of classes
        names = [column.strip() for column in (declared.columns or TEXT_COLUMNS).split(",")]
        if len(names) != 2 or not all(names) or names[0] == names[1]:
            raise InvalidInputError(
                f"columns must name the texts and the classes, such as {TEXT_COLUMNS}, got "
                f"{declared.columns!r}; declare other tables with a schema"
            )
        return Schema({names[0]: Text()}, {names[1]: Category(list(declared.names))})
    if declared.labels is not None or declared.columns is not None:
        given = "columns" if declared.labels is None else "labels"
        raise InvalidInputError(f"{given} of {name} are in its schema; leave out --{given}")
    return declared.schema if isinstance(declared.schema, Schema) else Schema.load(declared.schema)


def other_persons(name: str, declared: Declared) -> Task:
    """The test records of a table as a task of its own, with their persons, who are all others."""
    path, schema, column = named_file(name), declared_schema(name, declared), declared.group_by
    assert column is not None
    _, *tested = _files(path, declared, schema)
    if not tested:
        raise InvalidInputError("name a file of other persons to compare with: --test FILE")
    if set(read_values(path, column)) & set(read_values(tested[0], column)):
        raise InvalidInputError(
            f"some persons of column {column!r} have records in both files; compare persons that "
            "were trained on with others"
        )
    return _task(name, schema, _parts(tested, schema, column))


def _files(path: Path, declared: Declared, schema: Schema) -> list[Path]:
    files = [path]
    if declared.test is not None:
        files.append(existing(declared.test))
    elif schema.test is not None and schema.test.file is not None:
        beside = "" if isinstance(declared.schema, Schema) else str(declared.schema)
        files.append(Path(beside).parent / Path(schema.test.file).expanduser())
        if not files[-1].is_file():
            raise InvalidInputError(
                f"the schema names the test file {schema.test.file}, but there is no file "
                f"{files[-1]}; the path is relative to the schema"
            )
    return files


def _parts(files: Sequence[Path], schema: Schema, group_by: str | None) -> _Parts:
    return _read_files(files, json.dumps(schema.to_json()), group_by)


@kept(1)
def _read_files(files: tuple[Path, ...], stored: str, group_by: str | None) -> _Parts:
    """Records of a schema as JSON from the file of a table, and from one of test records."""
    path, *others = files
    schema = Schema.from_json(json.loads(stored))
    if group_by is not None:
        _check_group_by(group_by, schema, None if path.suffix in JSON_LINES else header(path))
    records, usable, seen = _read(path, schema)
    train, persons = _selected(records, usable), None
    if group_by is not None:
        names = read_values(path, group_by)
        persons = numbered(number_persons(names, len(records))[usable])
    if others:
        test, usable, tested = _read(others[0], schema)
        return _Parts(train, _selected(test, usable), seen, tested, persons)
    if schema.test is None or schema.test.share is None:
        return _Parts(train, None, seen, None, persons)
    if group_by is not None:
        raise InvalidInputError(
            f"the schema tests on a share of {schema.test.share:g} of the records, which would "
            f"part the records of a person; with --group-by {group_by} name a test file, or none"
        )
    drawn = drawn_to_test(records, schema.test.share)
    train, test = records.select(usable & ~drawn), records.select(usable & drawn)
    if not len(train) or not len(test):
        raise InvalidInputError(
            f"a test share of {schema.test.share:g} leaves nothing to train or nothing to test; "
            "choose another"
        )
    return _Parts(train, test, seen.select(~drawn.numpy()), seen.select(drawn.numpy()))


def _check_group_by(name: str, schema: Schema, names: Sequence[str] | None = None) -> None:
    """Refuse a column of persons that the model would see, or that is not there."""
    if name in (*schema.columns, *schema.target):
        raise InvalidInputError(
            f"column {name!r} names persons and is an input or a target of the schema; leave it "
            "out of the schema, so that no model learns names"
        )
    if names is not None and name not in names:
        raise InvalidInputError(
            f"the table has no column {name!r} to name persons; it has {', '.join(names[:20])}",
            code="no-column",
        )


def read_table(path: Path, schema: Schema) -> Examples:
    records, usable, _ = _read(path, schema)
    return _selected(records, usable)


def _selected(records: Examples, usable: torch.Tensor) -> Examples:
    """Some records; all of them without a copy."""
    return records if bool(usable.all()) else records.select(usable)


def _read(path: Path, schema: Schema) -> tuple[Examples, torch.Tensor, Undeclared]:
    """All records of a file, which of them have a declared target, and what is not declared."""
    parts, seen = [], []
    for table in _tables(path, [*schema.columns, *schema.target]):
        parts.append((schema.inputs(table), *schema.targets(table)))
        seen.append(Undeclared.of(schema, table))
    inputs, targets, usable = (torch.cat(part) for part in zip(*parts, strict=True))
    if not bool(usable.any()):
        raise InvalidInputError(
            f"no record of {path} has a target ({', '.join(schema.target)}) that the schema "
            "declares; correct the schema or the file"
        )
    return Examples(inputs, targets), usable, Undeclared.join(seen)


def read_inputs(path: Path, schema: Schema) -> torch.Tensor:
    """The inputs of every record of a file, in its order; targets are not read."""
    return torch.cat([schema.inputs(table) for table in _tables(path, list(schema.columns))])


def read_columns(path: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {name: [] for name in names}
    for table in _tables(path, list(names)):
        for name in names:
            found[name] += list(table[name])
    return found


def read_values(path: Path, name: str) -> list[Any]:
    return read_columns(path, [name])[name]


def drawn_to_test(records: Examples, share: float) -> torch.Tensor:
    """Which records to test on: about this share of them.

    Where a record goes follows from its own values alone, by a keyed hash, so that one record more
    or less moves no other.
    """
    inputs, targets = records.inputs.numpy(), records.targets.numpy()
    rows = np.concatenate([inputs, targets.reshape(len(targets), -1)], axis=1)
    draws = (hashlib.blake2b(row.data, digest_size=8, key=TEST_KEY).digest() for row in rows)
    numbers = np.fromiter((int.from_bytes(draw, "little") for draw in draws), np.uint64, len(rows))
    return torch.from_numpy((numbers >> np.uint64(11)).astype(np.float64) / 2**53 < share)


def header(path: Path) -> list[str]:
    """The names of the columns of a file. No record is read."""
    if path.suffix in JSON_LINES:
        raise InvalidInputError(
            f"{path} has no header: the names of a JSON Lines file are in its records; for texts "
            "with classes no schema is needed, --labels and --columns declare them"
        )
    if _is_parquet(path):
        return [str(name) for name in _parquet(path).schema_arrow.names]
    with _lines(path) as file:
        names = _fields(next(iter(file), ""))
    if not any(names):
        raise InvalidInputError(f"{path} has no header line with the names of its columns")
    if _looks_like_a_record(names):
        raise InvalidInputError(
            f"the first line of {path} looks like a record, not like the names of its columns; add "
            "a header line (names that are numbers: write y2019 for 2019)"
        )
    for place, name in enumerate(names):
        if name in names[:place]:
            raise InvalidInputError(f"{path} names the column {name!r} twice; rename one")
    return names


def _looks_like_a_record(names: Sequence[str]) -> bool:
    """Whether a first line holds numbers, objects or sentences: a record must not become public.

    Names that count from 0, as data frames without names have them, are names.
    """
    if names == [str(place) for place in range(len(names))]:
        return False
    return any(
        not math.isnan(numbers_of([name])[0]) or name[:1] in ("{", "[") or len(name) > LONGEST_NAME
        for name in names
    )


def _tables(path: Path, wanted: list[str]) -> Iterator[Table]:
    """Some records after the other, as columns by name."""
    names = None if path.suffix in JSON_LINES else header(path)
    for name in wanted:
        if names is not None and name not in names:
            shown = ", ".join(names[:20])
            other = len(names) == 1 and any(mark in shown for mark in ";\t|")
            remedy = "; values must be separated by commas" if other else ""
            raise InvalidInputError(
                f"{path} has no column {name!r}, which the schema declares; it has {shown}{remedy}",
                code="no-column",
            )
    parquet, empty = names is not None and _is_parquet(path), True
    for table in _parquet_tables(path, wanted) if parquet else _text_tables(path, wanted, names):
        empty = False
        yield table
    if empty:
        raise InvalidInputError(f"{path} holds no record; there must be at least one")


def _text_tables(path: Path, wanted: list[str], names: list[str] | None) -> Iterator[Table]:
    """Records of a CSV file with columns of these names, else of a JSON Lines file.

    Which names the latter has is not known without reading it all.
    """
    found: set[str] = set()
    with _lines(path) as file:
        if names is not None:
            next(iter(file))
        while lines := list(islice(file, ROWS_AT_ONCE)):
            full = [line for line in lines if line.strip()]
            if names is None:
                rows = [_object(line) for line in full]
                found.update(name for name in wanted if any(name in row for row in rows))
            else:
                rows = [dict(zip(names, _fields(line), strict=False)) for line in full]
            if rows:
                yield {name: _column([row.get(name) for row in rows]) for name in wanted}
    missing = [name for name in wanted if names is None and name not in found]
    if missing:
        raise InvalidInputError(
            f"no line of {path} is a JSON object with {missing[0]!r}; write one object in each "
            "line, or name the columns with --columns or a schema"
        )


def _object(line: str) -> dict[str, Any]:
    """The values of one line; of a line that is no JSON object, none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _column(values: Sequence[Any]) -> Values:
    found = np.empty(len(values), object)
    found[:] = values
    return found


def _lines(path: Path) -> Any:
    try:
        # whatever is no text becomes a mark, and then counts as undeclared
        return path.open(encoding="utf-8-sig", errors="replace", newline=None)
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read ({error.strerror})") from None


def _fields(line: str) -> list[str]:
    """The values of one line; of a line that is no CSV, none."""
    try:
        found = next(csv.reader([line.rstrip("\r\n")]), [])
    except csv.Error:
        return []
    return [value.strip() for value in found]


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def _parquet(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise InvalidInputError(
            f"{path} is a Parquet file, which needs pyarrow; run: pip install 'dpsur[tables]'"
        ) from None
    with _damage(path):
        return parquet.ParquetFile(path)


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Whatever pyarrow raises about a file, in one line; its words may quote a record."""
    try:
        yield
    except InvalidInputError:
        raise
    except Exception as error:
        raise InvalidInputError(
            f"{path} is damaged, or no Parquet file; write it again", private=str(error)
        ) from None


def _parquet_tables(path: Path, wanted: list[str]) -> Iterator[Table]:
    file = _parquet(path)
    for name in wanted:
        kind = file.schema_arrow.field(name).type
        if not _is_plain(kind):
            raise InvalidInputError(
                f"column {name!r} of {path} is of type {kind}; it must hold numbers, truth values "
                "or text"
            )
    batches = file.iter_batches(ROWS_AT_ONCE, columns=wanted)
    while True:
        with _damage(path):
            batch: Any = next(batches, None)
            rows = 0 if batch is None else batch.num_rows
            table = {name: _values(batch.column(name)) for name in wanted if rows}
        if batch is None:
            return
        if rows:
            yield table


def _is_plain(kind: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    known = (types.is_integer, types.is_floating, types.is_decimal, types.is_boolean)
    return any(is_kind(kind) for is_kind in (*known, types.is_null)) or _is_text(kind)


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def _values(column: Any) -> Values:
    """The values of a column; what is no text in a column of text becomes a mark."""
    from pyarrow import large_binary, types

    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not _is_text(column.type):
        return _column(column.to_pylist())
    found = column.cast(large_binary()).to_pylist()
    return _column([None if v is None else v.decode("utf-8", "replace") for v in found])
