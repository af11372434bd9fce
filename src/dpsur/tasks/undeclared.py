"""Values of a table that its schema does not declare, counted, so that no mistake stays silent.

A class that is misspelt in the schema drops all its records, a category becomes "other", a number
that is none becomes the middle of its range. How often that happens is private, unless the records
are public: counts of training records go to the private folder of a run, and warnings come from
public test records alone.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from dpsur.tasks.columns import Category, Column, Number, Text, Values, name_of, numbers_of
from dpsur.tasks.schema import Schema

# Shares of public records from which a warning is due: of targets, and of other columns.
LARGE_FOR_TARGETS, LARGE = 0.02, 0.2
# What a value is that its column does not declare, and what becomes of it.
_EFFECTS: dict[type[Column], tuple[str, str]] = {
    Category: ("not among the declared values", "made 'other'"),
    Number: ("no numbers", "made the middle"),
    Text: ("no texts", "made empty"),
}
# Fewer public records may lack a class by chance.
ENOUGH = 100


@dataclass(frozen=True)
class Undeclared:
    """For each record and column whether its value is there and not declared, and its class."""

    schema: Schema
    flags: Values  # records x columns, the targets last
    classes: Values  # the class of each record, -1 where there is none

    @classmethod
    def of(cls, schema: Schema, table: Any) -> "Undeclared":
        """Look at every value of a table."""
        columns = {**schema.columns, **schema.target}
        flags = [_not_declared(column, table[name]) for name, column in columns.items()]
        classes = np.full(len(flags[0]), -1)
        (target, *_) = schema.target
        if schema.kind == "classes":
            column = schema.target[target]
            assert isinstance(column, Category)
            classes = column.indices(np.asarray(table[target], object))
        return cls(schema, np.stack(flags, axis=1), classes)

    def select(self, rows: Values) -> "Undeclared":
        return Undeclared(self.schema, self.flags[rows], self.classes[rows])

    @classmethod
    def join(cls, parts: list["Undeclared"]) -> "Undeclared":
        flags = np.concatenate([part.flags for part in parts])
        return cls(parts[0].schema, flags, np.concatenate([part.classes for part in parts]))

    def to_json(self) -> dict[str, Any]:
        """All counts: private, where the records are."""
        found: dict[str, Any] = {"records": len(self.flags), "not_declared": self._counts()}
        if self.schema.kind == "classes":
            found["classes"] = self._by_class()
        return found

    def warnings(self) -> list[str]:
        """What to say of public test records."""
        total, counts = len(self.flags), self._counts()
        if not total:
            return []
        found = []
        for name, count in counts.items():
            share, is_target = count / total, name in self.schema.target
            if share < (LARGE_FOR_TARGETS if is_target else LARGE):
                continue
            column = self.schema.target[name] if is_target else self.schema.columns[name]
            what, effect = _EFFECTS[type(column)]
            effect = "left out" if is_target else effect
            found.append(
                f"{share:.0%} of the test records have values of {name!r} that are {what}, and "
                f"were {effect}; check the schema: spelling, upper and lower case, units"
            )
        if self.schema.kind == "classes" and total >= ENOUGH:
            (target,) = self.schema.target
            found += [
                f"class {name!r} of {target!r} has none of the {total:,} test records; check its "
                "spelling in the schema"
                for name, count in self._by_class().items()
                if not count
            ]
        return found

    def _counts(self) -> dict[str, int]:
        names = [*self.schema.columns, *self.schema.target]
        return dict(zip(names, self.flags.sum(0).tolist(), strict=True))

    def _by_class(self) -> dict[str, int]:
        (column,) = self.schema.target.values()
        assert isinstance(column, Category)
        return {
            name: int((self.classes == place).sum()) for place, name in enumerate(column.values)
        }


def _not_declared(column: Column, values: Any) -> Values:
    """Which values are there and not declared; what is missing is not among them."""
    listed = np.asarray(values, object)
    if isinstance(column, Category):
        found = column.indices(listed) < 0
    elif isinstance(column, Text):
        found = np.array([not isinstance(value, str) for value in listed], bool)
    else:
        found = np.isnan(numbers_of(values))
    places = np.flatnonzero(found)
    found[places] = [name_of(listed[place]) is not None for place in places]
    return np.asarray(found)
