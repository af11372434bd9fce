"""One figure: how the time of a step grows with the batch, a panel per network."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpsur.bench.arms import ARMS
from dpsur.bench.networks import NETWORKS
from dpsur.bench.outcome import OK
from dpsur.errors import InvalidInputError

COLUMNS = 4
# Colours that colour-blind readers can tell apart (Okabe and Ito); ours stand out.
STYLES: Mapping[str, Mapping[str, Any]] = {
    "plain": {"color": "black", "marker": "o", "linestyle": "-"},
    "plain-captured": {"color": "0.55", "marker": "o", "linestyle": "--"},
    "dpsgd": {"color": "#0072B2", "marker": "s", "linestyle": "-", "linewidth": 2.2},
    "dpsur": {"color": "#D55E00", "marker": "D", "linestyle": "-", "linewidth": 2.2},
    "dpsgd-captured": {"color": "#0072B2", "marker": "s", "linestyle": "--"},
    "dpsur-captured": {"color": "#D55E00", "marker": "D", "linestyle": "--"},
    "opacus-hooks": {"color": "#009E73", "marker": "^", "linestyle": "--"},
    "opacus-ghost": {"color": "#CC79A7", "marker": "v", "linestyle": "--"},
    "vmap": {"color": "#E69F00", "marker": "<", "linestyle": ":"},
    "loop": {"color": "#56B4E9", "marker": ">", "linestyle": ":"},
}


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw rows to a PNG, SVG or PDF file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [name for name in NETWORKS if any(row["network"] == name for row in rows)]
    if not any(row["status"] == OK for row in rows):
        raise InvalidInputError("there is nothing to draw: no arm could make a step")
    columns = min(COLUMNS, len(measured))
    lines = -(-len(measured) // columns)
    width = max(6.0, 2.9 * columns + 0.6)
    figure = Figure(figsize=(width, 2.6 * lines + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    entries: dict[str, Any] = {}
    for axes, name in zip(panels, measured, strict=False):
        _panel(axes, name, [row for row in rows if row["network"] == name], entries)
    for axes in panels[len(measured) :]:
        axes.set_visible(False)
    for place, axes in enumerate(panels[: len(measured)]):
        if place % columns == 0:
            axes.set_ylabel("milliseconds per step", fontsize="small")
        if place + columns >= len(measured):
            axes.set_xlabel("batch size", fontsize="small")
    labels = [ARMS[arm].summary for arm in ARMS if arm in entries]
    handles = [entries[arm] for arm in ARMS if arm in entries]
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=max(2, columns),
        frameon=False,
        fontsize="small",
    )
    figure.suptitle(_conditions(rows[0]), fontsize="small")
    try:
        figure.savefig(path, dpi=200)
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"cannot draw to {path}: {error}") from error


def _panel(
    axes: Any, name: str, rows: Sequence[Mapping[str, Any]], entries: dict[str, Any]
) -> None:
    sizes = sorted({row["batch_size"] for row in rows})
    for arm in ARMS:
        mine = sorted(
            (row for row in rows if row["arm"] == arm and row["status"] == OK),
            key=lambda row: row["batch_size"],
        )
        if not mine:
            continue
        batches = [row["batch_size"] for row in mine]
        times = [1e3 * row["step_seconds"] for row in mine]
        style = {"markersize": 4, "linewidth": 1.3, **STYLES[arm]}
        entries[arm] = axes.plot(batches, times, **style)[0]
        bounds = [[1e3 * row["step_seconds_quartiles"][end] for row in mine] for end in (0, 1)]
        axes.fill_between(batches, *bounds, color=style["color"], alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30 if len(sizes) > 4 else 0)
    axes.minorticks_off()
    axes.set_title(
        f"{NETWORKS[name].summary}\n{NETWORKS[name].parameters:,} parameters", fontsize="small"
    )
    axes.tick_params(labelsize="small")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    _note_missing(axes, rows)


def _note_missing(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Say in the panel which arms ran out of memory, and from which batch size on."""
    missing: dict[str, int] = {}
    for row in rows:
        if row["status"] == "out-of-memory":
            size = row["batch_size"]
            missing[row["arm"]] = min(size, missing.get(row["arm"], size))
    text = "\n".join(f"{arm}: out of memory at {size:,}" for arm, size in missing.items())
    axes.text(
        0.98, 0.03, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=6, color="0.3"
    )


def _conditions(row: Mapping[str, Any]) -> str:
    config = row["config"]
    where = row["device_name"]
    if row["device"] == "cpu":
        where += f", {config['threads']} threads"
    else:
        where += ", TF32 on" if config["tf32"] else ", TF32 off"
    versions = row["versions"]
    return f"{where}; float32, torch {versions['torch']}, Opacus {versions['opacus']}"
