"""Columns of a table, as a user declares them: numbers in a range, categories and texts.

Every value becomes numbers by itself, by the declaration alone, whatever it is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.features.words import WORDS_DIMENSION, words

MOST_VALUES = 10_000
Values: TypeAlias = "np.ndarray[Any, Any]"
# A table: a data frame, or anything else with columns by name.
Table = Mapping[str, Any]
# Numbers that a text can become; more would fill the memory.
MOST_WORDS = 2**20


def column_names(table: Any) -> list[str]:
    """The names of the columns of a data frame or of a mapping."""
    if hasattr(table, "columns"):
        return [str(name) for name in table.columns]
    if hasattr(table, "column_names"):  # a Hugging Face data set
        return [str(name) for name in table.column_names]
    if isinstance(table, Mapping):
        return [str(name) for name in table]
    raise InvalidInputError(
        f"a table must be a data frame or a mapping of columns, got {type(table).__name__}"
    )


def numbers_of(values: Any) -> Values:
    """A column as numbers in double precision; NaN for what is missing or no number."""
    found = np.asarray(values)
    if found.dtype.kind in "iufb":
        return found.astype(np.float64)
    return np.fromiter(map(_number, found.tolist()), np.float64, len(found))


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


@dataclass(frozen=True)
class Number:
    """A column of numbers in a declared range.

    Numbers beyond the range are clipped to it. `missing` stands in for what is missing or no
    number; it is the middle of the range unless another value is declared.
    """

    low: float
    high: float
    missing: float | None = None
    kind: ClassVar[str] = "number"

    def __post_init__(self) -> None:
        for name in ("low", "high", "missing"):
            value = getattr(self, name)
            if value is None and name == "missing":
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise InvalidInputError(f"{name} of a number must be a number, got {value!r}")
            if not math.isfinite(value):
                raise InvalidInputError(f"{name} of a number must be finite, got {value}")
        if not self.low < self.high:
            raise InvalidInputError(
                f"low of a number must be below its high, got {self.low:g} and {self.high:g}"
            )
        if self.missing is not None and not self.low <= self.missing <= self.high:
            raise InvalidInputError(
                f"missing must be in the range {self.low:g} to {self.high:g}, got {self.missing:g}"
            )

    @property
    def middle(self) -> float:
        """The number that is scaled to 0."""
        return self.low + (self.high - self.low) / 2

    @property
    def half(self) -> float:
        """What 1 stands for, in the units of the column."""
        return (self.high - self.low) / 2

    @property
    def width(self) -> int:
        """How many numbers it becomes."""
        return 1

    def encode(self, values: Any) -> Values:
        """Scaled numbers in [-1, 1], one row for each value; missing ones have their declared."""
        found = self.scaled(numbers_of(values))
        missing = 0.0 if self.missing is None else (self.missing - self.middle) / self.half
        return np.where(np.isnan(found), missing, found).astype(np.float32)[:, None]

    def scaled(self, found: Values) -> Values:
        """Clipped and scaled numbers; NaN where a number is missing."""
        clipped: Values = np.clip(found, self.low, self.high)
        return (clipped - self.middle) / self.half

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        missing = {} if self.missing is None else {"missing": self.missing}
        return {"kind": self.kind, "low": self.low, "high": self.high, **missing}


@dataclass(frozen=True)
class Category:
    """A column with declared values.

    Of an input, everything else, missing values included, counts as one further category, or as the
    declared value that `other` names. Of a target, a record with anything else is left out, or
    counts as the class that `other` names.
    """

    values: Sequence[Any]
    other: Any = None
    kind: ClassVar[str] = "category"

    def __post_init__(self) -> None:
        given = self.values
        if isinstance(given, (str, bytes)) or not isinstance(given, (Sequence, np.ndarray)):
            raise InvalidInputError(f"values of a category must be a list, got {given!r}")
        names = [name_of(value) for value in given]
        if not 1 <= len(names) <= MOST_VALUES:
            raise InvalidInputError(
                f"a category must have 1 to {MOST_VALUES} values, got {len(names)}"
            )
        for place, name in enumerate(names):
            if name is None:
                raise InvalidInputError("a category has an empty value; leave it out")
            if name in names[:place]:
                raise InvalidInputError(f"a category has the value {name!r} twice; name it once")
        object.__setattr__(self, "values", tuple(names))
        if self.other is not None and name_of(self.other) not in names:
            raise InvalidInputError(
                f"other must be one of the values {', '.join(map(str, names[:10]))}, "
                f"got {self.other!r}"
            )
        object.__setattr__(self, "other", None if self.other is None else name_of(self.other))

    @property
    def width(self) -> int:
        """How many numbers it becomes: one for each value, and one for the others."""
        return len(self.values) + (self.other is None)

    def indices(self, values: Any) -> Values:
        """The place of every value, of others that of `other`; -1 where there is none."""
        places = {name: place for place, name in enumerate(self.values)}
        otherwise = -1 if self.other is None else places[self.other]
        known: dict[Any, int] = {}

        def place_of(value: Any) -> int:
            try:
                found = known.get(value)
            except TypeError:  # a list, say: it is no declared value
                return otherwise
            if found is None:
                name = name_of(value)
                found = otherwise if name is None else places.get(name, otherwise)
                if len(known) < 2 * MOST_VALUES:
                    known[value] = found
            return found

        # equal keys of other types (1, 1.0 and True) must not share an entry
        listed = values.tolist() if isinstance(values, np.ndarray) else list(values)
        return np.fromiter((place_of(value) for value in map(_keyed, listed)), np.int64)

    def encode(self, values: Any) -> Values:
        """A one at the place of the value, one row for each value."""
        found = self.indices(values)
        rows = np.zeros((len(found), self.width), np.float32)
        rows[np.arange(len(found)), np.where(found < 0, len(self.values), found)] = 1
        return rows

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        other = {} if self.other is None else {"other": self.other}
        return {"kind": self.kind, "values": list(self.values), **other}


@dataclass(frozen=True)
class Text:
    """A column of texts: each becomes a row of weighted words of norm 1, by hashing.

    Nothing is learned from the texts: a word's place follows from its letters alone (see
    `dpsur.features.words`). What is missing or no text counts as a text without words.
    """

    dimension: int = WORDS_DIMENSION
    kind: ClassVar[str] = "text"

    def __post_init__(self) -> None:
        checks.at_least_one("dimension", self.dimension)
        if self.dimension > MOST_WORDS:
            raise InvalidInputError(
                f"dimension of a text must be at most {MOST_WORDS}, got {self.dimension}"
            )

    @property
    def width(self) -> int:
        """How many numbers it becomes."""
        return self.dimension

    def encode(self, values: Any) -> Values:
        """Weighted words, one row for each text."""
        texts = (value if isinstance(value, str) else "" for value in values)
        found: Values = words(texts, self.dimension).numpy()
        return found

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        usual = self.dimension == WORDS_DIMENSION
        return {"kind": self.kind} | ({} if usual else {"dimension": self.dimension})


Column = Number | Category | Text


def _keyed(value: Any) -> Any:
    return str(value) if isinstance(value, bool) else value


def name_of(value: Any) -> str | None:
    """A value of a category as text, the same in a file and in a data frame; None for missing.

    Frames turn whole numbers into fractions where one record has none, so that 1 and 1.0 are the
    same category.
    """
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value))
    if isinstance(value, (float, np.floating)):
        if math.isnan(value):
            return None
        return str(int(value)) if float(value).is_integer() else str(float(value))
    if isinstance(value, str):
        text = value.strip()
        return text or None
    try:
        text = str(value)
    except Exception:  # whatever an object in a frame may raise
        return None
    return None if text in ("<NA>", "NaT", "nan") else text
