"""`dpsur cache`: show the cache and its size, or empty it."""

import argparse
import contextlib
import json
from pathlib import Path

from dpsur.cli.terminal import LOG
from dpsur.environment import CACHE_VARIABLE, cache_folder
from dpsur.errors import InvalidInputError
from dpsur.runs.files import PRIVATE
from dpsur.tasks.datasets import DATA_SETS

DESCRIPTION = """\
Show or empty the cache. All of it can be recomputed; features and decoded data take minutes.

  dpsur cache list               what it holds, and how large it is
  dpsur cache empty features     delete one part
  dpsur cache empty all          delete everything but the downloads

Features are those of private records, readable by their owner only.
"""
ALL = "all"
ACCOUNTING, FEATURES, DATA, DOWNLOADS = "accounting", "features", "data", "downloads"
ERRORS = "errors"
# What a part holds, and its files: patterns of what this package writes, and of nothing else.
PARTS = {
    ACCOUNTING: (
        "certified divergences of settings, and calibrated noise",
        ("selective-*.json", "selective-*.tmp", "calibrations/*.json", "calibrations/*.tmp"),
    ),
    FEATURES: (
        "features of records that were trained on",
        ("features/*.npy", "features/*.tmp", "features/key"),
    ),
    ERRORS: ("private values left out of error messages", (f"{PRIVATE}/{LOG}",)),
    DATA: ("decoded copies of data sets", tuple(f"data/{name}/**/*" for name in DATA_SETS)),
    DOWNLOADS: (
        "downloads of `dpsur data fetch`",
        tuple(f"downloads/{data_set.folders[0]}/**/*" for data_set in DATA_SETS.values()),
    ),
}


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = DESCRIPTION
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="show what the cache holds")
    listing.add_argument("--json", action="store_true", help="print one JSON object")
    listing.set_defaults(run=_list)
    emptying = actions.add_parser("empty", help="delete parts of the cache")
    emptying.add_argument(
        "parts",
        metavar="PART",
        nargs="+",
        help=f"one of: {', '.join(PARTS)}; or {ALL}, which leaves the downloads alone",
    )
    emptying.set_defaults(run=_empty)


def files_of(part: str) -> list[Path]:
    """The files of a part of the cache, as it is now."""
    root = cache_folder()
    found = [path for pattern in PARTS[part][1] for path in root.glob(pattern)]
    return [path for path in found if path.is_file()]


def _list(options: argparse.Namespace) -> int:
    found = {part: _size(files_of(part)) for part in PARTS}
    if options.json:
        rows = {part: {"files": n, "bytes": size} for part, (n, size) in found.items()}
        print(json.dumps({"folder": str(cache_folder()), "parts": rows}))
        return 0
    print(f"{cache_folder()} (set {CACHE_VARIABLE} to change it)")
    for part, (n, size) in found.items():
        print(f"{part:<12}{n:>6} files {_shown(size):>10}  {PARTS[part][0]}")
    return 0


def _empty(options: argparse.Namespace) -> int:
    for name in options.parts:
        if name not in (*PARTS, ALL):
            known = ", ".join((*PARTS, ALL))
            raise InvalidInputError(f"the cache has no part {name!r}; choose one of {known}")
    parts = dict.fromkeys(name for name in options.parts if name != ALL)
    if ALL in options.parts:
        parts |= dict.fromkeys(name for name in PARTS if name != DOWNLOADS)
    for part in parts:
        files = files_of(part)
        n, size = _size(files)
        _delete(files)
        print(f"{part}: {n} files deleted, {_shown(size)}")
    return 0


def _size(files: list[Path]) -> tuple[int, int]:
    return len(files), sum(path.stat().st_size for path in files)


def _delete(files: list[Path]) -> None:
    """Delete files, and folders inside the cache that are empty then."""
    root = cache_folder()
    for path in files:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise InvalidInputError(f"{path} cannot be deleted: {error.strerror}") from error
    folders = {folder for path in files for folder in path.parents if root in folder.parents}
    for folder in sorted(folders, reverse=True):
        with contextlib.suppress(OSError):  # something else is in it
            folder.rmdir()


def _shown(size: int) -> str:
    amount = float(size)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} GB"
