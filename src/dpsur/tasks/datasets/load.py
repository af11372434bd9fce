"""From a data set's name to its arrays: found, decoded, checked, and kept for the next time."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpsur.errors import InvalidInputError
from dpsur.tasks.datasets.base import Arrays, DamagedFileError, DataSet, Piece, digest
from dpsur.tasks.datasets.published import DATA_SETS
from dpsur.tasks.datasets.store import (
    DATA_VARIABLE,
    Cache,
    FoundFiles,
    Incomplete,
    data_folders,
    download_folder,
    find,
)


def load_arrays(data_set: DataSet, data_dir: Path | None = None) -> Arrays:
    """The published arrays, as they were published: bytes and token ids, nothing scaled.

    Looked for in `data_dir`; without one in `$DPSUR_DATA`, then among the downloads, then among
    the copies that were decoded before.
    """
    found = find(data_set, data_folders(data_dir))
    if isinstance(found, FoundFiles):
        try:
            return read_found(data_set, found)
        except DamagedFileError as error:
            raise InvalidInputError(
                f"{error}; delete it and run: {fetch_command(data_set, data_dir)}"
            ) from error
    if isinstance(found, Incomplete):
        raise InvalidInputError(
            f"{data_set.name} is incomplete: {found.folder} holds no {found.missing}; "
            f"run: {fetch_command(data_set, data_dir)}",
            code="data-missing",
        )
    kept = None if data_dir is not None else Cache(data_set).of_published()
    if kept is None:
        raise InvalidInputError(_missing(data_set, data_dir), code="data-missing")
    return kept


def read_found(data_set: DataSet, found: FoundFiles) -> Arrays:
    """Open the decoded copy of these files, or decode and check them."""
    cache = Cache(data_set)
    kept = cache.of_files(found.paths)
    if kept is not None:
        return kept
    pieces = found.form.read(found.paths)
    digests = {piece.name: digest(piece.array) for piece in pieces}
    if not _checksum_known(data_set, found.paths):
        for piece in pieces:
            _check(data_set, piece, digests[piece.name])
    return cache.keep(found.paths, {piece.name: piece.array for piece in pieces}, digests)


def fetch_command(data_set: DataSet, data_dir: Path | None) -> str:
    """What to run to have a data set downloaded to where it was looked for."""
    where = "" if data_dir is None else f" --data-dir {data_dir}"
    return f"dpsur data fetch {data_set.name}{where}"


def _checksum_known(data_set: DataSet, paths: Sequence[Path]) -> bool:
    if not data_set.trusted_files:
        return False
    sums = {hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    return sums <= data_set.trusted_files


def _check(data_set: DataSet, piece: Piece, found: str) -> None:
    if found == data_set.digests[piece.name]:
        return
    for other in DATA_SETS.values():
        for name, known in other.digests.items():
            if found == known:
                raise InvalidInputError(
                    f"{piece.path} holds {name} of {other.name}, not {piece.name} of "
                    f"{data_set.name}; keep their files in subfolders of their own, "
                    f"{data_set.folders[0]} and {other.folders[0]}"
                )
    raise DamagedFileError(
        piece.path, f"does not hold the published {piece.name} (its checksum is wrong)"
    )


def _missing(data_set: DataSet, data_dir: Path | None) -> str:
    looked = ", ".join(str(folder) for folder in data_folders(data_dir))
    return (
        f"the data of {data_set.name} are not in {looked}; "
        f"run: {fetch_command(data_set, data_dir)} (or name their folder with --data-dir or "
        f"{DATA_VARIABLE}; by hand: {by_hand(data_set, data_dir)})"
    )


def by_hand(data_set: DataSet, data_dir: Path | None) -> str:
    """How a person gets the files without this program."""
    return f"{data_set.by_hand} into {download_folder(data_dir) / data_set.folders[0]}"


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
    if isinstance(found, FoundFiles):
        if check:
            try:
                load_arrays(data_set, data_dir)
            except InvalidInputError as error:
                return Status(WRONG, found.folder, str(error))
        return Status(READY if cache.knows(found.paths) else FOUND, found.folder)
    if data_dir is None and cache.of_published() is not None:
        return Status(READY, cache.folder)
    return Status(MISSING, None, command)
