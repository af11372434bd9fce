"""Where data sets lie on disk, which are there, and their decoded copies."""

import contextlib
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpsur.environment import cache_folder
from dpsur.errors import InvalidInputError
from dpsur.tasks.npz import Array, Arrays, DamagedFileError
from reproduction.datasets.published import DATA_SETS, DataSet, digest
from reproduction.datasets.readers import Form, Piece

DATA_VARIABLE = "DPSUR_DATA"


@dataclass(frozen=True)
class FoundFiles:
    """The files of a data set, in one of its forms."""

    form: Form
    paths: tuple[Path, ...]

    @property
    def folder(self) -> Path:
        return self.paths[0].parent


@dataclass(frozen=True)
class Incomplete:
    """Some files of a form, but not all."""

    folder: Path
    missing: str


def data_folders(data_dir: Path | None) -> list[Path]:
    """The folders to look into: the given one; otherwise `$DPSUR_DATA`, then the downloads."""
    if data_dir is not None:
        return [_existing(data_dir, "the data folder")]
    downloads = cache_folder() / "downloads"
    own = os.environ.get(DATA_VARIABLE)
    return [_existing(Path(own), DATA_VARIABLE), downloads] if own else [downloads]


def download_folder(data_dir: Path | None) -> Path:
    """Where fetched files go."""
    own = os.environ.get(DATA_VARIABLE)
    return data_dir or (Path(own) if own else cache_folder() / "downloads")


def find(data_set: DataSet, folders: list[Path]) -> FoundFiles | Incomplete | None:
    """The first complete form of a data set, or else the first incomplete one."""
    incomplete = None
    for folder in (root / usual for root in folders for usual in data_set.folders):
        for form in data_set.forms:
            paths = [_present(folder, names) for names in form.files]
            there = tuple(path for path in paths if path is not None)
            if len(there) == len(paths):
                return FoundFiles(form, there)
            if there and incomplete is None:
                incomplete = Incomplete(folder, form.files[paths.index(None)][0])
    return incomplete


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write a file so that a reader, or a crash, sees all of it or nothing."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _present(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _existing(folder: Path, what: str) -> Path:
    if not folder.is_dir():
        raise InvalidInputError(f"{what} names {folder}, which is not a folder; correct the path")
    return folder


DIGESTS = "digests.json"
FORMAT = 2


class Cache:
    """The decoded copies of one data set."""

    def __init__(self, data_set: DataSet) -> None:
        self.folder = cache_folder() / "data" / data_set.name
        self._own = _name(data_set.digests)
        self._names = set(data_set.digests)

    def of_files(self, paths: Sequence[Path]) -> Arrays | None:
        """The copy that was decoded from these files as they are now."""
        with contextlib.suppress(Exception):  # a note may hold anything; the files are decoded then
            note = json.loads(_content(self._note(paths)))
            return self._open(self.folder / note["content"])
        return None

    def knows(self, paths: Sequence[Path]) -> bool:
        """Whether these files, as they are now, were decoded and checked before."""
        return self._note(paths).is_file()

    def of_published(self) -> Arrays | None:
        """A copy of the published content, wherever its files are now."""
        return self._open(self.folder / self._own)

    def keep(self, paths: Sequence[Path], arrays: Arrays, digests: Mapping[str, str]) -> Arrays:
        """Write a copy; without a writable folder the arrays stay in memory."""
        folder = self.folder / _name(digests)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, array in arrays.items():
                content = io.BytesIO()
                np.save(content, array, allow_pickle=False)
                write_atomically(folder / f"{name}.npy", content.getbuffer())
            layouts = {name: _layout(array) for name, array in arrays.items()}
            listing = {"digests": dict(digests), "layouts": layouts}
            write_atomically(folder / DIGESTS, json.dumps(listing).encode())
            note = self._note(paths)
            note.parent.mkdir(exist_ok=True)
            write_atomically(note, json.dumps({"content": folder.name}).encode())
        except OSError:
            return arrays
        return self._open(folder) or arrays

    def _open(self, folder: Path) -> Arrays | None:
        try:
            listing = json.loads(_content(folder / DIGESTS))
            digests, layouts = listing["digests"], listing["layouts"]
            if set(digests) != self._names or _name(digests) != folder.name:
                return None
            # Copy on write: tensors can share the pages, and nothing reaches the file.
            arrays: Arrays = {
                name: np.lib.format.open_memmap(_checked(folder / f"{name}.npy"), mode="c")
                for name in digests
            }
            # A digest is that of the values alone.
            whole = all(
                _layout(array) == layouts[name] and digest(array) == digests[name]
                for name, array in arrays.items()
            )
        except Exception:  # whatever is wrong with the copy, the files are decoded again
            return None
        return arrays if whole else None

    def _note(self, paths: Sequence[Path]) -> Path:
        files = [
            (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths
        ]
        key = hashlib.sha256(json.dumps([FORMAT, files]).encode()).hexdigest()[:32]
        return self.folder / "files" / f"{key}.json"


def _layout(array: Array) -> list[Any]:
    return [list(array.shape), array.dtype.str]


def _checked(path: Path) -> Path:
    """The same path if there is a file: to open a pipe would wait for ever."""
    if not path.is_file():
        raise FileNotFoundError(path)
    return path


def _content(path: Path) -> bytes:
    return _checked(path).read_bytes()


def _name(digests: Mapping[str, str]) -> str:
    text = json.dumps([FORMAT, sorted(digests.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


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
    return f"python -m reproduction data fetch {data_set.name}{where}"


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
