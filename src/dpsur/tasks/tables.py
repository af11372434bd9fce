"""Your records in a table: a CSV or Parquet file, and a schema that declares its columns.

In a CSV file every line is a record, read by itself: a stray quote in one record cannot swallow the
next, and line breaks inside a value are not supported (Parquet has them). Lines with too few or too
many values are records like any other, with missing values or without the rest.
"""

import csv
import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dpsur.errors import InvalidInputError
from dpsur.features import TABLE
from dpsur.functional.records import Examples
from dpsur.tasks.base import VECTORS, Task
from dpsur.tasks.columns import Table, Values, numbers_of
from dpsur.tasks.schema import AUTO, LINEAR, MLP, Schema
from dpsur.tasks.undeclared import Undeclared

CSV, PARQUET = "csv:", "parquet:"
PREFIXES = (CSV, PARQUET)
# The key of the draws that part off test records: they are the same on every machine.
TEST_KEY = b"dpsur-test/1"
ROWS_AT_ONCE = 20_000
# A longer name of a column is taken for a value.
LONGEST_NAME = 100


def table_task(name: str, schema: str | PathLike[str] | None) -> Task:
    """The task of a name `csv:FILE` or `parquet:FILE`, with the schema of a JSON file."""
    path, declared = table_path(name), _schema(name, schema)
    train, test, seen, tested = _records(path, Path(str(schema)), declared)
    return Task(
        name=name,
        summary=f"{len(train)} records to train, {len(test or ())} to test",
        networks={VECTORS: declared.network(), TABLE: declared.network(AUTO)},
        load=lambda _: (train, test),
        loss=declared.loss,
        public={"schema": declared.to_public()},
        records=len(train),
        shape=(declared.width,),
        classes=declared.outputs if declared.kind == "classes" else None,
        kind=TABLE,
        models={kind: declared.network(kind) for kind in (LINEAR, MLP)},
        target=(declared.kind, declared.outputs),
        table=declared.layout,
        private={"schema": seen.to_json()},
        warnings=() if tested is None else tuple(tested.warnings()),
    )


def table_test_records(
    name: str, schema: str | PathLike[str] | None
) -> tuple[Examples | None, Schema]:
    """The test records of a table, and its schema."""
    path, declared = table_path(name), _schema(name, schema)
    return _records(path, Path(str(schema)), declared).test, declared


def _schema(name: str, schema: str | PathLike[str] | None) -> Schema:
    if schema is None:
        raise InvalidInputError(
            f"task {name} needs a schema, since nothing is inferred from private records: write "
            "one with dpsur data schema FILE, fill it in, and pass --schema FILE"
        )
    return Schema.load(schema)


def table_path(name: str) -> Path:
    """The file that a name `csv:FILE` or `parquet:FILE` names."""
    prefix = next(prefix for prefix in PREFIXES if name.startswith(prefix))
    path = Path(name.removeprefix(prefix)).expanduser()
    if not path.is_file():
        raise InvalidInputError(f"task {name}: there is no file {path}; write {prefix}FILE")
    return path


class _Parts(NamedTuple):
    """Records to train on and to test on, and what their schema does not declare of either."""

    train: Examples
    test: Examples | None
    seen: Undeclared
    tested: Undeclared | None


def _records(path: Path, schema_path: Path, schema: Schema) -> _Parts:
    files = [path, schema_path]
    if schema.test is not None and schema.test.file is not None:
        files.append(schema_path.parent / Path(schema.test.file).expanduser())
        if not files[-1].is_file():
            raise InvalidInputError(
                f"the schema names the test file {schema.test.file}, but there is no file "
                f"{files[-1]}; the path is relative to the schema"
            )
    stats = [file.stat() for file in files]
    return _read_records(tuple(files), tuple((found.st_size, found.st_mtime_ns) for found in stats))


# Size and time of change are part of the key: a file that changes is read again.
@lru_cache(maxsize=1)
def _read_records(files: tuple[Path, ...], changes: tuple[tuple[int, int], ...]) -> _Parts:
    del changes
    path, schema_path, *others = files
    schema = Schema.load(schema_path)
    records, usable, seen = _read(path, schema)
    train = records.select(usable)
    if others:
        test, usable, tested = _read(others[0], schema)
        return _Parts(train, test.select(usable), seen, tested)
    if schema.test is None or schema.test.share is None:
        return _Parts(train, None, seen, None)
    train, test = split_by_draw(train, schema.test.share)
    drawn = _is_tested(records, schema.test.share).numpy()
    return _Parts(train, test, seen.select(~drawn), seen.select(drawn))


def read_table(path: Path, schema: Schema) -> Examples:
    """All records of a file with a target that the schema declares."""
    records, usable, _ = _read(path, schema)
    return records.select(usable)


def _read(path: Path, schema: Schema) -> tuple[Examples, torch.Tensor, Undeclared]:
    """All records of a file, which of them have a declared target, and what is not declared."""
    parts, seen = [], []
    for table in _tables(path, schema):
        parts.append((schema.inputs(table), *schema.targets(table)))
        seen.append(Undeclared.of(schema, table))
    if not parts:
        raise InvalidInputError(f"{path} holds no record; there must be at least one")
    inputs, targets, usable = (torch.cat(part) for part in zip(*parts, strict=True))
    if not bool(usable.any()):
        raise InvalidInputError(
            f"no record of {path} has a target ({', '.join(schema.target)}) that the schema "
            "declares; correct the schema or the file"
        )
    return Examples(inputs, targets), usable, Undeclared.join(seen)


def split_by_draw(records: Examples, share: float) -> tuple[Examples, Examples]:
    """Records to train on and about this share of them to test on.

    Where a record goes follows from its own values alone, by a keyed hash, so that one record more
    or less moves no other.
    """
    tested = _is_tested(records, share)
    if bool(tested.all()) or not bool(tested.any()):
        raise InvalidInputError(
            f"a test share of {share:g} leaves nothing to train or nothing to test; choose another"
        )
    return records.select(~tested), records.select(tested)


def _is_tested(records: Examples, share: float) -> torch.Tensor:
    inputs, targets = records.inputs.numpy(), records.targets.numpy()
    rows = np.concatenate([inputs, targets.reshape(len(targets), -1)], axis=1)
    draws = (hashlib.blake2b(row.data, digest_size=8, key=TEST_KEY).digest() for row in rows)
    numbers = np.fromiter((int.from_bytes(draw, "little") for draw in draws), np.uint64, len(rows))
    return torch.from_numpy((numbers >> np.uint64(11)).astype(np.float64) / 2**53 < share)


def header(path: Path) -> list[str]:
    """The names of the columns of a file. No record is read."""
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


def _tables(path: Path, schema: Schema) -> Iterator[Table]:
    """Some records after the other, as columns by name."""
    names, wanted = header(path), [*schema.columns, *schema.target]
    for name in wanted:
        if name not in names:
            shown = ", ".join(names[:20])
            raise InvalidInputError(
                f"{path} has no column {name!r}, which the schema declares; it has {shown}"
            )
    if _is_parquet(path):
        yield from _parquet_tables(path, wanted)
        return
    places = [names.index(name) for name in wanted]
    with _lines(path) as file:
        next(iter(file))
        while lines := list(islice(file, ROWS_AT_ONCE)):
            rows = [_fields(line) for line in lines if line.strip()]
            if rows:
                columns = zip(*(_chosen(row, places) for row in rows), strict=True)
                yield dict(zip(wanted, map(_column, columns), strict=True))


def _column(values: Sequence[Any]) -> Values:
    found = np.empty(len(values), object)
    found[:] = values
    return found


def _chosen(row: Sequence[str], places: Sequence[int]) -> list[str | None]:
    return [row[place] if place < len(row) else None for place in places]


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
