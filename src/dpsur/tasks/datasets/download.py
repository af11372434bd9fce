"""Files over HTTP: checked against a checksum, and continued where a transfer broke off."""

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dpsur.errors import DpsurError

TIMEOUT = 30.0
BLOCK = 1 << 18
# A transfer that breaks off is continued this often without a single new byte, then given up.
PATIENCE = 3
RANGE_NOT_SATISFIABLE, PARTIAL_CONTENT = 416, 206

# file, bytes so far, bytes in all where known
Report = Callable[[str, int, int | None], None]


class SourceError(DpsurError):
    """A source that does not answer, or answers with something else. The next one is tried."""


@dataclass(frozen=True)
class Download:
    """A file to fetch. `checksum` is written `sha256:...` or `md5:...`."""

    url: str
    file: str
    checksum: str


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
