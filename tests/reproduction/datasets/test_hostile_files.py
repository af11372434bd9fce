"""Odd archives and batches are refused in one line: no crash, no huge allocation, no traceback."""

import io
import pickle
import struct
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile

import numpy as np
import pytest

from dpsur.errors import InvalidInputError
from dpsur.tasks import task_named
from dpsur.tasks.npz import DamagedFileError, read_arrays
from reproduction import mirrors
from reproduction.datasets import load_arrays
from reproduction.datasets.readers import (
    as_array,
    read_plain_values,
    tar_members,
    unpacked,
    zip_members,
)

X, Y = np.arange(8.0).reshape(4, 2), np.array([0, 2, 1, 0])


def npz_bytes(**arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **(arrays or {"x": X, "y": Y, "classes": 3}))
    return buffer.getvalue()


def npy_bytes(header, payload=b"", version=(1, 0)):
    """A file of np.save with a header of one's choice."""
    text = header.encode() + b"\n"
    length = struct.pack("<H" if version == (1, 0) else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + length + text + payload


def zipped(**members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {"y": npy_of(Y), "classes": npy_of(np.array(3)), **members}.items():
            archive.writestr(f"{name}.npy", content)
    return buffer.getvalue()


def npy_of(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def header(shape, descr="'<f8'", order="False"):
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"


def patched(content, offset_in_central, value, size=2):
    """Change a field of the first entry of the central directory."""
    changed = bytearray(content)
    start = changed.index(b"PK\x01\x02") + offset_in_central
    changed[start : start + size] = value.to_bytes(size, "little")
    return bytes(changed)


def bomb():
    """A few bytes that would unpack to many, under a header that does not tell."""
    return zipped(x=npy_bytes(header((4, 2)), bytes(2**26)))


HOSTILE = {
    "encrypted": lambda: patched(npz_bytes(), 8, 1),
    "unknown compression": lambda: patched(npz_bytes(), 10, 97),
    "lzma": lambda: patched(npz_bytes(), 10, 14),
    "broken local header": lambda: npz_bytes().replace(b"PK\x03\x04", b"PK\x03\x05", 1),
    "broken offset": lambda: patched(npz_bytes(), 42, 2**31, 4),
    "claimed gigabytes": lambda: patched(npz_bytes(), 24, 2**32 - 2, 4),
    "claimed in both": lambda: patched(patched(npz_bytes(), 24, 2**32 - 2, 4), 20, 2**32 - 2, 4),
    "wrong checksum": lambda: patched(npz_bytes(), 16, 12345, 4),
    "shape of 10^30": lambda: zipped(x=npy_bytes(header(f"({10**30}, 2)"))),
    "shape of 2^63": lambda: zipped(x=npy_bytes(header(f"({2**62}, 2)"))),
    "shape of zeros": lambda: zipped(x=npy_bytes(header(f"(0, {10**30})"))),
    "negative shape": lambda: zipped(x=npy_bytes(header("(-4, -2)"), X.tobytes())),
    "many axes": lambda: zipped(x=npy_bytes(header(str((1,) * 90)), bytes(8))),
    "shape of texts": lambda: zipped(x=npy_bytes(header("('4', '2')"), X.tobytes())),
    "shape of truths": lambda: zipped(x=npy_bytes(header("(True, 2)"), bytes(16))),
    "no shape": lambda: zipped(x=npy_bytes("{'descr': '<f8'}")),
    "deep header": lambda: zipped(x=npy_bytes(header("(" * 3000 + ")" * 3000))),
    "deep list header": lambda: zipped(x=npy_bytes(header("[" * 150 + "]" * 150))),
    "long header": lambda: zipped(x=npy_bytes(header("4" * 200_000), version=(2, 0))),
    "code in header": lambda: zipped(x=npy_bytes("__import__('os').mkdir('trap')")),
    "unclosed header": lambda: zipped(x=npy_bytes("{'descr': '''")),
    "odd type": lambda: zipped(x=npy_bytes(header((4, 2), "'<f7'"))),
    "empty type": lambda: zipped(x=npy_bytes(header((4, 2), "'<U0'"))),
    "structured type": lambda: zipped(
        x=npy_bytes(header((4, 2), "[('a', '<f4'), ('b', '<f4')]"), bytes(64))
    ),
    "objects": lambda: zipped(x=npy_bytes(header((4, 2), "'|O'"), pickle.dumps([1] * 8))),
    "unknown version": lambda: zipped(x=npy_bytes(header((4, 2)), version=(9, 9))),
    "no array": lambda: zipped(x=b"text"),
    "empty member": lambda: zipped(x=b""),
    "short": lambda: zipped(x=npy_bytes(header((4, 2)), bytes(63))),
    "long": lambda: zipped(x=npy_bytes(header((4, 2)), bytes(65))),
    "bomb": bomb,
    "twice": lambda: twice(),
    "without suffix": lambda: npz_bytes().replace(b"x.npy", b"x.npz"),
    "outside": lambda: npz_bytes().replace(b"x.npy", b"../x."),
}


def twice():
    buffer = io.BytesIO(npz_bytes())
    with zipfile.ZipFile(buffer, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("x.npy", npy_of(X))
    return buffer.getvalue()


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_of_arrays_are_refused_in_one_line(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = HOSTILE[kind]()
    path = tmp_path / "own.npz"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError, match=r"own\.npz") as refused:
            task_named(f"npz:{path}")
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()
    assert len(str(refused.value).splitlines()) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["own.npz"]


def test_fortran_order_and_compression_are_read(tmp_path):
    path = tmp_path / "own.npz"
    np.savez_compressed(path, x=np.asfortranarray(X), y=Y, classes=3)
    train, _ = task_named(f"npz:{path}").load(None)
    assert train.inputs.tolist() == X.tolist()
    assert train.targets.tolist() == Y.tolist()


def refused_in_one_line(read):
    """Whether a file was refused; whatever else is raised fails the test."""
    try:
        read()
    except InvalidInputError as error:
        message = str(error)
    else:
        return False
    assert len(message.splitlines()) == 1
    return True


def test_mutated_files_are_refused_or_read(tmp_path):
    """Bytes changed, cut off or repeated: one line, or arrays that can be trained on."""
    rng = np.random.default_rng(0)
    path, refusals = tmp_path / "own.npz", 0
    for whole in (npz_bytes(), zipped(x=npy_of(X))):
        for _ in range(500):
            content, place = bytearray(whole), int(rng.integers(1, len(whole)))
            match rng.integers(4):
                case 0:
                    content[place] ^= 1 << int(rng.integers(8))
                case 1:
                    content[place : place + 8] = rng.bytes(8)
                case 2:
                    del content[place:]
                case 3:
                    content[place:place] = content[max(0, place - 30) : place]
            path.write_bytes(content)
            refusals += refused_in_one_line(lambda: task_named(f"npz:{path}"))
    assert 500 < refusals <= 1000


def tar_bytes(*members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for member, content in members:
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def link(target, kind=tarfile.SYMTYPE, name="data"):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member, b""


def plain(name, content, size=None):
    member = tarfile.TarInfo(name)
    member.size = len(content) if size is None else size
    return member, content


def sparse():
    """A file that claims a petabyte of zeros."""
    member = tarfile.TarInfo("data")
    member.pax_headers = {
        "GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "data",
        "GNU.sparse.realsize": str(2**50),
    }  # fmt: skip
    content = b"1\n0\n0\n".ljust(512, b"\0")
    member.size = len(content)
    return member, content


TARS = {
    "dangling link": lambda: tar_bytes(link("nowhere")),
    "dangling hard link": lambda: tar_bytes(link("nowhere", tarfile.LNKTYPE)),
    "link to itself": lambda: tar_bytes(link("data")),
    "circle": lambda: tar_bytes(link("other"), link("data", name="other")),
    "link to a file of the machine": lambda: tar_bytes(link("/etc/hostname")),
    "device": lambda: tar_bytes(link("", tarfile.CHRTYPE)),
    "pipe": lambda: tar_bytes(link("", tarfile.FIFOTYPE)),
    "sparse": lambda: tar_bytes(sparse()),
    "cut off": lambda: tar_bytes(plain("data", bytes(5000)))[:2000],
    "gigabytes": lambda: tar_bytes(plain("data", b"x"))[:124] + b"77777777777\0" + bytes(2000),
    "text": lambda: b"text",
    "empty": lambda: b"",
}


@pytest.mark.parametrize("kind", TARS)
def test_odd_tar_archives_are_refused(kind, tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(TARS[kind]())
    with pytest.raises(DamagedFileError, match=r"a\.tar"):
        tar_members(path, ["data"])


def test_links_that_are_not_asked_for_do_no_harm(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes(link("nowhere", name="other"), plain("deep/data", b"123")))
    assert tar_members(path, ["data"]) == {"data": b"123"}


@pytest.mark.parametrize("kind", ["encrypted", "unknown compression", "claimed gigabytes"])
def test_odd_zip_archives_are_refused(kind, tmp_path):
    path = tmp_path / "a.zip"
    path.write_bytes(HOSTILE[kind]())
    with pytest.raises(DamagedFileError, match=r"a\.zip"):
        zip_members(path, ["x.npy"])


def test_odd_packages_are_refused(tmp_path):
    path = tmp_path / "a.deb"
    name = b"data.tar".ljust(48)
    for length in (b"9" * 10, b"-1".ljust(10), b"".ljust(10), b"12".ljust(10)):
        path.write_bytes(b"!<arch>\n" + name + length + b"`\n" + b"not a tar")
        with pytest.raises(DamagedFileError, match=r"a\.deb"):
            mirrors.deb_members(path, ["data"])


@pytest.mark.parametrize("module", ["gzip", "lzma"])
def test_what_unpacks_to_too_much_is_refused(module, tmp_path, monkeypatch):
    monkeypatch.setattr("reproduction.datasets.readers.LARGEST_FILE", 2**20)
    path = tmp_path / "images.gz"
    path.write_bytes(__import__(module).compress(bytes(2**20)))
    assert len(unpacked(path)) == 2**20
    path.write_bytes(__import__(module).compress(bytes(2**20 + 1)))
    with pytest.raises(DamagedFileError, match="more than 1048576 bytes"):
        unpacked(path)


# --- pickled batches -----------------------------------------------------------------------------

NONE, EMPTY_TUPLE, TUPLE1, STOP = b"N", b")", b"\x85", b"."
EMPTY_LIST, EMPTY_DICT, MARK, APPEND, SETITEM = b"]", b"}", b"(", b"a", b"s"
DEEP = 200_000
BATCHES = {
    "tuples": EMPTY_TUPLE + TUPLE1 * DEEP + STOP,
    "tuples as a key": EMPTY_DICT + EMPTY_TUPLE + TUPLE1 * DEEP + NONE + SETITEM + STOP,
    "tuples as a name": EMPTY_TUPLE + TUPLE1 * DEEP + EMPTY_TUPLE + b"R" + STOP,
    "tuples as two names": (EMPTY_TUPLE + TUPLE1 * DEEP) * 2 + b"\x93" + STOP,
    "lists": EMPTY_LIST * DEEP + APPEND * (DEEP - 1) + STOP,
    "dicts": (EMPTY_DICT + b"\x8c\x01a") * DEEP + NONE + SETITEM * DEEP + STOP,
    "list in itself": EMPTY_LIST + b"q\x00" + b"h\x00" + APPEND + STOP,
    "list around itself": EMPTY_LIST + b"q\x00" + EMPTY_LIST + b"h\x00" + APPEND * 2 + STOP,
    "number as a key": EMPTY_DICT + b"K\x01" + NONE + SETITEM + STOP,
    "list as a key": EMPTY_DICT + EMPTY_LIST + NONE + SETITEM + STOP,
    "long text": b"\x8d" + (2**62).to_bytes(8, "little") + STOP,
    "long number": b"\x8b" + (2**31 - 1).to_bytes(4, "little") + STOP,
    "digits": b"L" + b"9" * 10_000 + b"L\n" + STOP,
    "no mark": b"t" + STOP,
    "far place": b"j\xff\xff\xff\xff" + STOP,
}  # fmt: skip


def test_batches_that_crash_an_interpreter_are_refused():
    """In another process: what is refused today ended the interpreter once."""
    code = (
        "import pickle, sys; from reproduction.datasets.readers import read_plain_values\n"
        "for kind, content in pickle.load(sys.stdin.buffer).items():\n"
        "    print(kind, flush=True)\n"
        "    try: read_plain_values(b'\\x80\\x02' + content)\n"
        "    except ValueError as error: print('refused', str(error)[:200])\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(BATCHES), capture_output=True
    )
    lines = found.stdout.decode().splitlines()
    assert found.returncode == 0, (lines[-1:], found.stderr[-300:])
    assert lines[::2] == list(BATCHES)
    assert all(line.startswith("refused") for line in lines[1::2])


def array_with(**changes):
    """What a pickled array describes, with some parts of it changed."""
    described = read_plain_values(pickle.dumps(np.arange(4, dtype=np.uint8), protocol=4))
    parts = dict(
        zip(("version", "shape", "kind", "fortran", "payload"), described.state, strict=True)
    )
    described.state = tuple((parts | changes).values())
    return described


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (10**30,)}, {"shape": (-1, -1)}, {"shape": ("4",)}, {"shape": 4}, {"shape": [4]},
        {"shape": (3,)}, {"kind": None}, {"kind": "u1"}, {"payload": 3}, {"payload": [1, 2]},
        {"payload": "\u0394" * 4}, {"payload": None},
    ],
    ids=str,
)  # fmt: skip
def test_odd_arrays_are_refused(changes):
    assert as_array(array_with()).tolist() == [0, 1, 2, 3]
    described = array_with(**changes)
    with pytest.raises(ValueError):  # noqa: PT011
        as_array(described)


def test_lists_of_one_length_are_an_array_of_lists():
    array = np.empty(2, dtype=object)
    array[:] = [[1, 2, 3], [4, 5, 6]]
    found = as_array(read_plain_values(pickle.dumps(array, protocol=4)))
    assert found.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert found.shape == (2,)


def test_mutated_batches_are_refused_or_read(photographs, tmp_path):
    rng = np.random.default_rng(1)
    contents = {}
    for name, records in photographs.arrays.items():
        batch = {"data": np.ascontiguousarray(records[:, 1:]), "labels": records[:, 0].tolist()}
        contents[name] = pickle.dumps(batch, protocol=4)
        (tmp_path / name).write_bytes(contents[name])
    load_arrays(photographs.data_set, tmp_path)
    path, refusals = tmp_path / "data_batch_1", 0
    whole = contents["data_batch_1"]
    for _ in range(200):
        content = bytearray(whole)
        # Mostly the instructions, which stand before and after the pixels.
        place = (
            int(rng.integers(200)) if rng.random() < 0.5 else len(whole) - int(rng.integers(1, 150))
        )
        content[place] = int(rng.integers(256))
        path.write_bytes(content)
        refusals += refused_in_one_line(lambda: load_arrays(photographs.data_set, tmp_path))
    assert refusals > 150


def test_reviews_are_read_by_their_names_only(tmp_path):
    path = tmp_path / "imdb.npz"
    path.write_bytes(npz_bytes(train_tokens=X, other=Y))
    with pytest.raises(DamagedFileError, match="holds an array 'other'"), path.open("rb") as file:
        read_arrays(path, file, ("train_tokens",))
