"""What a user declares about the columns of a table: nothing is inferred from the records.

Every record becomes a row of numbers on its own, by the schema alone: numbers are clipped to their
declared range and scaled to [-1, 1], categories become one number each and one for everything that
was not declared, texts become weighted words, missing values get a declared value. Shapes, names
and errors are therefore the same whatever a record holds, and adding or removing one record adds or
removes one row.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.features.table import WORDS_DIMENSION, TableLayout, words
from dpsur.functional.problem import LossFunction
from dpsur.functional.records import Examples
from dpsur.networks import build_network, for_vectors
from dpsur.privacy.events import ThresholdedGaussian
from dpsur.status import html_table

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


class _AsJson:
    """A declaration as plain values: its kind, and what differs from the defaults."""

    kind: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        found: dict[str, Any] = {"kind": self.kind}
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if value != one.default:
                found[one.name] = list(value) if isinstance(value, tuple) else value
        return found


@dataclass(frozen=True)
class Number(_AsJson):
    """A column of numbers in a declared range.

    Numbers beyond the range are clipped to it. `missing` stands in for what is missing or no
    number; it is the middle of the range unless another value is declared.
    """

    low: float
    high: float
    missing: float | None = None
    kind: ClassVar[str] = "number"
    width: ClassVar[int] = 1  # how many numbers it becomes

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

    def encode(self, values: Any) -> Values:
        """Scaled numbers in [-1, 1], one row for each value; missing ones have their declared."""
        return self.scaled(values, 0.0).astype(np.float32)[:, None]

    def scaled(self, values: Any, otherwise: float) -> Values:
        """Clipped and scaled numbers; missing ones have their declared, or else `otherwise`."""
        clipped: Values = np.clip(numbers_of(values), self.low, self.high)
        found = (clipped - self.middle) / self.half
        missing = otherwise if self.missing is None else (self.missing - self.middle) / self.half
        return np.where(np.isnan(found), missing, found)


@dataclass(frozen=True)
class Category(_AsJson):
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
        keys = (str(value) if isinstance(value, bool) else value for value in listed)
        return np.fromiter(map(place_of, keys), np.int64)

    def encode(self, values: Any) -> Values:
        """A one at the place of the value, one row for each value."""
        found = self.indices(values)
        rows = np.zeros((len(found), self.width), np.float32)
        rows[np.arange(len(found)), np.where(found < 0, len(self.values), found)] = 1
        return rows


@dataclass(frozen=True)
class Text(_AsJson):
    """A column of texts: each becomes a row of weighted words of norm 1, by hashing.

    Nothing is learned from the texts: a word's place follows from its letters alone (see
    `dpsur.features.table`). What is missing or no text counts as a text without words.
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


Column = Number | Category | Text


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


FORMAT = "dpsur-schema/1"
LINEAR, MLP = "linear", "mlp"
# The model that suits a private table: linear, on the features `table`.
AUTO = "auto"
# What a template has in place of the kind of a column, and of a target.
TO_FILL_IN = ("number, category, text or ignore", "number or category")


@dataclass(frozen=True)
class TestPart:
    """The records to test on, which the user declares to be public.

    Either `file`, or `share`: about this share of the records, each by a draw from its own values.
    """

    __test__ = False  # for pytest
    file: str | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if (self.file is None) == (self.share is None):
            raise InvalidInputError("test of a schema must name either a file or a share")
        if self.share is not None and not (
            isinstance(self.share, (int, float)) and 0 < self.share < 1
        ):
            raise InvalidInputError(
                f"share of test must be above 0 and below 1, got {self.share!r}"
            )


@dataclass(frozen=True)
class Learned:
    """How a schema was learned from private records (`dpsur.learn_schema`), all of it public.

    `columns` of a table were counted with this noise, and a value that one record alone has was
    listed with a chance of at most `threshold_delta`. Alone that costs `epsilon` at `delta`.
    """

    noise_multiplier: float
    threshold_delta: float
    columns: int
    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        for name in ("noise_multiplier", "epsilon"):
            checks.positive(f"learned.{name}", getattr(self, name))
        for name in ("threshold_delta", "delta"):
            checks.probability(f"learned.{name}", getattr(self, name))
        checks.at_least_one("learned.columns", self.columns)

    @property
    def event(self) -> ThresholdedGaussian:
        """What every run with the schema is charged."""
        return ThresholdedGaussian(self.noise_multiplier, self.threshold_delta)


@dataclass(frozen=True, repr=False)
class Schema:
    """The columns of a table that are used, and the target.

    `columns` maps names to `Number`, `Category` or `Text`; other columns of the table are ignored.
    `target` is one column: a `Number` makes it a regression, a `Category` a classification. Several
    columns, each a `Category` of two values of which the second is positive, are a multi-label
    target.
    `test` names public records to test on. `learned` says that the columns were learned from the
    private records, which runs are charged for. All of it is public, and a release states it.
    """

    columns: Mapping[str, Column]
    target: Mapping[str, Column]
    test: TestPart | None = None
    learned: Learned | None = None

    def __post_init__(self) -> None:
        inputs = ((Number, Category, Text), "Number, Category or Text")
        targets = ((Number, Category), "Number or Category")
        for part, (kinds, known) in (("columns", inputs), ("target", targets)):
            found = getattr(self, part)
            if not isinstance(found, Mapping) or not found:
                raise InvalidInputError(f"{part} of a schema must name at least one column")
            for name, column in found.items():
                if not isinstance(name, str) or not isinstance(column, kinds):
                    raise InvalidInputError(
                        f"{part} of a schema must map names to {known}, got {name!r}: {column!r}"
                    )
        both = [name for name in self.columns if name in self.target]
        if both:
            raise InvalidInputError(f"column {both[0]!r} is an input and a target; choose one")
        for name, column in self.target.items():
            count = len(column.values) if isinstance(column, Category) else None
            if len(self.target) > 1 and count != 2:
                raise InvalidInputError(
                    f"target {name!r} is one of several, which must be categories of two values "
                    "each; name one target, or declare its two values"
                )
            if count is not None and count < 2:
                raise InvalidInputError(f"target {name!r} needs at least two values")

    def __repr__(self) -> str:
        return f"Schema({len(self.columns)} columns, target {', '.join(self.target)})"

    def _repr_html_(self) -> str:
        rows = [
            (name, f"{role}{in_words(column)}")
            for role, part in (("", self.columns), ("target: ", self.target))
            for name, column in part.items()
        ]
        return html_table(f"Schema of {len(self.columns)} columns", rows)

    # --- what follows from it ---------------------------------------------------------------------

    @property
    def width(self) -> int:
        """How many numbers a record becomes."""
        return sum(column.width for column in self.columns.values())

    @property
    def layout(self) -> TableLayout:
        """Where the numbers are among the inputs."""
        numbers, width = [], 0
        for column in self.columns.values():
            if isinstance(column, Number):
                numbers.append(width)
            width += column.width
        charged = () if self.learned is None else (self.learned.event,)
        return TableLayout(width, len(self.columns), tuple(numbers), charged)

    @property
    def is_text(self) -> bool:
        """Whether a record is one text and nothing else: a row of weighted words of norm 1."""
        return [type(column) for column in self.columns.values()] == [Text]

    @property
    def outputs(self) -> int:
        """How many outputs a model has."""
        (first, *_) = self.target.values()
        single = len(self.target) == 1
        return len(first.values) if single and isinstance(first, Category) else len(self.target)

    @property
    def kind(self) -> str:
        """`classes`, `labels` (several of them at once) or `number`."""
        (first, *more) = self.target.values()
        if more:
            return "labels"
        return "classes" if isinstance(first, Category) else "number"

    @property
    def loss(self) -> LossFunction:
        """The usual loss of such a target."""
        if self.kind == "classes":
            return F.cross_entropy
        if self.kind == "labels":
            return F.binary_cross_entropy_with_logits
        (column,) = self.target.values()
        assert isinstance(column, Number)
        return RangeLoss(column.half)

    def network(self, name: str | None = None) -> dict[str, Any]:
        """The description of a network: `linear` or `mlp`, by default what suits the width.

        `auto` takes the features `table` of the inputs instead of the inputs.
        """
        if name == AUTO or (name is None and self.is_text):
            inputs = self.width if self.is_text else self.layout.features
            return {"name": "linear-head", "inputs": inputs, "classes": self.outputs}
        if name not in (None, LINEAR, MLP):
            raise InvalidInputError(
                f"unknown model {name!r} for a table; choose {AUTO}, {LINEAR} or {MLP}, or build a "
                "module"
            )
        return for_vectors(self.width, self.outputs, None if name is None else name == MLP)

    def model(self, name: str | None = None) -> nn.Module:
        """A network for these records: `linear` or `mlp`, by default what suits the width."""
        return build_network(self.network(name))

    # --- records ----------------------------------------------------------------------------------

    def inputs(self, table: Any) -> Tensor:
        """The inputs of a data frame, or of a mapping of columns, as rows of numbers."""
        columns = self._columns(table, self.columns)
        parts = [column.encode(columns[name]) for name, column in self.columns.items()]
        return torch.from_numpy(np.concatenate(parts, axis=1))

    def targets(self, table: Any) -> tuple[Tensor, Tensor]:
        """The targets, and which records have one that was declared."""
        columns = self._columns(table, self.target)
        found = []
        for name, column in self.target.items():
            if isinstance(column, Category):
                found.append(column.indices(columns[name]).astype(np.float64))
                found[-1][found[-1] < 0] = np.nan
            elif isinstance(column, Number):
                found.append(column.scaled(columns[name], np.nan))
        values = np.stack(found, axis=1)
        usable = np.asarray(~np.isnan(values).any(axis=1))
        targets = torch.from_numpy(np.where(usable[:, None], values, 0.0))
        if self.kind == "classes":
            return targets[:, 0].long(), torch.from_numpy(usable)
        return targets.float(), torch.from_numpy(usable)

    def records(self, table: Any) -> Examples:
        """The records of a data frame, or of a mapping of columns.

        Records whose target was not declared are left out. That is decided for each record by
        itself; the number of those that are left counts as public.
        """
        inputs, (targets, usable) = self.inputs(table), self.targets(table)
        if not bool(usable.any()):
            raise InvalidInputError(
                f"no record has a target ({', '.join(self.target)}) that the schema declares; "
                "correct the schema or the table"
            )
        return Examples(inputs[usable], targets[usable])

    def decode(self, outputs: Tensor) -> Values:
        """Predictions in the words and units of the table, from outputs of a model."""
        (first, *more) = self.target.values()
        if isinstance(first, Number):
            scaled: Values = outputs.detach().cpu().double().reshape(len(outputs)).numpy()
            return scaled * first.half + first.middle
        if not more and isinstance(first, Category):
            names: Values = np.array(first.values, dtype=object)
            return names.take(outputs.argmax(1).cpu().numpy())
        chosen, rows = (outputs > 0).long().cpu().numpy(), []
        for place, column in enumerate(self.target.values()):
            assert isinstance(column, Category)
            rows.append(np.array(column.values, dtype=object)[chosen[:, place]])
        return np.stack(rows, axis=1)

    @staticmethod
    def _columns(table: Any, wanted: Mapping[str, Column]) -> Table:
        names = column_names(table)
        for name in wanted:
            if name not in names:
                shown = ", ".join(map(str, names[:20]))
                raise InvalidInputError(
                    f"the table has no column {name!r}, which the schema declares; it has {shown}"
                )
        lengths = {name: len(table[name]) for name in wanted}
        if len(set(lengths.values())) > 1:
            raise InvalidInputError("the columns of the table have different lengths")
        if not next(iter(lengths.values())):
            raise InvalidInputError("the table is empty; there must be at least one record")
        return {name: table[name] for name in wanted}

    # --- as a file --------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """As plain values; `Schema.from_json` reads them."""
        found: dict[str, Any] = {
            "format": FORMAT,
            "columns": {name: column.to_json() for name, column in self.columns.items()},
            "target": {name: column.to_json() for name, column in self.target.items()},
        }
        if self.test is not None:
            part = {key: value for key, value in asdict(self.test).items() if value is not None}
            found["test"] = {**part, "public": True}
        if self.learned is not None:
            found["learned"] = asdict(self.learned)
        return found

    def to_public(self) -> dict[str, Any]:
        """What a release states: the same without the place of a file."""
        found = self.to_json()
        if self.test is not None and self.test.file is not None:
            del found["test"]
        return found

    @classmethod
    def from_json(cls, stored: Any) -> Self:
        """A schema from plain values. Anything else is refused by name."""
        if not isinstance(stored, Mapping):
            raise InvalidInputError("a schema must be an object with columns and target")
        _only(stored, ("format", "columns", "target", "test", "learned"), "a schema")
        if stored.get("format", FORMAT) != FORMAT:
            raise InvalidInputError(
                f"format of the schema is {stored['format']!r}; this version reads {FORMAT}"
            )
        parts: dict[str, dict[str, Column]] = {}
        for part in ("columns", "target"):
            given = stored.get(part)
            if not isinstance(given, Mapping):
                raise InvalidInputError(f"the schema has no {part}; name the columns there")
            read = {name: _column(name, value) for name, value in given.items()}
            parts[part] = {name: column for name, column in read.items() if column is not None}
        test, learned = _test_part(stored.get("test")), _learned_part(stored.get("learned"))
        return cls(**parts, test=test, learned=learned)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a schema from a JSON file."""
        try:
            content = json.loads(Path(path).read_bytes())
        except OSError as error:
            raise InvalidInputError(
                f"the schema {path} cannot be read ({error.strerror}); write one with: dpsur data "
                "schema FILE"
            ) from None
        except (ValueError, RecursionError) as error:
            reason = str(error).splitlines()[0]
            raise InvalidInputError(f"the schema {path} is not JSON: {reason}") from None
        try:
            return cls.from_json(content)
        except InvalidInputError as error:
            raise InvalidInputError(f"{path}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the schema as a JSON file."""
        Path(path).write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")


class RangeLoss(nn.Module):
    """Squared error of a target that is scaled by its declared range.

    `unit` is what 1 stands for in the units of the target, so that errors can be stated in them.
    """

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.unit = unit

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean squared error, in units of the declared range."""
        return F.mse_loss(outputs, targets)


def template(names: Sequence[str], targets: Sequence[str]) -> dict[str, Any]:
    """A schema to fill in, from the names of the columns alone."""
    blank: dict[str, Any] = {"low": None, "high": None, "values": []}
    return {
        "format": FORMAT,
        "columns": {
            name: {"kind": TO_FILL_IN[0], **blank} for name in names if name not in targets
        },
        "target": {name: {"kind": TO_FILL_IN[1], **blank} for name in targets},
        "test": {"share": 0.2, "public": "true or false: are these records public?"},
    }


_KINDS: dict[str, type[Column]] = {one.kind: one for one in (Number, Category, Text)}


def _column(name: str, stored: Any) -> Column | None:
    try:
        if not isinstance(stored, Mapping):
            raise InvalidInputError("it must be an object with a kind")
        kind = stored.get("kind")
        if kind == "ignore":
            return None
        column = _KINDS.get(kind) if isinstance(kind, str) else None
        if column is None:
            given = "and is not filled in yet" if kind in TO_FILL_IN else f"got {kind!r}"
            raise InvalidInputError(f"kind must be number, category, text or ignore, {given}")
        known = tuple(one.name for one in fields(column))
        values = {key: value for key, value in stored.items() if key != "kind"}
        for blank in ("low", "high", "values"):  # of a template, and not filled in
            if blank not in known and values.get(blank) in (None, []):
                values.pop(blank, None)
        _only(values, known, f"a {kind}")
        if column is Number and None in (values.get("low"), values.get("high")):
            raise InvalidInputError("a number needs low and high, the range that is public")
        if column is Category and not values.get("values"):
            raise InvalidInputError("a category needs values, the list that is public")
        return column(**values)
    except InvalidInputError as error:
        raise InvalidInputError(f"column {name!r}: {error}") from None


def in_words(column: Column) -> str:
    if isinstance(column, Number):
        return f"number from {column.low:g} to {column.high:g}"
    if isinstance(column, Category):
        shown = ", ".join(map(str, column.values[:8])) + (", ..." if len(column.values) > 8 else "")
        return f"one of {shown}"
    return "text"


def _test_part(stored: Any) -> TestPart | None:
    if stored is None:
        return None
    if not isinstance(stored, Mapping):
        raise InvalidInputError("test of a schema must be an object with a file or a share")
    _only(stored, ("file", "share", "public"), "test")
    if stored.get("public") is not True:
        raise InvalidInputError(
            "figures on the test records are published without noise: declare "
            '"test": {..., "public": true} if those records are public, or leave test out'
        )
    return TestPart(stored.get("file"), stored.get("share"))


def _learned_part(stored: Any) -> Learned | None:
    if stored is None:
        return None
    names = [field.name for field in fields(Learned)]
    if not isinstance(stored, Mapping) or sorted(stored) != sorted(names):
        raise InvalidInputError(f"learned of a schema must have {', '.join(names)}")
    return Learned(**stored)


def _only(values: Mapping[str, Any], known: Sequence[str], owner: str) -> None:
    for name in values:
        if name not in known:
            raise InvalidInputError(f"{owner} has no {name!r}; it has {', '.join(known)}")
