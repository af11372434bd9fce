"""Readers of the published forms of data sets, safe for bytes from anywhere.

Three layers: files out of compressed files and archives; plain values out of pickles, of which
nothing is executed; and the forms themselves (IDX, batches of CIFAR-10, reviews of Keras). Nothing
is written to a path that an archive chooses, and no claim about a size is believed before it is
compared with the size of the file.
"""

import gzip
import io
import lzma
import os
import pickletools
import tarfile
import tokenize
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from dpsur.tasks.npz import (
    Array,
    Arrays,
    DamagedFileError,
    check_member,
    read_arrays,
    readable,
)


@dataclass(frozen=True)
class Piece:
    """One decoded array and the file it came from, to be named if the array is wrong."""

    name: str
    path: Path
    array: Array


@dataclass(frozen=True)
class Form:
    """Files that hold a whole data set. Each is given by the names it may have."""

    files: tuple[tuple[str, ...], ...]
    read: Callable[[Sequence[Path]], list[Piece]]


GZIP, XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"
# No file of a published data set is nearly as large.
LARGEST_FILE = 2**30

Item = TypeVar("Item")
Result = TypeVar("Result")


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


def tar_members(path: Path, names: Collection[str]) -> dict[str, bytes]:
    """The named files of a tar archive, in any folder of it."""
    with readable(path), tarfile.open(path) as archive:
        return required_files(path, names, files_in_tar(path, archive))


def zip_members(path: Path, names: Collection[str]) -> dict[str, bytes]:
    """The named files of a zip archive, in any folder of it."""
    with readable(path), zipfile.ZipFile(path) as archive:
        size = path.stat().st_size

        def read(info: zipfile.ZipInfo) -> Callable[[], bytes]:
            def content() -> bytes:
                check_member(path, info, info.filename, size)
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


ARRAY = {"numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"}
NAMES = {*ARRAY, "numpy ndarray", "numpy dtype"}
OBJECT = "O"

PUSH_ARGUMENT = {
    "BININT", "BININT1", "BININT2", "LONG1",
    "BINBYTES", "SHORT_BINBYTES", "BINSTRING", "SHORT_BINSTRING",
    "BINUNICODE", "SHORT_BINUNICODE",
}  # fmt: skip
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
IGNORED = {"PROTO", "FRAME", "STOP"}
# A dict of arrays of lists is five deep. Hashing tuples in tuples, thousands deep, ends the
# process.
DEEPEST = 8
# What may be used twice. A container could be put into itself.
SHARED = (str, bytes, int, type(None))
KEYS = (str, bytes)


@dataclass
class PickledObject:
    """A thing that the file describes by a name, arguments and a state. It is never made."""

    name: str
    arguments: Any
    state: Any = None


def read_plain_values(content: bytes) -> Any:
    """The value that the instructions describe; ValueError for anything but plain values."""
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(content):
            # Nearly all of the instructions: numbers in lists.
            if opcode.name in PUSH_ARGUMENT:
                machine.stack.append(argument)
            else:
                machine.follow(opcode.name, argument)
        (value,) = machine.stack
    except (LookupError, TypeError, AttributeError, ArithmeticError, MemoryError) as error:
        raise ValueError(f"broken instructions ({type(error).__name__})") from error
    return value


def as_array(value: Any) -> NDArray[Any]:
    """The numpy array that a value describes: of bytes, or one-dimensional of Python objects."""
    if not isinstance(value, PickledObject) or value.name not in ARRAY:
        raise ValueError("no numpy array where one was expected")
    try:
        _, shape, kind, fortran, payload = value.state
        code = kind.arguments[0]
        whole = isinstance(shape, tuple) and all(isinstance(length, int) for length in shape)
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise ValueError("an incomplete numpy array") from error
    if not whole or not isinstance(code, str):
        raise ValueError("an incomplete numpy array")
    if fortran:
        raise ValueError("a numpy array in Fortran order")
    if code.startswith(OBJECT) and isinstance(payload, list):
        return np.fromiter(payload, object, len(payload)).reshape(shape)
    if code in {"u1", "|u1"} and isinstance(payload, (str, bytes)):
        # A text is how Python 2 wrote bytes.
        raw = payload.encode("latin-1") if isinstance(payload, str) else payload
        return np.frombuffer(raw, dtype=np.uint8).reshape(shape)
    raise ValueError(f"a numpy array of kind {code!r}")


class _Machine:
    """The stack and the memory that instructions work on."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memory: dict[int, Any] = {}

    def follow(self, instruction: str, argument: Any) -> None:
        stack = self.stack
        match instruction:
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "MARK":
                self._marks.append(len(stack))
            case "BINPUT" | "LONG_BINPUT":
                self._memory[argument] = stack[-1]
            case "MEMOIZE":
                self._memory[len(self._memory)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._shared(argument))
            case "APPEND" | "APPENDS":
                items = self._since_mark() if instruction == "APPENDS" else self._top(1)
                _check_depth(items)
                stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                items = self._since_mark() if instruction == "SETITEMS" else self._top(2)
                _check_depth(items)
                stack[-1].update(zip(_texts(items[::2]), items[1::2], strict=True))
            case "TUPLE":
                stack.append(_tuple(self._since_mark()))
            case _ if instruction in TUPLES:
                stack.append(_tuple(self._top(TUPLES[instruction])))
            case _ if instruction in CONSTANTS:
                stack.append(CONSTANTS[instruction])
            case _ if instruction not in IGNORED:
                self._describe(instruction, argument)

    def _describe(self, instruction: str, argument: Any) -> None:
        stack = self.stack
        match instruction:
            case "GLOBAL":
                stack.append(_allowed(argument))
            case "STACK_GLOBAL":
                stack.append(_allowed(" ".join(_texts(self._top(2)))))
            case "REDUCE":
                name, arguments = self._top(2)
                _check_depth([arguments])
                stack.append(PickledObject(_allowed(name), arguments))
            case "BUILD":
                described, state = self._top(2)
                if not isinstance(described, PickledObject) or described.state is not None:
                    raise ValueError("a state for something that has none, or has one already")
                _check_depth([state])
                described.state = state
                stack.append(described)
            case _:
                raise ValueError(f"the instruction {instruction}, which plain values do not need")

    def _shared(self, place: int) -> Any:
        value = self._memory[place]
        if not isinstance(value, SHARED):
            raise ValueError("a value that is used twice and is neither a text nor a number")
        return value

    def _since_mark(self) -> list[Any]:
        return self._cut(self._marks.pop())

    def _top(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError("the stack is too short")
        return self._cut(len(self.stack) - count)

    def _cut(self, start: int) -> list[Any]:
        items = self.stack[start:]
        del self.stack[start:]
        return items


def _tuple(items: list[Any]) -> tuple[Any, ...]:
    _check_depth(items)
    return tuple(items)


def _check_depth(items: list[Any], depth: int = 1) -> None:
    """Refuse what would be nested too deep inside a container of these items.

    A container is filled before it is put into another one, so its depth does not grow later.
    """
    if depth >= DEEPEST:
        raise ValueError(f"values that are nested more than {DEEPEST} deep")
    # Most containers hold numbers only, which the set of their types tells in no time.
    if not {list, tuple, dict, PickledObject}.isdisjoint(map(type, items)):
        for item in items:
            if isinstance(item, PickledObject):
                _check_depth([item.arguments, item.state], depth + 1)
            elif isinstance(item, dict):
                _check_depth(list(item.values()), depth + 1)
            elif isinstance(item, (list, tuple)):
                _check_depth(list(item), depth + 1)


def _texts(values: list[Any]) -> list[Any]:
    for value in values:
        if not isinstance(value, KEYS):
            raise ValueError(f"a {type(value).__name__} in the place of a text")
    return values


def _allowed(name: Any) -> str:
    if not isinstance(name, str) or name not in NAMES:
        shown = f" {name[:80]!r}" if isinstance(name, str) else ""
        raise ValueError(f"the name{shown}, which no data set needs")
    return name


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
