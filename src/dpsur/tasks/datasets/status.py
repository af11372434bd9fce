"""What is there of a data set, without reading it unless asked to."""

from dataclasses import dataclass
from pathlib import Path

from dpsur.errors import InvalidInputError
from dpsur.tasks.datasets.base import DataSet
from dpsur.tasks.datasets.cache import Cache
from dpsur.tasks.datasets.files import Found, Incomplete, data_folders, find
from dpsur.tasks.datasets.load import fetch_command, load_arrays

READY, FOUND, INCOMPLETE, MISSING, WRONG = "ready", "found", "incomplete", "missing", "wrong"


@dataclass(frozen=True)
class Status:
    """Whether a data set can be used: `found` files are checked when they are first used.

    `remedy` says what to do where it cannot.
    """

    state: str
    where: Path | None = None
    remedy: str | None = None


def status_of(data_set: DataSet, data_dir: Path | None, *, check: bool = False) -> Status:
    """Look for a data set; with `check` also decode it and compare its checksums."""
    found = find(data_set, data_folders(data_dir))
    cache = Cache(data_set)
    command = f"run: {fetch_command(data_set, data_dir)}"
    if isinstance(found, Incomplete):
        return Status(INCOMPLETE, found.folder, f"{found.missing} is missing; {command}")
    if isinstance(found, Found):
        if check:
            try:
                load_arrays(data_set, data_dir)
            except InvalidInputError as error:
                return Status(WRONG, found.folder, str(error))
        return Status(READY if cache.knows(found.paths) else FOUND, found.folder)
    if data_dir is None and cache.of_published() is not None:
        return Status(READY, cache.folder)
    return Status(MISSING, None, command)
