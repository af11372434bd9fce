"""What an experiment renders: pages, tables and pictures, the same bytes from the same rows."""

import csv
import io
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dpsur import figure_style as style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLES = "tables"
FIGURES = "figures"
WIDTH = 100


class Artifact(Protocol):
    """Something that can be written below a folder."""

    def write(self, folder: Path) -> list[Path]:
        """Write it and say which files it is."""
        ...


# Times has the widths of STIX and stands in for it in a viewer.
FONT_STACK = "STIXGeneral,Times,serif"
PNG_DPI = 220


@dataclass(frozen=True)
class Page:
    """A text file, at a path below the folder."""

    path: str
    text: str

    def write(self, folder: Path) -> list[Path]:
        """Write the text."""
        target = folder / self.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.text, encoding="utf-8")
        return [target]


@dataclass(frozen=True)
class Picture:
    """A figure as SVG; with `png` as PNG too, for the README. `draw` has the common style."""

    name: str
    draw: Callable[[], "Figure"]
    png: bool = False

    def write(self, folder: Path) -> list[Path]:
        """Draw and write, without dates or versions: the same rows give the same bytes."""
        stem = folder / FIGURES / self.name
        stem.parent.mkdir(parents=True, exist_ok=True)
        svg, png = stem.with_name(f"{stem.name}.svg"), stem.with_name(f"{stem.name}.png")
        with style.common():
            figure = self.draw()
            svg.write_text(_svg(figure), encoding="utf-8")
            if self.png:
                write_png(figure, png)
        return [svg, png] if self.png else [svg]


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, the field it shows, and how the page formats it."""

    heading: str
    field: str
    form: str = ""


@dataclass(frozen=True)
class Table:
    """Records under columns: rounded on the page, six digits in the CSV."""

    columns: Sequence[Column]
    records: Sequence[Mapping[str, Any]]

    def markdown(self) -> str:
        """The table for a page."""
        lines = [[column.heading for column in self.columns], ["---"] * len(self.columns)]
        lines += [
            [_shown(record[c.field], c.form) for c in self.columns] for record in self.records
        ]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def csv(self) -> str:
        """The table for a program, headed by the names of the fields."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([column.field for column in self.columns])
        for record in self.records:
            writer.writerow([_exact(record[column.field]) for column in self.columns])
        return text.getvalue()


def table_page(
    name: str,
    title: str,
    text: str,
    table: Table,
    picture: Picture | None = None,
    experiment: str | None = None,
    shown: Sequence[Table] = (),
) -> list[Artifact]:
    """A page with its figure and table, the table as CSV beside it, and the figure.

    `experiment` renders it, where the page has a name of its own. A table that is too wide for a
    page may be `shown` in parts.
    """
    parts = [f"# {title}"]
    if picture is not None:
        parts.append(f"![{title}](../{FIGURES}/{picture.name}.svg)")
    parts += [
        *(textwrap.fill(paragraph, WIDTH) for paragraph in text.strip().split("\n\n")),
        *(part.markdown() for part in shown or (table,)),
        f"Rendered by `python -m reproduction {experiment or name}` from its rows; the table as "
        f"data: [{name}.csv]({name}.csv).",
    ]
    pages: list[Artifact] = [
        Page(f"{TABLES}/{name}.md", "\n\n".join(parts) + "\n"),
        Page(f"{TABLES}/{name}.csv", table.csv()),
    ]
    return pages if picture is None else [*pages, picture]


def _shown(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)


def _exact(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _svg(figure: "Figure") -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    # A hundredth of a point is finer than any printer, and half the size of the file. What stands
    # between the tags is text for people, and stays as it is.
    shortened = re.sub(
        r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text.getvalue()
    )
    return re.sub(rf"'?{style.FONT}'?", FONT_STACK, shortened)


def write_png(figure: "Figure", path: Path, dpi: int = PNG_DPI) -> None:
    """Write a PNG of 256 colours, which is plenty for lines and letters."""
    from PIL import Image

    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dpi)
    with Image.open(picture) as full:
        full.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
