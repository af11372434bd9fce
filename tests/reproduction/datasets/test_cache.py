"""Decoded once, then mapped; a change of the files or of the copy is noticed."""

import os
from dataclasses import replace

import numpy as np
import pytest

from dpsur.errors import InvalidInputError
from reproduction.datasets import load_arrays
from reproduction.datasets.store import Cache, status_of
from tests.reproduction.datasets.conftest import Digits

LABELS = "t10k-labels-idx1-ubyte.gz"


class Counted:
    """A data set that counts how often it is decoded."""

    def __init__(self, digits):
        (form,) = digits.data_set.forms
        self.times = 0

        def read(paths):
            self.times += 1
            return form.read(paths)

        self.data_set = replace(digits.data_set, forms=(replace(form, read=read),))


@pytest.fixture
def counted(digits):
    return Counted(digits)


def test_the_second_load_is_mapped(digits, counted, tmp_path):
    digits.write(tmp_path / "d")
    for _ in range(3):
        found = load_arrays(counted.data_set, tmp_path / "d")
        assert all(isinstance(array, np.memmap) for array in found.values())
        np.testing.assert_array_equal(found["train_images"], digits.arrays["train_images"])
    assert counted.times == 1


def test_what_a_reader_does_to_the_arrays_stays_with_it(digits, tmp_path):
    digits.write(tmp_path / "d")
    load_arrays(digits.data_set, tmp_path / "d")["train_images"][:] = 0
    found = load_arrays(digits.data_set, tmp_path / "d")
    np.testing.assert_array_equal(found["train_images"], digits.arrays["train_images"])


def test_a_changed_file_is_noticed(digits, counted, tmp_path):
    folder = digits.write(tmp_path / "d")
    load_arrays(counted.data_set, folder)
    (folder / LABELS).write_bytes(Digits(seed=1).packed()[LABELS])
    with pytest.raises(InvalidInputError, match=LABELS):
        load_arrays(counted.data_set, folder)
    (folder / LABELS).write_bytes(digits.packed()[LABELS])
    load_arrays(counted.data_set, folder)
    assert counted.times == 3


def test_a_touched_file_is_checked_again_and_kept_once(digits, counted, tmp_path):
    folder = digits.write(tmp_path / "d")
    load_arrays(counted.data_set, folder)
    os.utime(folder / LABELS, (1, 1))
    load_arrays(counted.data_set, folder)
    assert counted.times == 2
    assert len(list((tmp_path / "cache").rglob("train_images.npy"))) == 1


@pytest.mark.parametrize("damage", ["flipped", "short", "gone", "listing"])
def test_a_damaged_copy_is_made_again(digits, counted, tmp_path, damage):
    folder = digits.write(tmp_path / "d")
    load_arrays(counted.data_set, folder)
    (copy,) = (tmp_path / "cache").rglob("test_images.npy")
    content = bytearray(copy.read_bytes())
    content[-1] ^= 1
    match damage:
        case "flipped":
            copy.write_bytes(content)
        case "short":
            copy.write_bytes(content[:500])
        case "gone":
            copy.unlink()
        case "listing":
            (copy.parent / "digests.json").write_text("[")
    found = load_arrays(counted.data_set, folder)
    np.testing.assert_array_equal(found["test_images"], digits.arrays["test_images"])
    assert counted.times == 2


def test_without_a_writable_cache_the_arrays_stay_in_memory(digits, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DPSUR_CACHE", str(tmp_path / "file"))
    found = load_arrays(digits.data_set, digits.write(tmp_path / "d"))
    np.testing.assert_array_equal(found["test_labels"], digits.arrays["test_labels"])


def test_the_places_in_their_order(digits, tmp_path, monkeypatch):
    assert status_of(digits.data_set, None).state == "missing"
    digits.write(tmp_path / "cache" / "downloads" / "mnist")
    assert status_of(digits.data_set, None).where == tmp_path / "cache" / "downloads" / "mnist"
    own = digits.write(tmp_path / "own")
    monkeypatch.setenv("DPSUR_DATA", str(own))
    assert status_of(digits.data_set, None).where == own
    given = digits.write(tmp_path / "given" / "mnist")
    assert status_of(digits.data_set, tmp_path / "given").where == given


def test_the_copy_serves_when_the_files_are_gone(digits, tmp_path):
    folder = digits.write(tmp_path / "d")
    load_arrays(digits.data_set, folder)
    for path in folder.iterdir():
        path.unlink()
    assert status_of(digits.data_set, None).state == "ready"
    np.testing.assert_array_equal(
        load_arrays(digits.data_set)["train_labels"], digits.arrays["train_labels"]
    )
    # A folder that is named must hold the files.
    with pytest.raises(InvalidInputError, match="are not in"):
        load_arrays(digits.data_set, folder)


def test_states(digits, tmp_path):
    folder = digits.write(tmp_path / "d")
    assert status_of(digits.data_set, folder).state == "found"
    assert status_of(digits.data_set, folder, check=True).state == "ready"
    assert status_of(digits.data_set, folder).state == "ready"
    (folder / LABELS).write_bytes(b"")
    assert status_of(digits.data_set, folder).state == "found"
    wrong = status_of(digits.data_set, folder, check=True)
    assert wrong.state == "wrong"
    assert LABELS in wrong.remedy
    (folder / LABELS).unlink()
    incomplete = status_of(digits.data_set, folder)
    assert incomplete.state == "incomplete"
    assert LABELS in incomplete.remedy


def test_the_cache_is_where_it_is_said_to_be(digits, tmp_path, monkeypatch):
    monkeypatch.delenv("DPSUR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Cache(digits.data_set).folder == tmp_path / "xdg" / "dpsur" / "data" / "mnist"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Cache(digits.data_set).folder == tmp_path / ".cache" / "dpsur" / "data" / "mnist"


def everything(folder):
    """All files of a cache, with their content."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


LISTINGS = (
    b"", b"[]", b"3", b"null", b'"text"', b"{}", b"[" * 100_000, b'{"test_images": 3}', b"\xff",
    b'{"test_images": null, "x": "y"}', b'{"../../x": "y"}', b'{"": {}}', b'{"a\\u0000b": ""}',
    b'{"content": ".."}', b'{"content": 3}', b'{"content": "' + b"a" * 300 + b'"}',
)  # fmt: skip


def test_whatever_is_wrong_with_a_copy_the_arrays_are_the_same(digits, tmp_path):
    folder = digits.write(tmp_path / "d")
    load_arrays(digits.data_set, folder)
    whole = everything(tmp_path / "cache")
    assert len(whole) == 6
    rng = np.random.default_rng(0)
    for path, content in whole.items():
        listings = LISTINGS if path.suffix == ".json" else (b"", b"PK\x05\x06" + bytes(18))
        mutants = [*listings, content[: len(content) // 2]]
        if path.name == "test_images.npy":
            mutants.append(content.replace(b"(12, 28, 28)", b"(28, 12, 28)"))
            mutants.append(content.replace(b"'|u1'", b"'|i1'"))
            mutants.append(content.replace(b"False", b"True "))
        for _ in range(8):
            place, mutant = int(rng.integers(min(len(content), 160))), bytearray(content)
            mutant[place] = int(rng.integers(256))
            mutants.append(bytes(mutant))
        for mutant in mutants:
            path.write_bytes(mutant)
            for place in (folder, None):
                try:
                    found = load_arrays(digits.data_set, place)
                except InvalidInputError:  # without files and without a copy there are no data
                    found = digits.arrays if place is None else {}
                for name, array in digits.arrays.items():
                    np.testing.assert_array_equal(found[name], array)
                path.write_bytes(mutant)
            for name, kept in whole.items():
                name.write_bytes(kept)


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_odd_things_in_the_place_of_a_copy(digits, tmp_path, kind):
    folder = digits.write(tmp_path / "d")
    load_arrays(digits.data_set, folder)
    for path in everything(tmp_path / "cache"):
        path.unlink()
        match kind:
            case "folder":
                path.mkdir()
            case "link":
                path.symlink_to(path)
            case "pipe":
                os.mkfifo(path)
    found = load_arrays(digits.data_set, folder)
    for name, array in digits.arrays.items():
        np.testing.assert_array_equal(found[name], array)
