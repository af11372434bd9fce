"""Texts as rows of weighted words, without looking at any other text.

Formal guarantee: the row of a text depends on that text alone. Words are hashed to places, so there
is no vocabulary to learn from private texts, and the weights come from no private count. So the
rows cost no privacy.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.features.hashing import hashed_counts

#: Numbers of a row, unless another number is asked for.
WORDS_DIMENSION = 8192


def words(texts: Iterable[str], dimension: int = WORDS_DIMENSION) -> Tensor:
    """One row of norm 1 for every text, (N, dimension): log counts of its words, hashed.

    Case is ignored and the hundred most common English words are left out. A text without any other
    word is a row of zeros. Use the same function on texts that the trained model is to see.
    """
    checks.at_least_one("dimension", dimension)
    if isinstance(texts, str):
        raise InvalidInputError("texts must be a list of texts, got one text; write [text]")
    listed = list(texts)
    for number, text in enumerate(listed):
        if not isinstance(text, str):
            raise InvalidInputError(
                f"texts must hold strings, but item {number} is of type {type(text).__name__}"
            )
    return torch.nn.functional.normalize(torch.from_numpy(hashed_counts(listed, dimension)))
