"""What a user declares about the columns of a table: nothing is inferred from the records.

Every record becomes a row of numbers by itself, by the schema alone: numbers are clipped to their
declared range and scaled to [-1, 1], categories become one number each and one for everything that
was not declared, texts become weighted words, missing values get a declared value. Shapes, names
and errors are therefore the same whatever a record holds, and adding or removing one record adds or
removes one row.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur import checks
from dpsur.display import html_table
from dpsur.errors import InvalidInputError
from dpsur.features import TableLayout
from dpsur.functional.problem import LossFunction
from dpsur.functional.records import Examples
from dpsur.networks import build_network
from dpsur.privacy.events import ThresholdedGaussian
from dpsur.tasks.base import HIDDEN, WIDEST_FOR_HIDDEN_LAYER
from dpsur.tasks.columns import (
    Category,
    Column,
    Number,
    Table,
    Text,
    Values,
    column_names,
    numbers_of,
)

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
        several = len(self.target) > 1
        for name, column in self.target.items():
            count = len(column.values) if isinstance(column, Category) else None
            if several and count != 2:
                raise InvalidInputError(
                    f"target {name!r} is one of several, which must be categories of two values "
                    "each; name one target, or declare its two values"
                )
            if count is not None and count < 2:
                raise InvalidInputError(f"target {name!r} needs at least two values")

    def __repr__(self) -> str:
        return f"Schema({len(self.columns)} columns, target {', '.join(self.target)})"

    def _repr_html_(self) -> str:
        every = [(name, column, "") for name, column in self.columns.items()]
        every += [(name, column, "target: ") for name, column in self.target.items()]
        rows = [(name, f"{role}{_in_words(column)}") for name, column, role in every]
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
        (first, *more) = self.target.values()
        if more:
            return len(self.target)
        return len(first.values) if isinstance(first, Category) else 1

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
        if name == AUTO and not self.is_text:
            inputs = self.layout.features
            return {"name": "linear-head", "inputs": inputs, "classes": self.outputs}
        if name in (None, AUTO) and self.is_text:
            return {"name": "linear-head", "inputs": self.width, "classes": self.outputs}
        if name is None:
            name = MLP if self.width <= WIDEST_FOR_HIDDEN_LAYER else LINEAR
        if name not in (LINEAR, MLP):
            raise InvalidInputError(
                f"unknown model {name!r} for a table; choose {AUTO}, {LINEAR} or {MLP}, or build a "
                "module"
            )
        hidden = {"hidden": HIDDEN} if name == MLP else {}
        return {"name": name, "inputs": self.width, **hidden, "classes": self.outputs}

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
                scaled = column.scaled(numbers_of(columns[name]))
                missing = np.nan
                if column.missing is not None:
                    missing = (column.missing - column.middle) / column.half
                found.append(np.where(np.isnan(scaled), missing, scaled))
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
        rows = [np.array(column.values, dtype=object) for column in self._categories()]
        chosen = (outputs > 0).long().cpu().numpy()
        return np.stack([row[chosen[:, place]] for place, row in enumerate(rows)], axis=1)

    def _categories(self) -> Iterable[Category]:
        return (column for column in self.target.values() if isinstance(column, Category))

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
            part = (
                {"share": self.test.share} if self.test.file is None else {"file": self.test.file}
            )
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
        columns, target = (_columns(stored, part) for part in ("columns", "target"))
        return cls(columns, target, _test_part(stored.get("test")), _learned_part(stored))

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


def _columns(stored: Mapping[str, Any], part: str) -> dict[str, Column]:
    found = stored.get(part)
    if not isinstance(found, Mapping):
        raise InvalidInputError(f"the schema has no {part}; name the columns there")
    read = {name: _column(name, value) for name, value in found.items()}
    return {name: column for name, column in read.items() if column is not None}


def _column(name: str, stored: Any) -> Column | None:
    """A column from plain values; None for one that is not used."""
    try:
        if not isinstance(stored, Mapping):
            raise InvalidInputError("it must be an object with a kind")
        kind = stored.get("kind")
        if kind == "ignore":
            return None
        values = {key: value for key, value in stored.items() if key != "kind"}
        if kind == Number.kind:
            _drop_empty(values, "values")
            _only(values, ("low", "high", "missing"), "a number")
            if values.get("low") is None or values.get("high") is None:
                raise InvalidInputError("a number needs low and high, the range that is public")
            return Number(**values)
        if kind == Category.kind:
            _drop_empty(values, "low", "high")
            _only(values, ("values", "other"), "a category")
            if not values.get("values"):
                raise InvalidInputError("a category needs values, the list that is public")
            return Category(**values)
        if kind == Text.kind:
            _drop_empty(values, "low", "high", "values")
            _only(values, ("dimension",), "a text")
            return Text(**values)
        given = "and is not filled in yet" if kind in TO_FILL_IN else f"got {kind!r}"
        raise InvalidInputError(f"kind must be number, category, text or ignore, {given}")
    except InvalidInputError as error:
        raise InvalidInputError(f"column {name!r}: {error}") from None


def _in_words(column: Column) -> str:
    if isinstance(column, Number):
        return f"number from {column.low:g} to {column.high:g}"
    if isinstance(column, Category):
        shown = ", ".join(map(str, column.values[:8])) + (", ..." if len(column.values) > 8 else "")
        return f"one of {shown}"
    return "text"


def _drop_empty(values: dict[str, Any], *names: str) -> None:
    """Leave out what a template has and nobody filled in."""
    for name in names:
        if values.get(name) in (None, []):
            values.pop(name, None)


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


def _learned_part(stored: Mapping[str, Any]) -> Learned | None:
    """How a stored schema was learned; None for one that was declared."""
    found = stored.get("learned")
    if found is None:
        return None
    names = [field.name for field in fields(Learned)]
    if not isinstance(found, Mapping) or sorted(found) != sorted(names):
        raise InvalidInputError(f"learned of a schema must have {', '.join(names)}")
    return Learned(**found)


def _only(values: Mapping[str, Any], known: Sequence[str], owner: str) -> None:
    for name in values:
        if name not in known:
            raise InvalidInputError(f"{owner} has no {name!r}; it has {', '.join(known)}")
