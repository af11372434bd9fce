"""Counts of the words of texts, at hashed places. Needs numpy alone: an export holds a copy.

rows = hashed_counts(["first text", "second text"], 8192)
"""

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

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


def hashed_counts(texts: Sequence[str], dimension: int) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """A row for every text: log counts of its words, those of common English words left out."""
    rows = np.zeros((len(texts), dimension), np.float32)
    for row, text in zip(rows, texts, strict=True):
        counts = Counter(word for word in _WORD.findall(text.lower()) if word not in COMMON_WORDS)
        for word, count in counts.items():
            place, sign = _place(word, dimension)
            row[place] += sign * np.log1p(count)
    return rows


@lru_cache(maxsize=1 << 16)
def _place(word: str, dimension: int) -> tuple[int, float]:
    """Where a word is counted, and with which sign, so that collisions cancel on average."""
    digest = zlib.crc32(word.encode())
    return (digest >> 1) % dimension, 1.0 if digest & 1 else -1.0
