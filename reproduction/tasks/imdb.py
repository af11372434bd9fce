"""IMDb: 25,000 film reviews to train on, 25,000 to test; is a review positive?

The token ids are those of Keras's `load_data(num_words=20000)`: a start mark, ranks by frequency
moved up by 3, words beyond the vocabulary replaced. Reviews are cut and padded at the end.
"""

import hashlib
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from dpsur.errors import InvalidInputError
from dpsur.features.table import WORDS_DIMENSION, words
from dpsur.functional.records import Examples
from dpsur.tasks.base import TOKENS, VECTORS, WORD_ROWS, Task
from dpsur.tasks.npz import Array, Arrays
from reproduction.datasets import IMDB, load_arrays
from reproduction.datasets.published import KERAS_FILES
from reproduction.datasets.store import data_folders, download_folder

PADDING, START, UNKNOWN = 0, 1, 2
RANK_SHIFT = 3
VOCABULARY, LENGTH = 20_000, 80
# Keras shuffles the reviews, which lie positive first, with this seed: first train, then test.
ORDER_SEED = 113


def load(data_dir: Path | None = None) -> tuple[Examples, Examples]:
    """Training and test records: token ids, 80 for each review, and 1 for a positive one."""
    arrays = load_arrays(IMDB, data_dir)
    generator = np.random.RandomState(ORDER_SEED)
    train, test = (_examples(arrays, part, generator) for part in ("train", "test"))
    return train, test


def token_ids(tokens: Array, offsets: Array) -> Array:
    """Reviews of ranks, one after the other, as rows of ids of one length."""
    starts, ends = offsets[:-1, None], offsets[1:, None]
    positions = starts + np.arange(LENGTH - 1)
    within = positions < ends
    ids = tokens[np.where(within, positions, 0)].astype(np.int64) + RANK_SHIFT
    ids[ids >= VOCABULARY] = UNKNOWN
    ids[~within] = PADDING
    return np.concatenate([np.full_like(starts, START), ids], axis=1)


def _examples(arrays: Arrays, part: str, generator: np.random.RandomState) -> Examples:
    ids = token_ids(arrays[f"{part}_tokens"], arrays[f"{part}_offsets"])
    order = np.arange(len(ids))
    generator.shuffle(order)
    labels = arrays[f"{part}_labels"][order].astype(np.int64)
    return Examples(torch.from_numpy(ids[order]), torch.from_numpy(labels))


IMDB_TASK = Task(
    name="imdb",
    summary="IMDb film reviews, 80 tokens each (25,000 to train, 25,000 to test)",
    networks={TOKENS: {"name": "imdb-lstm"}},
    load=load,
)


# Ranks were counted on these very reviews: that they are public is an assumption. The task
# imdb-hashed makes none.
# More frequent words say little about a film, rarer ones are seen too seldom to be learned.
FIRST_RANK, LAST_RANK = 50, 5000
WORDS = LAST_RANK - FIRST_RANK + 1
# Rare words tell more. Frequencies fall like one over the rank, so that the logarithm of the rank
# stands in for the usual weight, the logarithm of an inverse frequency, and needs no record.
WEIGHTLESS_RANK = 20


def load_words(data_dir: Path | None = None) -> tuple[Examples, Examples]:
    """Training and test records: a vector for each review, and 1 for a positive one."""
    arrays = load_arrays(IMDB, data_dir)
    return _word_examples(arrays, "train"), _word_examples(arrays, "test")


def word_vectors(tokens: Array, offsets: Array) -> torch.Tensor:
    """Reviews of ranks, one after the other, as one vector of length 1 each.

    A review without any of the words is the vector 0.
    """
    reviews = len(offsets) - 1
    rows = np.repeat(np.arange(reviews), np.diff(offsets))
    words = tokens.astype(np.int64) - FIRST_RANK
    ours = (words >= 0) & (words < WORDS)
    places, counts = np.unique(rows[ours] * WORDS + words[ours], return_counts=True)
    vectors = np.zeros(reviews * WORDS, dtype=np.float32)
    vectors[places] = np.log1p(counts) * rank_weights()[places % WORDS]
    return torch.nn.functional.normalize(torch.from_numpy(vectors).view(reviews, WORDS))


def rank_weights() -> Array:
    return np.log(np.arange(FIRST_RANK, LAST_RANK + 1) / WEIGHTLESS_RANK)


def _word_examples(arrays: Arrays, part: str) -> Examples:
    vectors = word_vectors(arrays[f"{part}_tokens"], arrays[f"{part}_offsets"])
    labels = torch.from_numpy(arrays[f"{part}_labels"].astype(np.int64))
    return Examples(vectors, labels)


IMDB_WORDS_TASK = Task(
    name="imdb-words",
    summary="IMDb film reviews as counts of words weighted by rank (25,000 to train and to test)",
    networks={VECTORS: {"name": "linear", "inputs": WORDS, "classes": 2}},
    load=load_words,
    records=25_000,
    shape=(WORDS,),
    classes=2,
    kind=WORD_ROWS,
)


WORD_LIST = "imdb_word_index.json"
WORD_LIST_SHA256 = "027313fe9a320280f3bf0fac5baf58c4a683cf39a7ed9c3d3d3912bde4284cf6"


def load_hashed(data_dir: Path | None = None) -> tuple[Examples, Examples]:
    """Training and test records: the words of each review, hashed, and 1 for a positive one.

    Formal guarantee: the row of a review depends on its own words alone. The list of words turns
    the numbers of the file back into what the review says; their order plays no part.
    """
    arrays, spelling = load_arrays(IMDB, data_dir), word_list(data_dir)

    def examples(part: str) -> Examples:
        texts = spelled(arrays[f"{part}_tokens"], arrays[f"{part}_offsets"], spelling)
        labels = torch.from_numpy(arrays[f"{part}_labels"].astype(np.int64))
        return Examples(words(texts), labels)

    return examples("train"), examples("test")


def word_list(data_dir: Path | None = None) -> list[str]:
    """Words by rank, from 1 on: Keras's list, found beside the reviews and checked."""
    for folder in (root / usual for root in data_folders(data_dir) for usual in IMDB.folders):
        path = folder / WORD_LIST
        if path.is_file():
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() != WORD_LIST_SHA256:
                raise InvalidInputError(
                    f"{path} is not the published list of words (its checksum is wrong); replace "
                    f"it by {KERAS_FILES}/{WORD_LIST}"
                )
            ranks = json.loads(content)
            return ["", *sorted(ranks, key=ranks.__getitem__)]
    raise InvalidInputError(
        f"the task imdb-hashed needs the list of words: put {KERAS_FILES}/{WORD_LIST} into "
        f"{download_folder(data_dir) / IMDB.folders[0]}"
    )


def spelled(tokens: Array, offsets: Array, spelling: Sequence[str]) -> list[str]:
    """Reviews of ranks, one after the other, as texts."""
    ends = offsets.tolist()
    return [
        " ".join(spelling[rank] for rank in tokens[start:end].tolist())
        for start, end in pairwise(ends)
    ]


IMDB_HASHED_TASK = Task(
    name="imdb-hashed",
    summary="IMDb film reviews as hashed words, without ranks (25,000 to train and to test)",
    networks={VECTORS: {"name": "linear", "inputs": WORDS_DIMENSION, "classes": 2}},
    load=load_hashed,
    records=25_000,
    shape=(WORDS_DIMENSION,),
    classes=2,
    kind=WORD_ROWS,
)
