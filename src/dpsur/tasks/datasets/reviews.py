"""The forms of the IMDb reviews: Keras's file, and the same content as plain arrays."""

import io
import tokenize
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from dpsur.tasks.datasets.base import Array, Arrays, DamagedFileError, Form, Piece
from dpsur.tasks.datasets.containers import read_arrays, unpacked, zip_members
from dpsur.tasks.datasets.plain_values import as_array, read_plain_values

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
