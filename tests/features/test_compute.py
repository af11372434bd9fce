"""Features by name, and their cache."""

import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dpsur import features
from dpsur.environment import cache_folder
from dpsur.errors import InvalidInputError
from dpsur.features import FEATURES, cache, compute, features_named
from dpsur.features.scattering import Scattering2d

SCATTERING = FEATURES["scattering"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DPSUR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


@pytest.fixture
def computations(monkeypatch):
    """How many times layers were applied to all records."""
    calls = []
    apply = features.apply_layers

    def counted(*args, **kwargs):
        calls.append(1)
        return apply(*args, **kwargs)

    monkeypatch.setattr(features, "apply_layers", counted)
    return calls


def images(seed=0, count=3):
    return torch.rand(count, 1, 16, 16, generator=torch.Generator().manual_seed(seed))


def only_file(folder):
    (path,) = folder.glob("*.safetensors")
    return path


@pytest.mark.parametrize("name", ["pixels", "tokens"])
def test_pixels_and_tokens_are_the_inputs_themselves(name, folder):
    tokens = torch.arange(6).reshape(2, 3)
    assert compute(features_named(name), tokens) is tokens
    assert features_named(name).output_shape((3,)) == (3,)
    assert not folder.exists()


def test_scattering_is_the_transform_of_the_size():
    torch.testing.assert_close(compute(SCATTERING, images()), Scattering2d(16, 16)(images()))
    assert SCATTERING.output_shape((3, 32, 32)) == (243, 8, 8)


def test_names_that_are_unknown_are_refused():
    with pytest.raises(
        InvalidInputError, match="'wavelets'; choose one of pixels, tokens, vectors"
    ):
        features_named("wavelets")


def test_scattering_of_tokens_is_refused_by_their_shape():
    with pytest.raises(InvalidInputError, match=r"scattering needs images.*\(80,\)"):
        compute(SCATTERING, torch.zeros(5, 80, dtype=torch.long))


def test_a_second_time_is_read_from_disk(computations, folder):
    first = compute(SCATTERING, images())
    second = compute(SCATTERING, images().clone())
    assert torch.equal(first, second)
    assert len(computations) == 1
    assert torch.equal(load_file(only_file(folder))["features"], first)


def test_what_is_read_can_be_changed_without_changing_the_file():
    first = compute(SCATTERING, images())
    compute(SCATTERING, images()).zero_()
    assert torch.equal(compute(SCATTERING, images()), first)


@pytest.mark.parametrize(
    "other",
    [
        images(seed=1),
        images().flip(0),
        images()[:2],
        images().double(),
        images().reshape(3, 1, 8, 32),
    ],
    ids=["values", "order", "fewer", "type", "shape"],
)
def test_other_content_has_its_own_file(other, computations):
    compute(SCATTERING, images())
    features = compute(SCATTERING, other)
    assert len(computations) == 2
    expected = Scattering2d(*other.shape[2:])(other)
    torch.testing.assert_close(features, expected)


def test_another_version_of_the_transform_has_its_own_file(computations):
    compute(SCATTERING, images())
    newer = features.Features("scattering", "", SCATTERING.layers, version=SCATTERING.version + 1)
    compute(newer, images())
    assert len(computations) == 2


def damaged(content: bytes, how: str) -> bytes:
    middle = len(content) // 2
    return {
        "cut": content[:middle],
        "empty": b"",
        "no checksum": content[:-4],
        "one bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "not an array": b"features",
        "longer": content + b"\0",
    }[how]


@pytest.mark.parametrize(
    "how", ["cut", "empty", "no checksum", "one bit", "not an array", "longer"]
)
def test_a_damaged_file_is_computed_again(how, computations, folder):
    first = compute(SCATTERING, images())
    path = only_file(folder)
    whole = path.read_bytes()
    path.write_bytes(damaged(whole, how))
    assert torch.equal(compute(SCATTERING, images()), first)
    assert len(computations) == 2
    assert path.read_bytes() == whole


def test_a_file_of_another_shape_is_computed_again(computations, folder):
    first = compute(SCATTERING, images())
    cache.write(only_file(folder), first[:1])
    assert torch.equal(compute(SCATTERING, images()), first)
    assert len(computations) == 2


def test_files_are_for_their_owner_only(folder):
    before = os.umask(0)
    try:
        compute(SCATTERING, images())
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(only_file(folder).stat().st_mode) == 0o600


def test_the_cache_can_be_switched_off(computations, folder):
    for _ in range(2):
        compute(SCATTERING, images(), cached=False)
    assert len(computations) == 2
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_costs_only_time(computations, folder):
    folder.parent.mkdir()
    folder.write_text("in the way")
    for _ in range(2):
        torch.testing.assert_close(compute(SCATTERING, images()), Scattering2d(16, 16)(images()))
    assert len(computations) == 2


def test_an_interrupted_write_leaves_nothing_behind(folder, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    cache.path_for({}, images())  # makes the key
    monkeypatch.setattr(cache.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compute(SCATTERING, images())
    assert [path.name for path in folder.iterdir()] == [cache.KEY]


def test_no_records_have_no_file(folder):
    assert compute(SCATTERING, images(count=0)).shape == (0, 81, 4, 4)
    assert not folder.exists()


def test_the_folder_follows_the_environment(monkeypatch):
    monkeypatch.delenv("DPSUR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/dpsur")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "dpsur"


def test_names_of_files_do_not_let_the_records_be_guessed(folder):
    """With the key the name is found again; without it, not even from the very records."""
    name = cache.path_for({}, images()).name
    assert cache.path_for({}, images()).name == name
    assert stat.S_IMODE((folder / cache.KEY).stat().st_mode) == 0o600
    (folder / cache.KEY).unlink()
    assert cache.path_for({}, images()).name != name


def test_a_damaged_key_costs_only_time(computations, folder):
    compute(SCATTERING, images())
    (folder / cache.KEY).write_bytes(b"short")
    compute(SCATTERING, images())
    assert len(computations) == 2


def damages(whole):
    """A cache file cut off, changed, or replaced by something else."""
    yield b""
    yield b"PK\x03\x04" + whole[4:]
    yield b"PK\x05\x06" + bytes(18)
    yield b"\x80\x04N."
    yield b"\xff" * 8 + whole[8:]  # the length of the header
    for one, other in ((b"F32", b"I32"), (b"F32", b"F16"), (b"[3,", b"[2,"), (b"crc32", b"crc31")):
        assert one in whole
        yield whole.replace(one, other)
    rng = np.random.default_rng(0)
    for _ in range(100):
        content, place = bytearray(whole), int(rng.integers(len(whole)))
        if rng.random() < 0.5:
            place = int(rng.integers(140))  # in the header
        content[place] ^= 1 << int(rng.integers(8))
        yield bytes(content if rng.random() < 0.8 else content[:place])


def test_whatever_is_wrong_with_a_file_the_features_are_the_same(folder):
    expected = compute(SCATTERING, images(), cached=False)
    compute(SCATTERING, images())
    path = only_file(folder)
    for content in damages(path.read_bytes()):
        path.write_bytes(content)
        assert torch.equal(compute(SCATTERING, images()), expected), content[:140]


@pytest.mark.parametrize("kind", ["folder", "link", "pipe", "key folder", "short key", "no access"])
def test_odd_things_in_the_place_of_a_file(folder, kind):
    expected = compute(SCATTERING, images(), cached=False)
    compute(SCATTERING, images())
    path, key = only_file(folder), folder / "key"
    (key if "key" in kind else path).unlink()
    match kind:
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to(path)
        case "pipe":
            os.mkfifo(path)
        case "key folder":
            key.mkdir()
        case "short key":
            key.write_bytes(b"short")
        case "no access":
            folder.chmod(0)
    try:
        assert torch.equal(compute(SCATTERING, images()), expected)
    finally:
        folder.chmod(0o700)
