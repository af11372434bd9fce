"""Records that programs train on, and records that an adversary would put in the place of one.

Each kind has ordinary records, of which the last is exchanged, and extreme ones to exchange it for.
Class 2 is rare: only extreme records have it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

COUNT = 25
LAST = COUNT - 1  # its index: the positions of others do not move
FEATURES, CLASSES, WORDS, LENGTH = 6, 3, 30, 8

Record = Any


@dataclass(frozen=True)
class Kind:
    """Ordinary records of one kind, and extreme ones by name."""

    name: str
    ordinary: Callable[[], list[Record]]
    extreme: Mapping[str, Record]

    def worlds(self, names: tuple[str, ...] | None = None) -> dict[str, list[Record]]:
        """All records, with each of the extreme ones in the last place."""
        first = self.ordinary()
        found = {"duplicate": [*first[:LAST], first[0]]}
        found |= {name: [*first[:LAST], record] for name, record in self.extreme.items()}
        return {name: found[name] for name in names or found if name in found}


def _draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _labels() -> Tensor:
    return torch.randint(0, 2, (COUNT,), generator=_draws(2))


def _with_labels(shape: tuple[int, ...]) -> list[Record]:
    values = torch.randn(COUNT, *shape, generator=_draws(1)).to(torch.get_default_dtype())
    return list(zip(values, _labels(), strict=True))


def _extreme_values(shape: tuple[int, ...]) -> dict[str, Record]:
    def all_of(value: float, label: int) -> Record:
        return torch.full(shape, value), torch.tensor(label)

    one_missing = torch.ones(math.prod(shape))
    one_missing[0] = math.nan
    return {
        "huge": all_of(1e6, 2),
        "negative": all_of(-1e4, 2),
        "1e20": all_of(1e20, 2),
        "large": all_of(50.0, 1),
        "zeros": all_of(0.0, 2),
        "NaN": all_of(math.nan, 0),
        "one NaN": (one_missing.view(shape), torch.tensor(1)),
        "infinite": all_of(math.inf, 0),
    }


TABLE = Kind("table", lambda: _with_labels((FEATURES,)), _extreme_values((FEATURES,)))
IMAGES = Kind("images", lambda: _with_labels((3, 8, 8)), _extreme_values((3, 8, 8)))


def _with_missing_values() -> list[Record]:
    places = torch.arange(FEATURES) % 3
    return [
        (torch.where(places == i % 3, math.nan, values), label)
        for i, (values, label) in enumerate(_with_labels((FEATURES,)))
    ]


MISSING = Kind("table with missing values", _with_missing_values, TABLE.extreme)


def _regression() -> list[Record]:
    values = torch.randn(COUNT, FEATURES, generator=_draws(1)).to(torch.get_default_dtype())
    targets = torch.randn(COUNT, generator=_draws(2)).to(torch.get_default_dtype())
    return list(zip(values, targets, strict=True))


def _pair(value: float, target: float) -> Record:
    return torch.full((FEATURES,), value), torch.tensor(target)


REGRESSION = Kind(
    "regression",
    _regression,
    {
        "huge": _pair(1e3, 1e6),
        "huge target": _pair(1.0, 1e8),
        "large": _pair(50.0, 10.0),
        "zeros": _pair(0.0, 0.0),
        "NaN": _pair(math.nan, 0.0),
        "NaN target": _pair(1.0, math.nan),
        "infinite": _pair(math.inf, 0.0),
    },
)


def _texts(most: int = LENGTH, *, padded: bool = True) -> list[Record]:
    lengths = torch.randint(3, most + 1, (COUNT,), generator=_draws(3))
    words = torch.randint(2, WORDS - 2, (COUNT, LENGTH), generator=_draws(4))
    if not padded:
        cut = [text[:length] for text, length in zip(words, lengths.tolist(), strict=True)]
        return list(zip(cut, _labels(), strict=True))
    words = words.masked_fill(torch.arange(LENGTH) >= lengths[:, None], 0)
    return list(zip(words, _labels(), strict=True))


def _text(words: list[int], label: int) -> Record:
    return torch.tensor(words), torch.tensor(label)


_ALL_WORDS = torch.randint(2, WORDS, (40,), generator=_draws(9)).tolist()

# Texts in rows of equal length, where 0 is padding.
TEXTS = Kind(
    "texts",
    lambda: _texts(4),
    {
        "longest": _text(_ALL_WORDS[:LENGTH], 2),
        "one token": _text([5] + [0] * (LENGTH - 1), 2),
        "special ids": _text([WORDS - 1] * LENGTH, 2),
        "only padding": _text([0] * LENGTH, 1),
    },
)
# Texts of different lengths, which a collate function pads.
RAGGED = Kind(
    "texts of different lengths",
    lambda: _texts(padded=False),
    {
        "longest": _text(_ALL_WORDS, 2),
        "one token": _text([5], 2),
        "special ids": _text([WORDS - 1] * 20, 2),
        "only padding": _text([0, 0, 0], 1),
    },
)


def _as_tokenized(texts: Kind, labels: Callable[[Record], Tensor]) -> Kind:
    """The same texts as a tokenizer of Hugging Face gives them."""

    def tokenized(record: Record) -> Record:
        words = record[0]
        mask = (words != 0).long()
        mask[0] = 1  # a text has at least its first token
        return {"input_ids": words, "attention_mask": mask, "labels": labels(record)}

    return Kind(
        f"tokenized {texts.name}",
        lambda: [tokenized(record) for record in texts.ordinary()],
        {name: tokenized(record) for name, record in texts.extreme.items()},
    )


def _next_words(record: Record) -> Tensor:
    words = record[0]
    return torch.where(words == 0, -100, words)


CLASSIFIED = _as_tokenized(TEXTS, lambda record: record[1])
LANGUAGE = _as_tokenized(TEXTS, _next_words)
RAGGED_LANGUAGE = _as_tokenized(RAGGED, _next_words)


def _segmentation() -> list[Record]:
    images = torch.randn(COUNT, 3, 8, 8, generator=_draws(1)).to(torch.get_default_dtype())
    return list(zip(images, (images[:, 0] > 0).long(), strict=True))


SEGMENTATION = Kind(
    "segmentation",
    _segmentation,
    {
        name: (values, torch.full((8, 8), int(label)))
        for name, (values, label) in IMAGES.extreme.items()
    },
)
