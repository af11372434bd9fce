"""The file formats of the public data sets: IDX, CIFAR batches, Keras reviews."""

import io
import tokenize
from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from dpsur.tasks.datasets.archives import (
    in_threads,
    read_arrays,
    tar_members,
    unpacked,
    zip_members,
)
from dpsur.tasks.datasets.base import Array, Arrays, DamagedFileError, Form, Piece
from dpsur.tasks.datasets.plain_values import as_array, read_plain_values

SIDE = 28
UINT8 = 0x08
# file -> array, and how many axes it has
FILES = {
    "train-images-idx3-ubyte": ("train_images", 3),
    "train-labels-idx1-ubyte": ("train_labels", 1),
    "t10k-images-idx3-ubyte": ("test_images", 3),
    "t10k-labels-idx1-ubyte": ("test_labels", 1),
}


def read_idx(path: Path, axes: int) -> Array:
    """An IDX file of bytes: images of 28 x 28 (three axes) or labels (one axis)."""
    content = unpacked(path)
    header = 4 * (1 + axes)
    if len(content) < header or content[:4] != bytes((0, 0, UINT8, axes)):
        what = "images" if axes == 3 else "labels"
        raise DamagedFileError(path, f"is not an IDX file of {what}")
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", count=axes, offset=4))
    if shape[1:] not in {(), (SIDE, SIDE)}:
        raise DamagedFileError(path, f"holds images of the shape {shape[1:]}, not 28 x 28")
    if len(content) != header + prod(shape):
        raise DamagedFileError(
            path, f"is incomplete: {len(content)} bytes decoded of {header + prod(shape)}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _read(paths: Sequence[Path]) -> list[Piece]:
    kinds = list(FILES.values())
    arrays = in_threads(lambda i: read_idx(paths[i], kinds[i][1]), range(len(paths)))
    return [
        Piece(name, path, array)
        for (name, _), path, array in zip(kinds, paths, arrays, strict=True)
    ]


IDX_FILES = Form(tuple((f"{name}.gz", name) for name in FILES), _read)


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
    return _batch_pieces(paths, arrays)


def _read_python(paths: Sequence[Path]) -> list[Piece]:
    return _batch_pieces(paths, [_python(path, unpacked(path)) for path in paths])


def _read_binary_archive(paths: Sequence[Path]) -> list[Piece]:
    (path,) = paths
    files = tar_members(path, [f"{name}.bin" for name in BATCHES])
    return _batch_pieces([path] * 6, [_binary(path, files[f"{name}.bin"]) for name in BATCHES])


def _read_python_archive(paths: Sequence[Path]) -> list[Piece]:
    (path,) = paths
    files: Mapping[str, bytes] = tar_members(path, BATCHES)
    return _batch_pieces([path] * 6, [_python(path, files[name]) for name in BATCHES])


def _batch_pieces(paths: Sequence[Path], arrays: Sequence[Array]) -> list[Piece]:
    return [Piece(*piece) for piece in zip(BATCHES, paths, arrays, strict=True)]


BINARY = Form(
    tuple((f"{name}.bin", f"{name}.bin.xz", f"{name}.bin.gz") for name in BATCHES), _read_binary
)
BINARY_TAR = Form(((BINARY_ARCHIVE,),), _read_binary_archive)
PYTHON = Form(tuple((name,) for name in BATCHES), _read_python)
PYTHON_TAR = Form(((PYTHON_ARCHIVE,),), _read_python_archive)


PARTS = ("train", "test")
# All reviews of a part, one after the other; review i is tokens[offsets[i] : offsets[i + 1]].
ARRAYS = tuple(f"{part}_{what}" for part in PARTS for what in ("tokens", "offsets", "labels"))


def _read_keras(paths: Sequence[Path]) -> list[Piece]:
    (path,) = paths
    try:
        files = zip_members(path, [f"{what}_{part}.npy" for part in PARTS for what in "xy"])
        arrays = _of_part(files, "train") | _of_part(files, "test")
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise DamagedFileError(path, "is not Keras's file of reviews", str(error)) from error
    return _pieces(path, arrays)


def _of_part(files: Mapping[str, bytes], part: str) -> Arrays:
    reviews = _objects(files[f"x_{part}.npy"])
    labels = np.load(io.BytesIO(files[f"y_{part}.npy"]), allow_pickle=False)
    if len(labels) != len(reviews) or not np.isin(labels, (0, 1)).all():
        raise ValueError(f"y_{part} does not hold a label 0 or 1 for each review")
    lengths = np.fromiter(map(len, reviews), np.int64, len(reviews))
    return {
        f"{part}_tokens": np.fromiter(chain.from_iterable(reviews), np.int32, lengths.sum()),
        f"{part}_offsets": np.concatenate(([0], lengths.cumsum())),
        f"{part}_labels": labels.astype(np.uint8),
    }


def _objects(content: bytes) -> Array:
    """An array of lists. numpy would unpickle it, which may run code; this reader runs none."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"an array in format {version}")
    try:
        np.lib.format.read_array_header_1_0(file)
    except tokenize.TokenError as error:  # of numpy, for brackets that are not closed
        raise ValueError("an array with a broken header") from error
    return as_array(read_plain_values(file.read()))


def _read_plain(paths: Sequence[Path]) -> list[Piece]:
    (path,) = paths
    content = unpacked(path)
    arrays = read_arrays(path, io.BytesIO(content), ARRAYS)
    for name in ARRAYS:
        if name not in arrays:
            raise DamagedFileError(path, f"is no file of reviews (there is no array {name})")
        # The checksum is one of bytes: it does not tell shapes and types apart.
        kind = arrays[name].dtype
        if arrays[name].ndim != 1 or kind.kind not in "iu" or not kind.isnative:
            raise DamagedFileError(path, f"is no file of reviews ({name} is no list of numbers)")
    return _pieces(path, arrays)


def _pieces(path: Path, arrays: Arrays) -> list[Piece]:
    return [Piece(name, path, arrays[name]) for name in ARRAYS]


KERAS = Form((("imdb.npz",),), _read_keras)
PLAIN = Form((("imdb_keras.npz.xz", "imdb_keras.npz"),), _read_plain)
