"""Figures of `bench-networks`: ratios to plain PyTorch, and growth along its series."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dpsur import figure_style as style
from dpsur.errors import InvalidInputError
from reproduction.bench.measurement import OK, OUT_OF_MEMORY
from reproduction.bench.network_grid import GATE, OPACUS, OURS, PLAIN, SERIES, table

ORDER = (PLAIN, *OPACUS, OURS, GATE)


class Look(NamedTuple):
    """How an arm is drawn."""

    label: str
    colour: str
    marker: str


LOOKS = dict(
    zip(
        ORDER,
        (
            Look("without privacy", style.INK, "o"),
            Look("Opacus, hooks", style.ORANGE, "^"),
            Look("Opacus, ghost", style.GREY, "v"),
            Look("dpsur, DP-SGD", style.BLUE, "o"),
            Look("dpsur, tested updates", style.GREEN, "D"),
        ),
        strict=True,
    )
)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Time of an update over that of plain PyTorch, a line for each network."""
    cells = {key: arms for key, arms in table(rows).items() if key[2] == "float32"}
    with _figure(path, (style.PAGE, 0.9 + 0.34 * len(cells))) as figure:
        axes = figure.add_subplot()
        for arm in ORDER[1:]:
            points = [
                (arms[arm]["time_over_plain"], place)
                for place, arms in enumerate(reversed(cells.values()))
                if arms.get(arm, {}).get("time_over_plain")
            ]
            look = LOOKS[arm]
            axes.plot(*zip(*points, strict=True), look.marker, color=look.colour, label=look.label)
        axes.axvline(1, color=style.INK, linestyle="--", linewidth=0.9, label="without privacy")
        axes.set_yticks(range(len(cells)), [key[0] for key in reversed(cells)])
        axes.set_xscale("log")
        axes.set_xticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
        axes.minorticks_off()
        axes.grid(axis="y", color=style.PALE, linewidth=0.6)
        axes.set(xlabel="time of an update, times plain PyTorch")
        figure.legend(loc="outside lower center", ncols=3)


def draw_growth(rows: list[dict[str, Any]], path: Path) -> None:
    """Time and peak memory along every series; a cross where an arm ran out of memory."""
    # A series of one size shows no growth.
    names = [name for name in SERIES if len({row["size"] for row in _of(rows, name)}) > 1]
    if not names:
        raise InvalidInputError("there is no row of a series to draw; measure without --no-growth")
    figures = [("step_seconds", 1e3, "ms per update"), ("peak_memory_bytes", 2**-30, "peak, GiB")]
    figures = [one for one in figures if any(row.get(one[0]) for row in rows)]  # a CPU has no peak
    with _figure(path, (style.PAGE, 0.5 + 2.2 * len(figures))) as figure:
        axes = figure.subplots(len(figures), len(names), squeeze=False)
        for number, (field, unit, label) in enumerate(figures):
            for place, name in enumerate(names):
                axis = axes[number, place]
                _draw_series(axis, _of(rows, name), field, unit)
                axis.set_ylabel(label if not place else "")
                axis.set_xlabel(SERIES[name] if number + 1 == len(figures) else "")
        handles = {
            text: handle
            for axis in axes.flat
            for handle, text in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=len(handles)
        )


def _draw_series(axis: Any, rows: list[dict[str, Any]], field: str, unit: float) -> None:
    from matplotlib.ticker import EngFormatter, FormatStrFormatter, LogLocator

    axis.set(xscale="log", yscale="log")
    for one in (axis.xaxis, axis.yaxis):
        one.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=7))
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axis.minorticks_off()
    for arm in ORDER:
        look = LOOKS[arm]
        points = [
            (row["size"], unit * row[field])
            for row in rows
            if row["arm"] == arm and row["status"] == OK and row.get(field)
        ]
        if points:
            places = zip(*sorted(points), strict=True)
            axis.plot(*places, f"{look.marker}-", color=look.colour, ms=4, label=look.label)
        failed = [
            row["size"] for row in rows if row["arm"] == arm and row["status"] == OUT_OF_MEMORY
        ]
        if failed:
            top = axis.get_xaxis_transform()
            axis.plot(failed, [0.95] * len(failed), "x", color=look.colour, ms=7, transform=top)
            axis.annotate(
                "out of memory",
                (failed[0], 0.95),
                (-8, 0),
                xycoords=top,
                textcoords="offset points",
                ha="right",
                va="center",
                color=look.colour,
                fontsize=8,
            )


@contextmanager
def _figure(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """A figure, saved in the end. Imports Matplotlib when it is needed."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    with style.common():
        figure = plt.figure(figsize=size, layout="constrained")
        yield figure
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def _of(rows: list[dict[str, Any]], series: str) -> list[dict[str, Any]]:
    """The rows of a series; cells of the table are points of the series over batch sizes."""
    found = [row for row in rows if row["series"] == series]
    if series == "batch":
        names, arms = ({row[key] for row in found} for key in ("network", "arm"))
        found += [
            {**row, "size": row["batch_size"]}
            for row in rows
            if row["series"] is None
            and row["network"] in names
            and row["arm"] in arms
            and row["precision"] == "float32"
        ]
    return found
