"""Downloading a data set: its sources in turn, until one gives the published content."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from dpsur.errors import InvalidInputError
from dpsur.tasks.datasets.base import DamagedFileError, DataSet, Source
from dpsur.tasks.datasets.download import Report, SourceError, fetch_file, part_of, silent
from dpsur.tasks.datasets.load import by_hand, read_found
from dpsur.tasks.datasets.store import FoundFiles, download_folder, find

Say = Callable[[str], None]


def fetch(
    data_set: DataSet, data_dir: Path | None = None, report: Report = silent, say: Say = print
) -> Path:
    """Bring a data set to the data folder unless it is there; return the folder of its files."""
    root = download_folder(data_dir)
    present = _present(data_set, root, say)
    if present is not None:
        say(f"{data_set.name} is in {present}")
        return present
    home = root / data_set.folders[0]
    _make(home)
    failures = []
    for source in data_set.sources:
        say(f"{data_set.name}: trying {source.label}")
        try:
            return _fetched(data_set, source, root, report)
        except (SourceError, DamagedFileError) as error:
            failures.append(f"{source.label}: {error}")
            say(f"  {error}")
    raise InvalidInputError(
        "\n  ".join([f"no source gave the data of {data_set.name}:", *failures])
        + f"\nby hand: {by_hand(data_set, data_dir)}, then check with: dpsur data list --check"
    )


def _present(data_set: DataSet, root: Path, say: Say) -> Path | None:
    """The folder of the files if they are all there, and right."""
    found = find(data_set, [root])
    if not isinstance(found, FoundFiles):
        return None
    try:
        read_found(data_set, found)
    except DamagedFileError as error:
        raise InvalidInputError(f"{error}; delete it and fetch again") from error
    except InvalidInputError as error:
        # Files of another data set with the same names; ours go into a subfolder.
        say(str(error))
        return None
    return found.folder


def _fetched(data_set: DataSet, source: Source, root: Path, report: Report) -> Path:
    """The folder of files that a source gave and that hold the published content."""
    home = root / data_set.folders[0]
    before = set(home.iterdir())
    _fetch_from(source, home, report)
    found = find(data_set, [root])
    try:
        if not isinstance(found, FoundFiles):
            raise SourceError("it does not hold all files")
        read_found(data_set, found)
    except (SourceError, DamagedFileError):
        for path in set(home.iterdir()) - before:
            path.unlink()
        raise
    # What a source began that then broke off, and another one brought in a package.
    for names in found.form.files:
        for name in names:
            part_of(home / name).unlink(missing_ok=True)
    return found.folder


def _fetch_from(source: Source, home: Path, report: Report) -> None:
    downloads = source.downloads()
    if source.unpack is None:
        for wanted in downloads:
            fetch_file(wanted, home, report)
        return
    for wanted in downloads:
        package = fetch_file(wanted, home, report)
        try:
            source.unpack(package, home)
        finally:
            package.unlink()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidInputError(
            f"the data folder {folder} cannot be written ({error.strerror}); "
            "choose another one with --data-dir"
        ) from error
