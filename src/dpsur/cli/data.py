"""`dpsur data`: start a schema of a table.

`dpsur ledger`: what all private runs on a data set may spend together.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from dpsur.cli.parser import finite_number
from dpsur.errors import FileError, InvalidInputError, describe_os_error
from dpsur.privacy.data_ledger import (
    ADAPTIVE,
    FIXED,
    DataLedger,
    LedgerTotal,
    share_used,
    spent,
    spent_adaptively,
)
from dpsur.privacy.statement import format_epsilon

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
    # with them torch, which a ledger does not need
    from dpsur.runs.schema_learning import learn_schema
    from dpsur.tasks.schema import template
    from dpsur.tasks.tables import header

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
        said = f"fill in the kinds, ranges and values of {len(names)} columns"
    else:
        found = learn_schema(path, targets, options.schema_epsilon, options.delta).to_json()
        said = (
            f"learned {len(found['columns']) + len(found['target'])} of {len(names)} columns, "
            f"which costs epsilon {options.schema_epsilon:g} if it is alone; runs with this schema "
            "are charged for it"
        )
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
    print(f"{options.out}: {said}")
    return 0


LEDGER = """\
Keep what several runs on the same data reveal together below a total.

  dpsur ledger create people.ledger --epsilon 8 --delta 1e-5 --unit person
  dpsur train --task csv:people.csv --group-by name --ledger people.ledger
  dpsur ledger show people.ledger      every run, by date, and what all of them come to
  dpsur ledger report people.ledger    what they come to together, for a reviewer
  dpsur ledger total people.ledger --epsilon 10 --delta 1e-5

A run books what it may spend before it starts; a run that does not fit is refused and trains
nothing. What is booked stays booked, also of a run that was stopped. The file is private.
"""
DEFAULT_DELTA = 1e-5


def set_up_ledger(parser: argparse.ArgumentParser) -> None:
    parser.description = LEDGER
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    known: dict[str, tuple[str, Any]] = {
        "create": ("make a new ledger", _create),
        "show": ("list the bookings, and what they come to", _show),
        "report": ("what all runs come to together", _report),
        "total": ("set a total from now on", _set_total),
        "adopt": ("a moved or restored file is the one ledger of its data", _adopt),
    }
    for name, (text, run) in known.items():
        action = actions.add_parser(name, help=text)
        action.add_argument("path", metavar="PATH", type=Path, help="file of the ledger")
        if name in ("create", "total"):
            needed = name == "total"
            action.add_argument("--epsilon", type=float, required=needed, help="of the total")
            action.add_argument("--delta", type=float, required=needed, help="of the total")
            action.add_argument(
                "--rule",
                choices=(ADAPTIVE, FIXED),
                default=ADAPTIVE,
                help="adaptive: a run may be chosen by what earlier ones have released; fixed: no "
                "run is, which is composed more tightly (default: adaptive)",
            )
        if name == "create":
            action.add_argument(
                "--unit",
                choices=("record", "person"),
                default="record",
                help="whom it protects (default: record)",
            )
        if name in ("show", "report"):
            action.add_argument("--json", action="store_true", help="print one JSON object")
        action.set_defaults(run=run)


def _create(options: argparse.Namespace) -> int:
    total = None
    if options.epsilon is not None:
        delta = DEFAULT_DELTA if options.delta is None else options.delta
        total = LedgerTotal(options.epsilon, delta, options.rule)
    DataLedger.create(options.path, options.unit, total)
    limit = "no total; set one with `dpsur ledger total`" if total is None else _words(total)
    print(f"ledger of a data set, unit {options.unit}, {limit}: {options.path}")
    return 0


def _set_total(options: argparse.Namespace) -> int:
    total = LedgerTotal(options.epsilon, options.delta, options.rule)
    DataLedger(options.path).set_total(total)
    print(_words(total))
    return 0


def _adopt(options: argparse.Namespace) -> int:
    DataLedger(options.path).adopt()
    print(f"{options.path} is the ledger of its data from now on; use no other copy of it")
    return 0


def _show(options: argparse.Namespace) -> int:
    ledger = DataLedger(options.path)
    found = ledger.bookings()
    if not options.json:
        for row in found:
            alone = format_epsilon(spent([row], DEFAULT_DELTA + row.delta))
            print(f"{row.at}  {row.id}  data {row.data}  {row.what:<12} epsilon {alone} alone")
    return _report(options)


def _report(options: argparse.Namespace) -> int:
    ledger = DataLedger(options.path)
    found, totals = ledger.bookings(), ledger.totals()
    total = totals[-1][1] if totals else None
    measured = LedgerTotal(1.0, DEFAULT_DELTA) if total is None else total
    both = spent_adaptively(found, measured), spent(found, measured.delta)
    if options.json:
        adaptive, fixed = (value if math.isfinite(value) else None for value in both)
        values: dict[str, Any] = {
            "unit": ledger.unit,
            "runs": [{"id": r.id, "at": r.at, "data": r.data, "method": r.what} for r in found],
            "delta": measured.delta,
            "epsilon": {ADAPTIVE: adaptive, FIXED: fixed},
            "totals": [{"at": at, **vars(each)} for at, each in totals],
        }
        print(json.dumps(values))
        return 0
    data = len({row.data for row in found})
    runs, versions = f"run{'s' * (len(found) != 1)}", f"version{'s' * (data != 1)}"
    print(f"{len(found)} {runs} on {data} {versions} of the data, unit: one {ledger.unit}")
    print(
        f"together epsilon {format_epsilon(both[1])} at delta {measured.delta:g}, if no run was "
        "chosen by what earlier ones released"
    )
    print(f"  {format_epsilon(both[0])} whatever they were chosen by")
    if total is not None and total.rule == ADAPTIVE:
        print(f"  {share_used(found, total):.0%} of the total's allowance is used")
    for at, each in totals:
        print(f"{_words(each)}, set {at}")
    if total is None:
        print("no total: no run is refused")
    print("each booking is what a run may have spent, whether it ended or was stopped")
    return 0


def _words(total: LedgerTotal) -> str:
    return f"total epsilon {total.epsilon:g} at delta {total.delta:g}, {total.rule}"
