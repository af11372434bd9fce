"""Your records: arrays x and y, and optionally x_test and y_test, in a file of numpy's.

The shape of a record, the number of records and the number of classes are public. The number of
classes is declared, by the array `classes` of the file or by an option. Were it read off the
labels, one record with a new label would change the shape of what is released.
"""

import os
import zipfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpsur.errors import InvalidInputError
from dpsur.features import features_named, words
from dpsur.features.table import WORDS_DIMENSION
from dpsur.functional.records import Examples
from dpsur.networks import LEAST_IMAGE, for_vectors
from dpsur.tasks.base import (
    PIXELS,
    SCATTERING,
    VECTORS,
    WORD_ROWS,
    Task,
    kept,
    linear_heads,
    named_file,
)

Array = NDArray[Any]
Arrays = dict[str, Array]
PREFIX = "npz:"
KNOWN = ("x", "y", "x_test", "y_test", "classes")
# Labels above are numbers of something else, such as years or customers.
MOST_CLASSES = 100_000
# What a last axis of this length holds is mostly colours.
COLOURS = (1, 3, 4)
# Deflate makes no more of a byte than this; archives add a little.
MOST_EXPANSION, SLACK = 1032, 2**16
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
ENCRYPTED = 0x1
MOST_AXES = 16


def npz_task(name: str, classes: int | None = None) -> Task:
    """The task of a name `npz:FILE` with the declared number of classes.

    The file is read and checked here.
    """
    path = named_file(name)
    train, test, stored, texts = _records([path])
    classes = _declared(path, classes, stored)
    for examples, labels in ((train, "y"), (test, "y_test")):
        if examples is not None:
            _check_labels(path, labels, examples.targets, classes)
    return array_task(train, test, classes, name=name, texts=texts)


def array_task(
    train: Examples,
    test: Examples | None,
    classes: int,
    *,
    name: str = "",
    texts: bool = False,
    names: Sequence[str] = (),
) -> Task:
    """A task of records in memory. `texts` says that they are hashed words, `names` the classes."""
    shape = train.record_shape
    if not shape or len(shape) > 3:
        raise InvalidInputError(
            f"a record has the shape {shape}; there is a model for vectors and images: pass your "
            "own instead of auto"
        )
    if _channels_last(shape):
        raise InvalidInputError(
            f"a record has the shape {shape}, in which channels seem to come last; they come "
            "before height and width: pass x.transpose(0, 3, 1, 2), of a tensor "
            "x.permute(0, 3, 1, 2)"
        )
    known: dict[str, Any] = {"labels": list(names)} if names else {"classes": classes}
    if texts:  # of new records the same numbers can be made
        known["inputs"] = {"kind": "texts", "dimension": WORDS_DIMENSION}
    elif len(shape) == 3:
        known["inputs"] = {"kind": "images", "shape": list(shape)}
    on_words = {"name": "linear-head", "inputs": WORDS_DIMENSION, "classes": classes}
    return Task(
        name=name,
        networks={VECTORS: on_words} if texts else image_networks(shape, classes),
        load=lambda _: (train, test),
        public=known,
        records=len(train),
        shape=shape,
        classes=classes,
        kind=WORD_ROWS if texts else None,
    )


def npz_test_records(name: str) -> Examples | None:
    return _records([named_file(name)])[1]


@kept(1)
def _records(files: tuple[Path, ...]) -> tuple[Examples, Examples | None, int | None, bool]:
    """Training and test records, the classes that the file declares, and whether x holds texts."""
    (path,) = files
    arrays = read_file(path, "write it with np.savez(FILE, x=..., y=..., classes=...)")
    for name in ("x", "y"):
        if name not in arrays:
            raise InvalidInputError(
                f"{path} holds no array {name}; write np.savez(FILE, x=..., y=..., classes=...)"
            )
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise InvalidInputError(f"{path} must hold both x_test and y_test, or neither")
    train = _examples(path, arrays, "x", "y")
    test = _examples(path, arrays, "x_test", "y_test") if "x_test" in arrays else None
    if test is not None and test.inputs.shape[1:] != train.inputs.shape[1:]:
        raise InvalidInputError(
            f"{path}: records of x have the shape {tuple(train.inputs.shape[1:])}, "
            f"those of x_test {tuple(test.inputs.shape[1:])}; they must be the same"
        )
    classes = arrays.get("classes")
    if classes is not None and (classes.size != 1 or classes.dtype.kind not in "iu"):
        raise InvalidInputError(f"the array classes of {path} must be a single whole number")
    stored = None if classes is None else int(classes.item())
    return train, test, stored, arrays["x"].dtype.kind == "U"


def read_file(path: Path, remedy: str) -> Arrays:
    """The arrays of a user's file; its words are shown to the user alone."""
    try:
        with path.open("rb") as file:
            return read_arrays(path, file, KNOWN)
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read ({error.strerror})") from None
    except DamagedFileError as error:
        if error.detail is None:
            raise InvalidInputError(f"{path} {error.reason}; {remedy}") from None
        raise InvalidInputError(
            f"{path} is damaged, or not a file of np.savez; {remedy}", private=error.detail
        ) from None


def _examples(path: Path, arrays: Arrays, x: str, y: str) -> Examples:
    inputs, labels = _inputs(path, arrays[x], x), arrays[y]
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise InvalidInputError(
            f"the array {y} of {path} must hold one whole number for each record, the class from "
            f"0 on; it has the shape {labels.shape} and the type {labels.dtype}"
        )
    if len(inputs) != len(labels):
        raise InvalidInputError(
            f"{path} holds {len(inputs)} records in {x} but {len(labels)} labels in {y}"
        )
    # Before the change of type, in which a large number would become another one.
    _check_labels(path, y, labels, MOST_CLASSES)
    return Examples(inputs, torch.from_numpy(labels.astype(np.int64)))


def _check_labels(path: Path, name: str, labels: Any, classes: int) -> None:
    """Refuse labels beyond the classes, without saying in public which ones there are."""
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise InvalidInputError(
            f"the array {name} of {path} holds a label that is not in 0 to {classes - 1}; number "
            "the classes 0, 1, 2 and so on, as np.unique(y, return_inverse=True) does, or declare "
            "more classes",
            private=f"the labels in {name} of {path} run from {low} to {high}",
        )


def _inputs(path: Path, array: Array, name: str) -> torch.Tensor:
    """Records as float32. Bytes of images are scaled to [0, 1], other numbers stay as they are."""
    if array.dtype.kind == "U" and array.ndim == 1 and len(array):
        return words(array.tolist())
    if array.dtype.kind not in "buif":
        raise InvalidInputError(
            f"the array {name} of {path} is of type {array.dtype}; it must hold real numbers, or "
            "texts of shape (n,)"
        )
    if array.ndim not in (2, 3, 4) or 0 in array.shape:
        raise InvalidInputError(
            f"the array {name} of {path} has the shape {array.shape}; it must be (n, width), "
            "(n, height, width) or (n, channels, height, width)"
        )
    if _channels_last(array.shape[1:]):
        raise InvalidInputError(
            f"the array {name} of {path} has the shape {array.shape}, in which channels seem to "
            "come last; they come before height and width: save x.transpose(0, 3, 1, 2)"
        )
    with np.errstate(over="ignore"):
        values = array.astype(np.float32)
    if not np.isfinite(values).all():
        wrong = ~np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        raise InvalidInputError(
            f"the array {name} of {path} holds NaN, infinity or numbers beyond float32; clean or "
            "impute them first",
            private=f"{int(wrong.sum())} records of {name}, first number {int(wrong.argmax())}",
            code="not-finite",
        )
    inputs = torch.from_numpy(values)
    if array.ndim == 2:
        return inputs
    if array.dtype == np.uint8:
        inputs.div_(255)
    return inputs if array.ndim == 4 else inputs.unsqueeze(1)


def _channels_last(shape: tuple[int, ...]) -> bool:
    """Whether a record looks like an image with its colours in the last axis."""
    if len(shape) != 3 or shape[0] in COLOURS:
        return False
    return shape[2] in COLOURS and min(shape[:2]) >= LEAST_IMAGE


def _declared(path: Path, given: int | None, stored: int | None) -> int:
    if given is None and stored is None:
        raise InvalidInputError(
            f"{path} does not say how many classes there are, and the labels are private: declare "
            "the number with --classes K, or save it in the file: np.savez(FILE, x=..., y=..., "
            "classes=K)"
        )
    if None not in (given, stored) and given != stored:
        raise InvalidInputError(
            f"classes {given} contradicts {path}, which declares {stored} classes; leave one out"
        )
    classes = stored if given is None else given
    if not isinstance(classes, int) or not 2 <= classes <= MOST_CLASSES:
        raise InvalidInputError(
            f"classes must be a whole number from 2 to {MOST_CLASSES}, got {classes}"
        )
    return classes


def image_networks(shape: tuple[int, ...], classes: int) -> dict[str, dict[str, Any]]:
    """Networks for images, and for other arrays of numbers, by the features that they take."""
    features = PIXELS if len(shape) == 3 else VECTORS
    if len(shape) == 3 and min(shape[1:]) >= LEAST_IMAGE:
        channels, height, width = shape
        sides = {"channels": channels, "height": height, "width": width}
        networks = {features: {"name": "small-cnn", **sides, "classes": classes}}
        if scattered := _scattering_shape(shape):
            sides = dict(zip(("channels", "height", "width"), scattered, strict=True))
            networks[SCATTERING] = {"name": "linear-features", **sides, "classes": classes}
        return networks | linear_heads(shape, classes)
    return {features: for_vectors(prod(shape), classes)}


# Known by trying it on a blank image, which takes a while for a large one.
@lru_cache(maxsize=8)
def _scattering_shape(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    try:
        return features_named(SCATTERING).output_shape(shape)
    except InvalidInputError:
        return None


class DamagedFileError(Exception):
    """A file that is damaged or not what it should be. Callers add the remedy.

    `reason` is in words of this package. `detail` is what a decoder said, which may quote the file:
    where that is private, `reason` alone is shown.
    """

    def __init__(self, path: Path, reason: str, detail: str | None = None) -> None:
        super().__init__(f"{path} {reason}" + ("" if detail is None else f" ({detail})"))
        self.reason = reason
        self.detail = detail


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
            check_member(path, info, name, size)
            arrays[name] = _array(path, archive, info, name)
        return arrays


def check_member(path: Path, info: zipfile.ZipInfo, name: str, size: int) -> None:
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
