"""Figures of `bench-networks`: ratios to plain PyTorch, and growth along its series."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpsur.bench.measurement import OK, OUT_OF_MEMORY
from dpsur.errors import InvalidInputError
from reproduction.bench.network_grid import GATE, OPACUS, OURS, PLAIN, SERIES, table

ORDER = (PLAIN, *OPACUS, OURS, GATE)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Ratios to plain by network."""
    import numpy as np

    with _figure(path, (6.4, 3.2)) as figure:
        bars = figure.add_subplot()
        cells = {key: arms for key, arms in table(rows).items() if key[2] == "float32"}
        places, width = np.arange(len(cells)), 0.16
        for number, arm in enumerate(ORDER):
            heights = [
                arms.get(arm, {}).get("time_over_plain") or np.nan for arms in cells.values()
            ]
            bars.bar(places + (number - 2) * width, heights, width, label=arm, color=f"C{number}")
        bars.set_xticks(places, [key[0] for key in cells], rotation=30, ha="right")
        bars.set(ylabel="time of an update / plain", yscale="log")
        bars.legend(fontsize=6)


def draw_growth(rows: list[dict[str, Any]], path: Path) -> None:
    """Time and peak memory along every series; a cross where an arm ran out of memory."""
    # A series of one size shows no growth.
    names = [name for name in SERIES if len({row["size"] for row in _of(rows, name)}) > 1]
    if not names:
        raise InvalidInputError("there is no row of a series to draw; measure without --no-growth")
    figures = [("step_seconds", 1e3, "ms per update"), ("peak_memory_bytes", 2**-30, "peak, GiB")]
    figures = [one for one in figures if any(row.get(one[0]) for row in rows)]  # a CPU has no peak
    with _figure(path, (2.8 * max(len(names), 1.4), 2.2 * len(figures))) as figure:
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
        axes[0, 0].legend(handles.values(), handles.keys(), fontsize=6)


def _draw_series(axis: Any, rows: list[dict[str, Any]], field: str, unit: float) -> None:
    axis.set(xscale="log", yscale="log")
    for arm in ORDER:
        color = f"C{ORDER.index(arm)}"
        points = [
            (row["size"], unit * row[field])
            for row in rows
            if row["arm"] == arm and row["status"] == OK and row.get(field)
        ]
        if points:
            axis.plot(*zip(*sorted(points), strict=True), color, marker="o", ms=2, label=arm)
        failed = [
            row["size"] for row in rows if row["arm"] == arm and row["status"] == OUT_OF_MEMORY
        ]
        if failed:
            top = axis.get_xaxis_transform()
            axis.plot(failed, [0.97] * len(failed), f"{color}x", ms=4, transform=top)


@contextmanager
def _figure(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """A figure, saved in the end. Imports Matplotlib when it is needed."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    from dpsur.figure_style import common

    with common():
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
