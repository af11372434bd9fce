"""Where data sets are looked for and kept, and files that are whole or absent."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dpsur.cache_folder import cache_folder
from dpsur.errors import InvalidInputError
from dpsur.tasks.datasets.base import DataSet, Form

DATA_VARIABLE = "DPSUR_DATA"


@dataclass(frozen=True)
class Found:
    """The files of a data set, in one of its forms."""

    form: Form
    paths: tuple[Path, ...]

    @property
    def folder(self) -> Path:
        """Where they are."""
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


def find(data_set: DataSet, folders: list[Path]) -> Found | Incomplete | None:
    """The first complete form of a data set, or else the first incomplete one."""
    incomplete = None
    for folder in (root / usual for root in folders for usual in data_set.folders):
        for form in data_set.forms:
            paths = [_present(folder, names) for names in form.files]
            there = tuple(path for path in paths if path is not None)
            if len(there) == len(paths):
                return Found(form, there)
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
