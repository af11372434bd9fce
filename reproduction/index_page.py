"""One page that lists every table and figure, and says how to render and how to regenerate it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reproduction.artifacts import FIGURES, TABLES, Column, Page, Table
from reproduction.base import Row

TITLE = "All tables and figures"
TEXT = """\
`make reproduce` renders every page, table and figure below from the rows in `results/`, in about a
minute and without a GPU. A row is one measurement with its configuration, seed, commit, versions
and device. To regenerate rows, delete them from `results/NAME.jsonl` and run the command of the
experiment: only missing rows are made, and an interrupted command resumes. `--jobs 4` shares one
GPU between four processes. *GPU minutes* are what the rows say they took, added up: {hours:.1f}
hours of an NVIDIA H200 in all, without the attacks, whose rows do not say. Many were made by slower
code, and with four processes the whole accuracy grid takes less
([measured](../reproduction.md#where-the-rows-were-made)). Data sets:
`python -m reproduction data fetch all`, or `$DPSUR_DATA`. Beside these:
[methods of the comparison](compared.md), [speed](speed.md), [several devices](scaling.md),
[features](features.md), [the gate block](selection.md), [Opacus](opacus.md) and
[reliability](reliability.md)."""
COLUMNS = (
    Column("experiment", "name"),
    Column("what it shows", "text"),
    Column("pages", "pages"),
    Column("figures", "figures"),
    Column("rows", "rows"),
    Column("without a row", "missing"),
    Column("GPU minutes", "minutes", ".0f"),
    Column("regenerate", "command"),
)


def index_page(
    texts: Mapping[str, str],
    rows: Mapping[str, Sequence[Row]],
    missing: Mapping[str, int],
    written: Mapping[str, Sequence[Path]],
) -> Page:
    """The page, from what was rendered: experiments by name, their rows and their files."""
    records = [
        _record(name, text, rows.get(name, ()), missing.get(name, 0), written.get(name, ()))
        for name, text in texts.items()
    ]
    hours = sum(record["minutes"] or 0 for record in records) / 60
    parts = [f"# {TITLE}", TEXT.format(hours=hours), Table(COLUMNS, records).markdown()]
    return Page(f"{TABLES}/index.md", "\n\n".join(parts) + "\n")


def _record(
    name: str, text: str, rows: Sequence[Row], missing: int, written: Sequence[Path]
) -> dict[str, Any]:
    pages = [path for path in written if path.suffix == ".md"]
    figures = [path for path in written if path.suffix == ".svg"]
    minutes = (
        sum(row.get("seconds") or 0 for row in rows if "NVIDIA" in str(row.get("device"))) / 60
    )
    return {
        "name": f"`{name}`",
        "text": text.split(" (")[0],
        "pages": ", ".join(_link(path) for path in pages),
        "figures": ", ".join(f"[{path.stem}](../{FIGURES}/{path.name})" for path in figures),
        "rows": len(rows),
        "missing": missing or None,
        "minutes": minutes or None,
        "command": f"`python -m reproduction {name}`",
    }


def _link(path: Path) -> str:
    place = path.name if path.parent.name == TABLES else f"../{path.name}"
    return f"[{path.stem}]({place})"
