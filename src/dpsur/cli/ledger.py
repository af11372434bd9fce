"""`dpsur ledger`: what all private runs on a data set may spend together."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from dpsur.privacy.data_ledger import (
    ADAPTIVE,
    FIXED,
    Booking,
    DataLedger,
    LedgerTotal,
    share_used,
    spent,
    spent_adaptively,
)
from dpsur.privacy.statement import format_epsilon

DESCRIPTION = """\
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


def set_up(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
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
            alone = _epsilon(spent([row], DEFAULT_DELTA + row.delta))
            print(f"{row.at}  {row.id}  data {row.data}  {row.what:<12} epsilon {alone} alone")
    return _report(options)


def _report(options: argparse.Namespace) -> int:
    ledger = DataLedger(options.path)
    found, totals = ledger.bookings(), ledger.totals()
    total = totals[-1][1] if totals else None
    measured = LedgerTotal(1.0, DEFAULT_DELTA) if total is None else total
    both = spent_adaptively(found, measured), spent(found, measured.delta)
    if options.json:
        print(json.dumps(_values(ledger, found, totals, both, measured.delta)))
        return 0
    data = len({row.data for row in found})
    runs, versions = f"run{'s' * (len(found) != 1)}", f"version{'s' * (data != 1)}"
    print(f"{len(found)} {runs} on {data} {versions} of the data, unit: one {ledger.unit}")
    print(
        f"together epsilon {_epsilon(both[1])} at delta {measured.delta:g}, if no run was chosen "
        "by what earlier ones released"
    )
    print(f"  {_epsilon(both[0])} whatever they were chosen by")
    if total is not None and total.rule == ADAPTIVE:
        print(f"  {share_used(found, total):.0%} of the total's allowance is used")
    for at, each in totals:
        print(f"{_words(each)}, set {at}")
    if total is None:
        print("no total: no run is refused")
    print("each booking is what a run may have spent, whether it ended or was stopped")
    return 0


def _values(
    ledger: DataLedger,
    found: list[Booking],
    totals: list[tuple[str, LedgerTotal]],
    both: tuple[float, float],
    delta: float,
) -> dict[str, Any]:
    adaptive, fixed = (value if math.isfinite(value) else None for value in both)
    return {
        "unit": ledger.unit,
        "runs": [{"id": r.id, "at": r.at, "data": r.data, "method": r.what} for r in found],
        "delta": delta,
        "epsilon": {ADAPTIVE: adaptive, FIXED: fixed},
        "totals": [{"at": at, **vars(each)} for at, each in totals],
    }


def _words(total: LedgerTotal) -> str:
    return f"total epsilon {total.epsilon:g} at delta {total.delta:g}, {total.rule}"


def _epsilon(value: float) -> str:
    return format_epsilon(value)
