"""`python -m reproduction data`: download the public data sets, and show which are installed."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Self

from dpsur.errors import InvalidInputError
from dpsur.tasks import mnist_5k
from reproduction.datasets import DATA_SETS, fetch
from reproduction.datasets.store import MISSING, READY, Status, status_of

DESCRIPTION = """\
Download the public data sets, and show which are installed.

  python -m reproduction data list           what is installed, and how to get the rest
  python -m reproduction data fetch mnist    download from the first public source that answers
  python -m reproduction data fetch all      all of them (about 390 MB on disk)

Files are looked for in --data-dir; without it in $DPSUR_DATA, then among the downloads in
$DPSUR_CACHE (usually ~/.cache/dpsur), which also holds decoded copies.
reproduction/datasets/README.md says how to place files by hand.
"""
ALL = "all"


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = DESCRIPTION
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    fetching = actions.add_parser("fetch", help="download data sets and check them")
    fetching.description = (
        "Download data sets and check them. An interrupted download resumes where it stopped."
    )
    fetching.add_argument(
        "names", metavar="NAME", nargs="+", help=f"one of: {', '.join((*DATA_SETS, ALL))}"
    )
    fetching.add_argument("--quiet", action="store_true", help="no progress, only errors")
    fetching.set_defaults(run=_fetch)
    listing = actions.add_parser("list", help="show which data sets are installed")
    listing.description = (
        "Show which data sets are installed.\n\nready: checked before; found: checked when first "
        "used; or incomplete, missing, wrong."
    )
    listing.add_argument("--check", action="store_true", help="decode and check what is found")
    listing.add_argument("--json", action="store_true", help="print one JSON object")
    listing.set_defaults(run=_list)
    for action in (fetching, listing):
        action.add_argument(
            "--data-dir",
            type=Path,
            metavar="DIR",
            help="folder of the data (default: $DPSUR_DATA, or the downloads in the cache)",
        )


def _fetch(options: argparse.Namespace) -> int:
    for name in options.names:
        if name not in (*DATA_SETS, ALL):
            known = ", ".join((*DATA_SETS, ALL))
            raise InvalidInputError(f"no data set {name!r} to fetch; choose one of {known}")
    names = DATA_SETS if ALL in options.names else dict.fromkeys(options.names)
    failures = []
    for name in names:
        with TransferBar(quiet=options.quiet) as bar:
            try:
                folder = fetch(DATA_SETS[name], options.data_dir, bar.report, bar.say)
            except InvalidInputError as error:
                failures.append(str(error))
                continue
        print(f"{name}: {folder}")
    if failures:
        raise InvalidInputError("\n".join(failures))
    return 0


def _list(options: argparse.Namespace) -> int:
    rows = {
        mnist_5k.MNIST_5K.name: (
            _embedded(),
            (mnist_5k.TRAIN_RECORDS, mnist_5k.RECORDS - mnist_5k.TRAIN_RECORDS),
        )
    }
    for name, data_set in DATA_SETS.items():
        found = status_of(data_set, options.data_dir, check=options.check)
        rows[name] = (found, data_set.records)
    if options.json:
        print(json.dumps({name: _as_json(*row) for name, row in rows.items()}))
        return 0
    print(f"{'name':<10}{'state':<12}{'train':>7}{'test':>8}  where, or what to do")
    for name, (found, (train, test)) in rows.items():
        place = "; ".join(str(part) for part in (found.where, found.remedy) if part is not None)
        print(f"{name:<10}{found.state:<12}{train:>7,}{test:>8,}  {place}")
    return 0


def _embedded() -> Status:
    try:
        return Status(READY, mnist_5k.archive())
    except InvalidInputError as error:
        return Status(MISSING, None, str(error))


def _as_json(found: Status, records: tuple[int, int]) -> dict[str, Any]:
    return {
        "state": found.state,
        "where": None if found.where is None else str(found.where),
        "remedy": found.remedy,
        "train_records": records[0],
        "test_records": records[1],
    }


class TransferBar:
    """A bar for each file on a terminal, lines elsewhere."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._bar: Any = None
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            self._bar = _rich_bar()
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif not self._quiet:
            print(text, file=sys.stderr, flush=True)

    def report(self, file: str, done: int, total: int | None) -> None:
        """Show how much of a file has arrived."""
        if self._bar is None:
            return
        if file not in self._files:
            self._files[file] = self._bar.add_task(file, total=total)
        self._bar.update(self._files[file], completed=done, total=total)


def _rich_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
    )
