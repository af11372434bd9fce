"""The words of privacy statements, of their pages and of model cards, by version.

A statement names the version that it was written with, and `dpsur verify` renders it with that one.
To say something better, write `words/2.toml` with the reworded entries only: it lies on top of the
version before. What was released keeps its words and verifies.

An entry is a template, which is filled with `str.format`. An entry of a table has its label and its
value on both sides of a bar; a version that lacks such an entry leaves the row out.
"""

import tomllib
from pathlib import Path
from typing import Any, Final


class Words(dict[str, str]):
    """Templates of one version by name."""

    def __call__(self, name: str, /, **values: Any) -> str:
        return self[name].format(**values)

    def rows(self, name: str, /, **values: Any) -> list[tuple[str, str]]:
        """One row of a table; none where this version has no such row."""
        if name not in self:
            return []
        label, _, value = self[name].partition(" | ")
        return [(label.format(**values), value.format(**values))]

    def lines(self, name: str) -> list[str]:
        """A template of several items, one to a line."""
        return self[name].splitlines()


def _read(folder: Path) -> dict[int, Words]:
    found: dict[int, Words] = {}
    for number, _ in enumerate(folder.glob("*.toml"), start=1):
        text = (folder / f"{number}.toml").read_text(encoding="utf-8")
        found[number] = Words({**found.get(number - 1, {}), **tomllib.loads(text)})
    return found


TEXTS: Final = _read(Path(__file__).with_name("words"))


def latest() -> int:
    """The version that new statements are written with."""
    return max(TEXTS)
