"""Releases with one value of the statement damaged: how many of them `verify` refuses.

`python -m tests.damages FOLDER [COUNT]` prints the rate for the releases in a folder, as they were
written and in the format of today. The pages beside a damaged statement are rendered from it, so
that only the statement itself can be found out.
"""

import contextlib
import copy
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpsur.errors import DpsurError
from dpsur.privacy.statement import current, render_markdown, render_model_card
from dpsur.runs.files import to_json
from dpsur.runs.verification import MALFORMED, verify


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every place in a statement, with what is there; of long lists the first item only."""
    items: Any = value.items() if isinstance(value, dict) else ()
    items = enumerate(value[:1]) if isinstance(value, list) else items
    for key, part in items:
        yield (*path, key), part
        yield from places(part, (*path, key))


def edits(statement: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Copies of a statement, each with one key dropped or added, or one value changed."""

    def edited(path: tuple[Any, ...], change: Any) -> dict[str, Any]:
        whole = copy.deepcopy(statement)
        parent: Any = whole
        for key in path[:-1]:
            parent = parent[key]
        change(parent, path[-1])
        return whole

    yield "note", "added", {**copy.deepcopy(statement), "note": "x"}
    for path, value in places(statement):
        if path == ("format",):
            continue
        where = ".".join(map(str, path))
        yield where, "dropped", edited(path, lambda parent, key: parent.pop(key))
        others: list[Any] = []
        if isinstance(value, dict):
            yield where, "added", edited(path, lambda parent, key: parent[key].update(note="x"))
        elif isinstance(value, bool):
            others = [not value]
        elif isinstance(value, int):
            others = [value + 1]
        elif isinstance(value, float):
            others = [0.99 * value, 1.01 * value] if value else [0.01]
        elif isinstance(value, str):
            others = ["made up"]
        elif value is None:
            others = [1, "made up"]
        for other in others:
            yield (
                where,
                other,
                edited(path, lambda parent, key, other=other: parent.__setitem__(key, other)),
            )


def is_refused(release: Path, statement: dict[str, Any]) -> bool:
    """Whether a release with another statement, and pages that match it, has faults."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "release"
        shutil.copytree(release, folder)
        (folder / "privacy.json").write_bytes(to_json(statement))
        with contextlib.suppress(*MALFORMED):  # a statement that has no page
            shown = current(statement)
            (folder / "PRIVACY.md").write_text(render_markdown(shown), encoding="utf-8")
            (folder / "README.md").write_text(render_model_card(shown), encoding="utf-8")
        try:
            return bool(verify(folder)[0])
        except DpsurError:
            return True


def sampled(
    folder: Path, count: int, *, converted: bool = False
) -> Iterator[tuple[Path, str, Any, dict[str, Any]]]:
    """Damaged statements, drawn evenly from all releases of a folder.

    As they were written, or `converted` to the format of today before they are damaged.
    """
    draw = random.Random(0)
    releases = sorted(path.parent for path in folder.rglob("privacy.json"))
    for number, release in enumerate(releases):
        statement = json.loads((release / "privacy.json").read_text(encoding="utf-8"))
        statement = current(statement) if converted else statement
        every = list(edits(statement))
        share = count // len(releases) + (number < count % len(releases))
        for where, what, whole in draw.sample(every, min(share, len(every))):
            yield release, where, what, whole


def main(folder: Path, count: int = 600) -> None:
    """Print what was let pass, and the rate."""
    for converted in (False, True):
        passed, made = [], 0
        for release, where, what, statement in sampled(folder, count, converted=converted):
            made += 1
            if not is_refused(release, statement):
                passed.append((release.parent.name, where, what))
        for row in passed:
            print(*row)
        form = "in the format of today" if converted else "as written"
        print(f"{made - len(passed)} of {made} refused, {form}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
