"""What a public data set is: published files in one of several forms, and the arrays in them."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsur.tasks.datasets.download import Download

Array = NDArray[Any]
Arrays = dict[str, Array]


class DamagedFileError(Exception):
    """A file that is not what was published. Callers add the remedy.

    `reason` is in words of this package. `detail` is what a decoder said, which may quote the file:
    where that is private, `reason` alone is shown.
    """

    def __init__(self, path: Path, reason: str, detail: str | None = None) -> None:
        super().__init__(f"{path} {reason}" + ("" if detail is None else f" ({detail})"))
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Piece:
    """One decoded array and the file it came from, to be named if the array is wrong."""

    name: str
    path: Path
    array: Array


@dataclass(frozen=True)
class Form:
    """Files that hold a whole data set. Each is given by the names it may have."""

    files: tuple[tuple[str, ...], ...]
    read: Callable[[Sequence[Path]], list[Piece]]


@dataclass(frozen=True)
class Source:
    """One place that offers a data set.

    `unpack` turns a downloaded package into files of a form; without it the downloads are the files
    themselves. `downloads` may ask a registry where the package is.
    """

    label: str
    downloads: Callable[[], Sequence[Download]]
    unpack: Callable[[Path, Path], None] | None = None


@dataclass(frozen=True)
class DataSet:
    """A public data set: its content by checksum, its forms on disk, and where it is offered.

    `folders` are the subfolders of a data folder to look into; the first is where downloads go.
    `digests` are the SHA-256 of the bytes of each decoded array. `trusted_files` are the SHA-256 of
    published files that are taken at their word, whatever the arrays in them.
    """

    name: str
    title: str
    records: tuple[int, int]
    terms: str
    folders: tuple[str, ...]
    forms: tuple[Form, ...]
    digests: Mapping[str, str]
    sources: tuple[Source, ...]
    by_hand: str
    trusted_files: frozenset[str] = field(default_factory=frozenset)


def digest(array: Array) -> str:
    """SHA-256 of an array's values in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
