"""Bytes and arrays out of compressed files and archives, from anywhere.

Nothing is written to a path an archive chooses, nothing is unpickled, and no claim about a size is
believed before it is compared with the size of the file.
"""

import gzip
import lzma
import os
import tarfile
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, TypeVar

import numpy as np

from dpsur.errors import InvalidInputError
from dpsur.tasks.datasets.base import Array, Arrays, DamagedFileError

GZIP, XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"
# No file of a published data set is nearly as large.
LARGEST_FILE = 2**30
# Deflate makes no more of a byte than this; archives add a little.
MOST_EXPANSION, SLACK = 1032, 2**16
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
ENCRYPTED = 0x1
MOST_AXES = 16

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn whatever a decoder says about broken bytes into one error that names the file."""
    try:
        yield
    except (DamagedFileError, InvalidInputError):
        raise
    except PermissionError as error:
        raise DamagedFileError(path, "cannot be opened (permission denied)") from error
    except Exception as error:  # decoders raise anything about bytes that nobody wrote on purpose
        detail = " ".join(str(error).split()) or type(error).__name__
        raise DamagedFileError(path, "is damaged or incomplete", detail) from error


def unpacked(path: Path) -> bytes:
    """The content of a plain, gzip or xz file, told apart by their first bytes, not by name."""
    with readable(path), path.open("rb") as file:
        start = file.read(len(XZ))
        file.seek(0)
        if start.startswith(GZIP):
            return _limited(path, gzip.GzipFile(fileobj=file))
        if start.startswith(XZ):
            return _limited(path, lzma.LZMAFile(file))
        return _limited(path, file)


def read_arrays(path: Path, file: IO[bytes], known: Collection[str]) -> Arrays:
    """The arrays of a file of np.savez: plain numbers or texts under known names, or an error."""
    with readable(path), zipfile.ZipFile(file) as archive:
        size, arrays = file.seek(0, os.SEEK_END), {}
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name not in known or name == info.filename:
                raise DamagedFileError(
                    path, f"holds an array {name!r}; the known ones are {', '.join(known)}"
                )
            if name in arrays:
                raise DamagedFileError(path, f"holds the array {name} twice")
            _check_member(path, info, name, size)
            arrays[name] = _array(path, archive, info, name)
        return arrays


def tar_members(path: Path, names: Collection[str]) -> dict[str, bytes]:
    """The named files of a tar archive, in whatever folder of it they are."""
    with readable(path), tarfile.open(path) as archive:
        return required_files(path, names, files_in_tar(path, archive))


def zip_members(path: Path, names: Collection[str]) -> dict[str, bytes]:
    """The named files of a zip archive, in whatever folder of it they are."""
    with readable(path), zipfile.ZipFile(path) as archive:
        size = path.stat().st_size

        def read(info: zipfile.ZipInfo) -> Callable[[], bytes]:
            def content() -> bytes:
                _check_member(path, info, info.filename, size)
                return archive.read(info)

            return content

        found = ((info.filename, read(info)) for info in archive.infolist())
        return required_files(path, names, found)


def in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Apply to every item; decompressors let other threads run meanwhile."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(work, items))


def _limited(path: Path, file: BinaryIO | gzip.GzipFile | lzma.LZMAFile) -> bytes:
    content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise DamagedFileError(path, f"holds more than {LARGEST_FILE} bytes")
    return content


def _check_member(path: Path, info: zipfile.ZipInfo, name: str, size: int) -> None:
    """Refuse what cannot be read, and claims that a file of this size cannot keep."""
    if info.flag_bits & ENCRYPTED:
        raise DamagedFileError(path, f"is encrypted ({name})")
    if info.compress_type not in COMPRESSIONS:
        raise DamagedFileError(path, f"is compressed in an unknown way ({name})")
    possible = MOST_EXPANSION * min(info.compress_size, size) + SLACK
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if info.file_size > possible:
        raise DamagedFileError(path, f"claims a size that its bytes cannot have ({name})")
    if info.file_size > memory:
        raise DamagedFileError(path, f"does not fit into the memory of this machine ({name})")


def _array(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> Array:
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        readers = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        shape, fortran, kind = readers[version](member)
        if kind.hasobject:
            raise DamagedFileError(path, f"holds Python objects in the array {name}")
        if len(shape) > MOST_AXES or any(length < 0 for length in shape):
            raise DamagedFileError(path, f"has an impossible shape in the array {name}")
        if prod(shape) * kind.itemsize != info.file_size - member.tell():
            raise DamagedFileError(path, f"has a shape that its bytes do not fill ({name})")
        content = member.read()  # all of it, so that its checksum is compared
    array = np.frombuffer(content, kind) if content else np.empty(0, kind)
    return array.reshape(shape, order="F" if fortran else "C")


def files_in_tar(path: Path, archive: tarfile.TarFile) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """The plain files of a tar archive, each with a function that reads it."""

    def read(member: tarfile.TarInfo) -> Callable[[], bytes]:
        def content() -> bytes:
            # A link may lead nowhere or in a circle, and no published archive has one here.
            if not member.isreg() or member.issparse() or member.size > LARGEST_FILE:
                raise DamagedFileError(path, f"holds {member.name!r}, but not as a plain file")
            file = archive.extractfile(member)
            assert file is not None
            return file.read()

        return content

    for member in archive:
        if not member.isdir():
            yield member.name, read(member)


def required_files(
    path: Path, names: Collection[str], files: Iterable[tuple[str, Callable[[], bytes]]]
) -> dict[str, bytes]:
    """The named files among these; an error says which is missing."""
    contents = {}
    for full_name, read in files:
        name = PurePosixPath(full_name).name
        if name in names:
            contents[name] = read()
    for name in names:
        if name not in contents:
            raise DamagedFileError(path, f"holds no file {name}")
    return contents
