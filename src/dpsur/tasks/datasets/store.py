"""Where data sets are found and kept: downloaded files, and decoded arrays."""

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
from dpsur.tasks.datasets.base import Array, Arrays, DataSet, Form, digest

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
