"""IMDb with whole reviews as counts of words: what a linear model needs, and little else.

Reviews are the same as in the task imdb. A record is a vector with an entry for each word of ranks
50 to 5,000: the logarithm of one plus its count, times a weight that grows with the rank, the whole
vector scaled to length 1. It depends on that review alone. Ranks by frequency come with the
published file and count as public; for reviews of your own, take a public list of words.
"""

from pathlib import Path

import numpy as np
import torch

from dpsur.core.types import Examples
from dpsur.tasks.base import VECTORS, Task
from dpsur.tasks.datasets import IMDB, load_arrays
from dpsur.tasks.datasets.base import Array, Arrays

# More frequent words say little about a film, rarer ones are seen too seldom to be learned.
FIRST_RANK, LAST_RANK = 50, 5000
WORDS = LAST_RANK - FIRST_RANK + 1
# Rare words tell more. Frequencies fall like one over the rank, so that the logarithm of the rank
# stands in for the usual weight, the logarithm of an inverse frequency, and needs no record.
WEIGHTLESS_RANK = 20


def load(data_dir: Path | None = None) -> tuple[Examples, Examples]:
    """Training and test records: a vector for each review, and 1 for a positive one."""
    arrays = load_arrays(IMDB, data_dir)
    return _examples(arrays, "train"), _examples(arrays, "test")


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
    """The weight of each word."""
    return np.log(np.arange(FIRST_RANK, LAST_RANK + 1) / WEIGHTLESS_RANK)


def _examples(arrays: Arrays, part: str) -> Examples:
    vectors = word_vectors(arrays[f"{part}_tokens"], arrays[f"{part}_offsets"])
    labels = torch.from_numpy(arrays[f"{part}_labels"].astype(np.int64))
    return Examples(vectors, labels)


IMDB_WORDS_TASK = Task(
    name="imdb-words",
    summary="IMDb film reviews as counts of words (25,000 to train, 25,000 to test)",
    networks={VECTORS: {"name": "linear", "inputs": WORDS, "classes": 2}},
    load=load,
)
