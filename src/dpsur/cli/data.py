"""`dpsur data`: start a schema of a table."""

import argparse
import json
from pathlib import Path

from dpsur.cli.parser import finite_number
from dpsur.errors import FileError, InvalidInputError, describe_os_error
from dpsur.runs.schema_learning import learn_schema
from dpsur.tasks.schema import template
from dpsur.tasks.tables import header

DESCRIPTION = """\
Start a schema of a table, which declares what a run may know about its columns.

  dpsur data schema people.csv   a schema to fill in, from the names of the columns alone
  dpsur data schema people.csv --target back --schema-epsilon 0.5 --out schema.json
                                 a schema learned privately, at a cost in epsilon
"""


def set_up(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    starting = actions.add_parser("schema", help="write a schema of a table to fill in")
    starting.description = (
        "Write a schema of a CSV or Parquet file to fill in. Only the names of its columns are "
        "read; ranges, categories and the target are yours to declare, from public knowledge, and "
        "become public. See docs/data.md."
    )
    starting.add_argument("file", metavar="FILE", type=Path, help="a CSV or Parquet file")
    starting.add_argument(
        "--target", metavar="COLUMN", action="append", help="the target (default: the last column)"
    )
    starting.add_argument("--out", metavar="FILE", type=Path, help="new file (default: print it)")
    starting.add_argument(
        "--schema-epsilon",
        metavar="E",
        type=finite_number,
        help="learn ranges and values from the private records at this epsilon, which runs with "
        "the schema are charged for",
    )
    starting.add_argument(
        "--delta", type=finite_number, default=1e-5, help="delta of the runs (default: 1e-5)"
    )
    starting.set_defaults(run=_schema)


def _schema(options: argparse.Namespace) -> int:
    path: Path = options.file
    if not path.is_file():
        raise InvalidInputError(f"there is no file {path}; name a CSV or Parquet file")
    names = header(path)
    targets = options.target or names[-1:]
    for name in targets:
        if name not in names:
            raise InvalidInputError(
                f"{path} has no column {name!r}; it has {', '.join(names[:20])}"
            )
    if options.schema_epsilon is None:
        found = template(names, targets)
    else:
        found = learn_schema(path, targets, options.schema_epsilon, options.delta).to_json()
    text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    if options.out is None:
        print(text, end="")
        return 0
    try:
        with options.out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InvalidInputError(f"{options.out} exists; choose another file") from None
    except OSError as error:
        raise FileError(describe_os_error(error)) from error
    if options.schema_epsilon is None:
        print(f"{options.out}: fill in the kinds, ranges and values of {len(names)} columns")
    else:
        used = len(found["columns"]) + len(found["target"])
        print(
            f"{options.out}: learned {used} of {len(names)} columns, which costs epsilon "
            f"{options.schema_epsilon:g} if it is alone; runs with this schema are charged for it"
        )
    return 0
