"""Every published form gives the same arrays; anything else is refused by name."""

import gzip
import io
import lzma
import os
import pickle
import struct
import tarfile
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from dpsur.errors import InvalidInputError
from reproduction.datasets import load_arrays
from reproduction.datasets.readers import FILES, as_array, read_plain_values

BROKEN = (b"e.", b"\x86.", b"h\x05.", b"K\x01K\x02.", b"K\x01K\x02b.")
IMAGES = "train-images-idx3-ubyte"


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("folder", ["", "mnist", "MNIST/raw"])
def test_idx_files_are_read_packed_or_plain_in_the_usual_folders(digits, tmp_path, folder, packed):
    digits.write(tmp_path / folder, packed)
    assert_same(load_arrays(digits.data_set, tmp_path), digits.arrays)


def python_2_batch(records):
    """A batch as Python 2 pickled it: byte strings, protocol 2."""
    pixels, count = records[:, 1:].tobytes(), len(records)
    return b"".join(
        [
            b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03",
            b"U\x06labelsq\x04]q\x05(",
            *(b"K" + bytes((label,)) for label in records[:, 0]),
            b"eU\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08",
            b"K\x00\x85q\tU\x01bq\n\x87q\x0bRq\x0c(K\x01K" + bytes((count,)) + b"M\x00\x0c\x86q\r",
            b"cnumpy\ndtype\nq\x0eU\x02u1q\x0fK\x00K\x01\x87q\x10Rq\x11(K\x03U\x01|q\x12",
            b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x13b\x89",
            b"T" + struct.pack("<i", len(pixels)) + pixels,
            b"q\x14tq\x15bU\tfilenamesq\x16]q\x17(U\x05a.pngq\x18U\x05b.pngq\x19eu.",
        ]
    )


def python_3_batch(records):
    return pickle.dumps({"labels": records[:, 0].tolist(), "data": records[:, 1:].copy()})


def archive(path, files):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def files_of(photographs, form):
    raw = {name: records.tobytes() for name, records in photographs.arrays.items()}
    match form:
        case "bin":
            return {f"cifar-10-batches-bin/{name}.bin": content for name, content in raw.items()}
        case "bin.xz":
            return {f"{name}.bin.xz": lzma.compress(content) for name, content in raw.items()}
        case "python 2":
            batches = photographs.arrays.items()
            return {f"cifar-10-batches-py/{n}": python_2_batch(r) for n, r in batches}
        case "python 3":
            return {n: python_3_batch(r) for n, r in photographs.arrays.items()}


@pytest.mark.parametrize("form", ["bin", "bin.xz", "python 2", "python 3"])
def test_cifar_files_give_the_same_records(photographs, tmp_path, form):
    for name, content in files_of(photographs, form).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert_same(load_arrays(photographs.data_set, tmp_path), photographs.arrays)


@pytest.mark.parametrize(("form", "kind"), [("bin", "binary"), ("python 2", "python")])
def test_cifar_archives_give_the_same_records(photographs, tmp_path, form, kind):
    files = files_of(photographs, form)
    path = tmp_path / f"cifar-10-{kind}.tar.gz"
    archive(path, files)
    assert_same(load_arrays(photographs.data_set, tmp_path), photographs.arrays)
    archive(path, dict(list(files.items())[:-1]))
    with pytest.raises(InvalidInputError, match=f"{path.name} holds no file test_batch"):
        load_arrays(photographs.data_set, tmp_path)
    archive(path, files)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(InvalidInputError, match=f"{path.name} is damaged or incomplete"):
        load_arrays(photographs.data_set, tmp_path)


def test_review_forms_give_the_same_tokens(reviews, tmp_path):
    plain, keras = tmp_path / "plain", tmp_path / "keras" / "imdb"
    plain.mkdir()
    keras.mkdir(parents=True)
    buffer = io.BytesIO()
    np.savez(buffer, **reviews.arrays)
    (plain / "imdb_keras.npz.xz").write_bytes(lzma.compress(buffer.getvalue()))
    reviews.write_keras(keras / "imdb.npz")
    for folder in (plain, tmp_path / "keras"):
        assert_same(load_arrays(reviews.data_set, folder), reviews.arrays)


@pytest.mark.parametrize(
    "change",
    [
        lambda tokens: tokens[:, None],
        lambda tokens: tokens.view(np.float32),
        lambda tokens: tokens.view(">i4"),
        lambda tokens: tokens.astype("datetime64[s]"),
    ],
)
def test_reviews_of_the_same_bytes_in_another_form_are_refused(reviews, tmp_path, change):
    changed = {**reviews.arrays, "train_tokens": change(reviews.arrays["train_tokens"])}
    np.savez(tmp_path / "imdb_keras.npz", **changed)
    with pytest.raises(InvalidInputError, match="train_tokens is no list of numbers"):
        load_arrays(reviews.data_set, tmp_path)


def test_reviews_with_a_broken_header_are_refused(reviews, tmp_path):
    path = tmp_path / "imdb.npz"
    reviews.write_keras(path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    header = b"{" * 20
    members["x_train.npy"] = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(InvalidInputError, match="not Keras's file of reviews"):
        load_arrays(reviews.data_set, tmp_path)


def test_a_published_file_of_reviews_is_taken_at_its_word(reviews, tmp_path):
    from hashlib import sha256

    path = tmp_path / "imdb.npz"
    reviews.write_keras(path)
    wrong = dict.fromkeys(reviews.arrays, "0" * 64)
    strict = replace(reviews.data_set, digests=wrong)
    with pytest.raises(InvalidInputError, match="imdb.npz"):
        load_arrays(strict, tmp_path)
    known = frozenset({sha256(path.read_bytes()).hexdigest()})
    assert_same(load_arrays(replace(strict, trusted_files=known), tmp_path), reviews.arrays)


def damage_truncated(content):
    return content[: len(content) // 2]


def damage_flipped(content):
    raw = bytearray(gzip.decompress(content))
    raw[-1] ^= 1
    return gzip.compress(bytes(raw))


def damage_page(content):
    return b"<html>not found</html>"


def damage_short_inside(content):
    return gzip.compress(gzip.decompress(content)[:-100])


def damage_empty(content):
    return b""


@pytest.mark.parametrize(
    "damage",
    [damage_truncated, damage_flipped, damage_page, damage_short_inside, damage_empty],
)
@pytest.mark.parametrize("file", [f"{name}.gz" for name in FILES])
def test_damaged_files_are_refused_by_name_with_the_remedy(digits, tmp_path, file, damage):
    path = digits.write(tmp_path / "mnist") / file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InvalidInputError) as refusal:
        load_arrays(digits.data_set, tmp_path)
    assert str(path) in str(refusal.value)
    assert f"python -m reproduction data fetch mnist --data-dir {tmp_path}" in str(refusal.value)


def test_damaged_batches_are_refused_by_name(photographs, tmp_path):
    for name, content in files_of(photographs, "bin.xz").items():
        (tmp_path / name).write_bytes(content)
    path = tmp_path / "data_batch_3.bin.xz"
    whole = path.read_bytes()
    for content in (whole[:-30], lzma.compress(b"short"), b"", lzma.compress(bytes(12 * 3073))):
        path.write_bytes(content)
        with pytest.raises(InvalidInputError, match="data_batch_3.bin.xz"):
            load_arrays(photographs.data_set, tmp_path)


def test_a_missing_file_is_named(digits, tmp_path):
    digits.write(tmp_path / "mnist")
    (tmp_path / "mnist" / f"{IMAGES}.gz").unlink()
    with pytest.raises(InvalidInputError, match=f"{IMAGES}.gz; run: .* data fetch mnist"):
        load_arrays(digits.data_set, tmp_path)


def test_files_of_another_data_set_are_recognised(digits, tmp_path, monkeypatch):
    from reproduction.datasets import store as load

    fashion = replace(
        digits.data_set,
        name="fmnist",
        folders=("fashion-mnist", ""),
        digests=dict.fromkeys(digits.arrays, "0" * 64),
    )
    monkeypatch.setattr(load, "DATA_SETS", {"mnist": digits.data_set, "fmnist": fashion})
    digits.write(tmp_path)
    with pytest.raises(
        InvalidInputError, match="train_images of mnist.*own, fashion-mnist and mnist"
    ):
        load_arrays(fashion, tmp_path)


def test_absent_data_says_what_to_do(digits, tmp_path):
    with pytest.raises(InvalidInputError, match="data fetch mnist .*by hand: put"):
        load_arrays(digits.data_set)
    with pytest.raises(InvalidInputError, match="not a folder"):
        load_arrays(digits.data_set, tmp_path / "nowhere")


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_harmful_batch_is_refused_and_nothing_runs(photographs, tmp_path, protocol):
    trap = tmp_path / "trap"
    for name in photographs.arrays:
        (tmp_path / name).write_bytes(pickle.dumps({"data": Harmful(trap)}, protocol=protocol))
    with pytest.raises(InvalidInputError, match="data_batch_1 is no batch of CIFAR-10.*mkdir"):
        load_arrays(photographs.data_set, tmp_path)
    assert not trap.exists()
    # The control: Python's own reader does run it.
    pickle.loads((tmp_path / "data_batch_1").read_bytes())
    assert trap.exists()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_read_as_pickled(protocol):
    value = {"a": [1, 2**40, -3, True, None], "b": ("x", (), ["é"], {}), "c": list(range(3000))}
    assert read_plain_values(pickle.dumps(value, protocol=protocol)) == value


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80\x02", b"oddity", *(b"\x80\x02" + rest for rest in BROKEN)],
)
def test_broken_instructions_are_refused(content):
    with pytest.raises(ValueError):  # noqa: PT011
        read_plain_values(content)


def test_only_arrays_of_bytes_and_objects_are_made():
    assert as_array(read_plain_values(pickle.dumps(np.arange(4, dtype=np.uint8)))).tolist() == [
        0, 1, 2, 3,
    ]  # fmt: skip
    for array in (np.arange(4.0), np.asfortranarray(np.ones((2, 2), np.uint8))):
        with pytest.raises(ValueError, match="a numpy array"):
            as_array(read_plain_values(pickle.dumps(array, protocol=4)))
    with pytest.raises(ValueError, match="no numpy array"):
        as_array([1])
