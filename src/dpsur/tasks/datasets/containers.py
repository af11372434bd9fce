"""Bytes out of compressed files and archives. Nothing is written to a path an archive chooses."""

import gzip
import io
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TypeVar

from dpsur.tasks.datasets.base import DamagedFileError

GZIP, XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"
AR, AR_HEADER = b"!<arch>\n", 60
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile)

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn whatever a decoder says about broken bytes into one error that names the file."""
    try:
        yield
    except PermissionError as error:
        raise DamagedFileError(path, "cannot be opened (permission denied)") from error
    except UNREADABLE as error:
        raise DamagedFileError(path, f"is damaged or incomplete ({error})") from error


def unpacked(path: Path) -> bytes:
    """The content of a plain, gzip or xz file, told apart by their first bytes, not by name."""
    with readable(path):
        content = path.read_bytes()
        if content.startswith(GZIP):
            return gzip.decompress(content)
        if content.startswith(XZ):
            return lzma.decompress(content)
        return content


def tar_members(path: Path, names: Collection[str]) -> dict[str, bytes]:
    """The named files of a tar archive, in whatever folder of it they are."""
    with readable(path), tarfile.open(path) as archive:
        return _required(path, names, _tar_files(archive))


def zip_members(path: Path, names: Collection[str]) -> dict[str, bytes]:
    """The named files of a zip archive, in whatever folder of it they are."""
    with readable(path), zipfile.ZipFile(path) as archive:
        found = ((name, lambda name=name: archive.read(name)) for name in archive.namelist())
        return _required(path, names, found)


def deb_members(path: Path, names: Collection[str]) -> dict[str, bytes]:
    """The named files of a Debian package: an `ar` archive around a tar archive."""
    with readable(path):
        inner = io.BytesIO(_ar_member(path, "data.tar"))
        with tarfile.open(fileobj=inner) as archive:
            return _required(path, names, _tar_files(archive))


def in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Apply to every item; decompressors let other threads run meanwhile."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(work, items))


def _tar_files(archive: tarfile.TarFile) -> Iterator[tuple[str, Callable[[], bytes]]]:
    for member in archive:
        file = archive.extractfile(member)
        if file is not None:
            yield member.name, file.read


def _required(
    path: Path, names: Collection[str], files: Iterable[tuple[str, Callable[[], bytes]]]
) -> dict[str, bytes]:
    contents = {}
    for full_name, read in files:
        name = PurePosixPath(full_name).name
        if name in names:
            contents[name] = read()
    for name in names:
        if name not in contents:
            raise DamagedFileError(path, f"holds no file {name}")
    return contents


def _ar_member(path: Path, prefix: str) -> bytes:
    content = path.read_bytes()
    position = len(AR)
    while content.startswith(AR) and position + AR_HEADER <= len(content):
        name = content[position : position + 16].decode("latin-1")
        length = content[position + 48 : position + 58].strip()
        if not length.isdigit():
            break
        start = position + AR_HEADER
        if name.startswith(prefix):
            return content[start : start + int(length)]
        # Members begin at even positions.
        position = start + int(length) + int(length) % 2
    raise DamagedFileError(path, f"is not a Debian package, or holds no {prefix}")
