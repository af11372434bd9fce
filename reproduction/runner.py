"""Fill the missing cells of an experiment, and render what is filled."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpsur.errors import InvalidInputError
from reproduction.base import Cell, Experiment, Options, Row
from reproduction.rows import provenance, read_rows

OnRow = Callable[[int, int], None]


@dataclass(frozen=True)
class Filled:
    """What is asked for: rows in the order of the grid, and the cells that have none."""

    rows: Sequence[Row]
    missing: Sequence[Cell]


def rows_file(experiment: Experiment, results: Path) -> Path:
    """Where an experiment keeps its rows."""
    return results / f"{experiment.name}.jsonl"


def look_up(experiment: Experiment, path: Path, options: Options) -> Filled:
    """Match rows with the cells that are asked for; other rows of the file play no part."""
    known = {experiment.key(row): row for row in read_rows(path)} if path.exists() else {}
    cells = list(experiment.cells(options))
    rows = [known[experiment.key(cell)] for cell in cells if experiment.key(cell) in known]
    return Filled(rows, [cell for cell in cells if experiment.key(cell) not in known])


def fill(
    experiment: Experiment, results: Path, options: Options, on_row: OnRow = lambda *_: None
) -> int:
    """Measure the cells that have no row, append each row as it is made, and count the rows.

    Where processes cannot share an experiment, the first of them makes all of it.
    """
    if options.shard[0] and not experiment.shared:
        return 0
    path = rows_file(experiment, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    drop_torn_line(path)
    missing = look_up(experiment, path, options).missing
    count = 0
    for count, line in enumerate(made_lines(experiment, missing, options), start=1):
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
        on_row(count, len(missing))
    return count


def made_lines(experiment: Experiment, cells: Sequence[Cell], options: Options) -> Iterator[str]:
    """Measure these cells; each row as the line of a file, with how it was made."""
    awaited = {experiment.key(cell) for cell in cells}
    for row in experiment.make(cells, options):
        line = json.dumps({"experiment": experiment.name, **row, **provenance()})
        # Otherwise the row would not be found next time, and be measured again for ever.
        assert experiment.key(json.loads(line)) in awaited, f"this row fills no cell: {line}"
        yield line + "\n"


def render(experiment: Experiment, filled: Filled, out: Path) -> list[Path]:
    """Write tables and figures from the rows that are there."""
    if filled.missing and not (filled.rows and experiment.partial):
        raise InvalidInputError(
            f"{len(filled.missing)} rows of {experiment.name} are missing; make them with "
            f"`python -m reproduction {experiment.name}`, without --render-only"
        )
    return [path for artifact in experiment.render(filled.rows) for path in artifact.write(out)]


def drop_torn_line(path: Path) -> None:
    """Cut off what an interrupted write left behind, so that the next row starts a line."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
