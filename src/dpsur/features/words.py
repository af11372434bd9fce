"""Texts as rows of weighted words, without looking at any other text.

Formal guarantee: the row of a text depends on that text alone. Words are hashed to places, so there
is no vocabulary to learn from private texts, and the weights come from no private count. So the
rows cost no privacy.
"""

import re
import zlib
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dpsur import checks
from dpsur.errors import InvalidInputError

#: Numbers of a row, unless another number is asked for.
WORDS_DIMENSION = 8192
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
# The most frequent words of English say little about what a text is about.
_COMMON_TEXT = """
a about after all also am an and any are as at be because been before being but by can could did do
does doing for from had has have having he her here hers him his how i if in into is it its just me
more most my of on only or other our out over own she so some such than that the their them then
there these they this those through to too up very was we were what when where which while who whom
why will with would you your
"""
COMMON_WORDS = frozenset(_WORD.findall(_COMMON_TEXT))


def words(texts: Iterable[str], dimension: int = WORDS_DIMENSION) -> Tensor:
    """One row of norm 1 for every text, (N, dimension): log counts of its words, hashed.

    Case is ignored and the hundred most common English words are left out. A text without any other
    word is a row of zeros. Use the same function on texts that the trained model is to see.
    """
    checks.at_least_one("dimension", dimension)
    if isinstance(texts, str):
        raise InvalidInputError("texts must be a list of texts, got one text; write [text]")
    rows = []
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidInputError(
                f"texts must hold strings, but item {number} is of type {type(text).__name__}"
            )
        rows.append(_row(text, dimension))
    if not rows:
        return torch.zeros(0, dimension)
    return torch.nn.functional.normalize(torch.from_numpy(np.stack(rows)))


def _row(text: str, dimension: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    row = np.zeros(dimension, dtype=np.float32)
    counts = Counter(word for word in _WORD.findall(text.lower()) if word not in COMMON_WORDS)
    for word, count in counts.items():
        place, sign = _place(word, dimension)
        row[place] += sign * np.log1p(count)
    return row


@lru_cache(maxsize=1 << 16)
def _place(word: str, dimension: int) -> tuple[int, float]:
    """Where a word is counted, and with which sign, so that collisions cancel on average."""
    digest = zlib.crc32(word.encode())
    return (digest >> 1) % dimension, 1.0 if digest & 1 else -1.0
