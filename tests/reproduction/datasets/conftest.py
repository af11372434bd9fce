"""Small stand-ins for the data sets, in their published forms, and a cache of one's own."""

import gzip
import struct
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from reproduction.datasets import CIFAR10, IMDB, MNIST
from reproduction.datasets import readers as cifar
from reproduction.datasets.published import digest
from reproduction.datasets.readers import FILES

RECORDS = 12


@pytest.fixture(autouse=True)
def own_cache(request, tmp_path, monkeypatch):
    if request.node.get_closest_marker("data"):
        return
    monkeypatch.setenv("DPSUR_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DPSUR_DATA", raising=False)


def idx_bytes(array):
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


class Digits:
    """A data set like MNIST with a dozen records."""

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        self.arrays = {
            name: rng.integers(0, 256, (RECORDS, 28, 28)[:axes], np.uint8)
            if axes == 3
            else rng.integers(0, 10, RECORDS).astype(np.uint8)
            for name, axes in FILES.values()
        }
        self.contents = {file: idx_bytes(self.arrays[name]) for file, (name, _) in FILES.items()}
        self.data_set = replace(MNIST, digests={n: digest(a) for n, a in self.arrays.items()})

    def packed(self):
        return {f"{file}.gz": gzip.compress(raw, mtime=0) for file, raw in self.contents.items()}

    def write(self, folder, packed=True):
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in (self.packed() if packed else self.contents).items():
            (folder / file).write_bytes(content)
        return folder


@pytest.fixture
def digits():
    return Digits()


class Photographs:
    """A data set like CIFAR-10 with a dozen records in each batch."""

    def __init__(self):
        rng = np.random.default_rng(3)
        self.arrays = {}
        for name in cifar.BATCHES:
            records = rng.integers(0, 256, (RECORDS, 3073)).astype(np.uint8)
            records[:, 0] %= 10
            self.arrays[name] = records
        self.data_set = replace(CIFAR10, digests={n: digest(a) for n, a in self.arrays.items()})


@pytest.fixture
def photographs(monkeypatch):
    monkeypatch.setattr(cifar, "RECORDS", RECORDS)
    return Photographs()


class Reviews:
    """A data set like IMDb with six reviews in each part."""

    def __init__(self):
        rng = np.random.default_rng(4)
        self.arrays, self.lists = {}, {}
        for part in ("train", "test"):
            lengths = rng.integers(0, 200, 6)
            self.arrays |= {
                f"{part}_tokens": rng.integers(1, 88585, lengths.sum()).astype(np.int32),
                f"{part}_offsets": np.concatenate(([0], lengths.cumsum())),
                f"{part}_labels": rng.integers(0, 2, 6).astype(np.uint8),
            }
            offsets = self.arrays[f"{part}_offsets"]
            self.lists[part] = [
                self.arrays[f"{part}_tokens"][a:b].tolist() for a, b in pairwise(offsets)
            ]
        self.data_set = replace(
            IMDB, digests={n: digest(a) for n, a in self.arrays.items()}, trusted_files=frozenset()
        )

    def write_keras(self, path):
        arrays = {}
        for part in ("train", "test"):
            reviews = np.empty(6, dtype=object)
            reviews[:] = self.lists[part]
            arrays |= {f"x_{part}": reviews, f"y_{part}": self.arrays[f"{part}_labels"].astype(int)}
        np.savez(path, **arrays)


@pytest.fixture
def reviews():
    return Reviews()
