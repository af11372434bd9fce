"""IDX: the form in which MNIST and Fashion-MNIST are published, gzipped or plain."""

from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np

from dpsur.tasks.datasets.base import Array, DamagedFileError, Form, Piece
from dpsur.tasks.datasets.containers import in_threads, unpacked

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
