"""The forms in which CIFAR-10 is published: binary and python version, unpacked or archived.

Whatever the form, a batch becomes the records of the binary version: a label, then 1024 red, 1024
green and 1024 blue values. So one checksum per batch serves all forms.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpsur.tasks.datasets.base import Array, DamagedFileError, Form, Piece
from dpsur.tasks.datasets.containers import in_threads, tar_members, unpacked
from dpsur.tasks.datasets.plain_values import as_array, read_plain_values

BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
RECORDS, PIXELS = 10_000, 3 * 32 * 32
BINARY_ARCHIVE, PYTHON_ARCHIVE = "cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"


def join_records(labels: Any, pixels: Array) -> Array:
    """Records of the binary version out of labels and pixels."""
    records = np.empty((RECORDS, 1 + PIXELS), np.uint8)
    records[:, 0] = labels
    records[:, 1:] = pixels.reshape(RECORDS, PIXELS)
    return records


def _binary(path: Path, content: bytes) -> Array:
    expected = RECORDS * (1 + PIXELS)
    if len(content) != expected:
        raise DamagedFileError(path, f"is incomplete: {len(content)} bytes decoded of {expected}")
    return np.frombuffer(content, np.uint8).reshape(RECORDS, 1 + PIXELS)


def _python(path: Path, content: bytes) -> Array:
    try:
        batch = read_plain_values(content)
        return join_records(batch["labels"], as_array(batch["data"]))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise DamagedFileError(path, "is no batch of CIFAR-10", str(error)) from error


def _read_binary(paths: Sequence[Path]) -> list[Piece]:
    arrays = in_threads(lambda path: _binary(path, unpacked(path)), paths)
    return _pieces(paths, arrays)


def _read_python(paths: Sequence[Path]) -> list[Piece]:
    return _pieces(paths, [_python(path, unpacked(path)) for path in paths])


def _read_binary_archive(paths: Sequence[Path]) -> list[Piece]:
    (path,) = paths
    files = tar_members(path, [f"{name}.bin" for name in BATCHES])
    return _pieces([path] * 6, [_binary(path, files[f"{name}.bin"]) for name in BATCHES])


def _read_python_archive(paths: Sequence[Path]) -> list[Piece]:
    (path,) = paths
    files: Mapping[str, bytes] = tar_members(path, BATCHES)
    return _pieces([path] * 6, [_python(path, files[name]) for name in BATCHES])


def _pieces(paths: Sequence[Path], arrays: Sequence[Array]) -> list[Piece]:
    return [Piece(*piece) for piece in zip(BATCHES, paths, arrays, strict=True)]


BINARY = Form(
    tuple((f"{name}.bin", f"{name}.bin.xz", f"{name}.bin.gz") for name in BATCHES), _read_binary
)
BINARY_TAR = Form(((BINARY_ARCHIVE,),), _read_binary_archive)
PYTHON = Form(tuple((name,) for name in BATCHES), _read_python)
PYTHON_TAR = Form(((PYTHON_ARCHIVE,),), _read_python_archive)
