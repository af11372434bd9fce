"""Decoded data sets on disk, to be mapped into memory instead of decoded again.

A decoded copy is kept by its content. Beside it stands which files it was decoded from, by path,
size and time of change: a file that changes is decoded, and checked, again. The copy is checked
against its own checksums whenever it is opened, so losing or damaging it costs time, never
correctness.
"""

import contextlib
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpsur.cache_folder import cache_folder
from dpsur.tasks.datasets.base import Array, Arrays, DataSet, digest
from dpsur.tasks.datasets.files import write_atomically

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
