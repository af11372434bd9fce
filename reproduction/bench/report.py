"""Rows as a table of ratios, and as a figure: how the time of a step grows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsur import figure_style as style
from dpsur.errors import InvalidInputError
from reproduction.artifacts import write_png
from reproduction.bench.arms import ARMS
from reproduction.bench.measurement import OK, OUT_OF_MEMORY
from reproduction.bench.networks import NETWORKS

OURS = ("dpsgd", "dpsur", "dpsgd-captured", "dpsur-captured")
HEAD = (
    "| network | batch | ours | ms | x plain | x plain captured | Opacus hooks / ours "
    "| Opacus ghost / ours | memory |"
)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Our arms beside the others of their cells, as a table; the last column is over plain."""
    cells: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["network"], row["batch_size"]), {})[row["arm"]] = row
    lines = [HEAD, "|---|--:|---|--:|--:|--:|--:|--:|--:|"]
    for (network, size), arms in cells.items():
        lines += [_line(network, size, arms, arm) for arm in OURS if arm in arms]
    return "\n".join(lines)


def _line(network: str, size: int, arms: Mapping[str, Mapping[str, Any]], arm: str) -> str:
    row = arms[arm]
    if row["status"] != OK:
        return f"| {network} | {size:,} | {arm} | {row['status']} | | | | | |"
    captured = _seconds(arms, "plain-captured")
    opacus = [_seconds(arms, name) for name in ("opacus-hooks", "opacus-ghost")]
    mine = row["step_seconds"]
    figures = [
        f"{1e3 * mine:.2f}",
        _figure(row["time_over_plain"]),
        _figure(None if captured is None else mine / captured),
        *(_figure(None if one is None else one / mine) for one in opacus),
        _figure(row["memory_over_plain"]),
    ]
    return f"| {network} | {size:,} | {arm} | {' | '.join(figures)} |"


def _seconds(arms: Mapping[str, Mapping[str, Any]], arm: str) -> float | None:
    found: float | None = arms[arm]["step_seconds"] if arm in arms else None
    return found


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


COLUMNS, PNG_DPI = 2, 130
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


@dataclass(frozen=True)
class Panel:
    """Rows along one axis, in a figure of several panels."""

    title: str
    axis: str
    label: str
    rows: Sequence[Mapping[str, Any]]


def panels_of(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Growth with the batch for every network, then growth with the parameters of a series."""
    found = []
    for name, network in NETWORKS.items():
        mine = [row for row in rows if row["network"] == name]
        if mine and not network.series:
            title = f"{network.summary}\n{network.parameters:,} parameters"
            found.append(Panel(title, "batch_size", "batch size", mine))
    series = [row for row in rows if NETWORKS[row["network"]].series]
    for size in sorted({row["batch_size"] for row in series}):
        mine = [row for row in series if row["batch_size"] == size]
        title = f"CNNs of growing width\nbatch of {size:,}"
        found.append(Panel(title, "parameters", "parameters", mine))
    return found


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw rows to a PNG, SVG or PDF file."""
    if not any(row["status"] == OK for row in rows):
        raise InvalidInputError("there is nothing to draw: no arm could make a step")
    shown = panels_of(rows)
    columns = min(COLUMNS, len(shown))
    lines = -(-len(shown) // columns)
    with style.common():
        _draw(shown, columns, lines, path, _conditions(rows[0]))


def _draw(shown: Sequence[Panel], columns: int, lines: int, path: Path, title: str) -> None:
    figure = style.new_figure(max(6.0, 2.9 * columns + 0.6), 2.8 * lines + 1.2)
    places = figure.subplots(lines, columns, squeeze=False).flatten()
    entries: dict[str, Any] = {}
    for place, (axes, panel) in enumerate(zip(places, shown, strict=False)):
        _draw_panel(axes, panel, entries)
        if place % columns == 0:
            axes.set_ylabel("milliseconds per step", fontsize="small")
    for axes in places[len(shown) :]:
        axes.set_visible(False)
    figure.legend(
        [entries[arm] for arm in ARMS if arm in entries],
        [ARMS[arm].summary for arm in ARMS if arm in entries],
        loc="outside lower center",
        ncols=max(2, columns),
        frameon=False,
        fontsize="small",
    )
    figure.suptitle(title, fontsize="small")
    try:
        _write(figure, path)
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"cannot draw to {path}: {error}") from error


def _write(figure: Any, path: Path) -> None:
    suffix = path.suffix.lower()
    if suffix == ".png":
        write_png(figure, path, PNG_DPI)
        return
    figure.savefig(path, metadata={"Date": None} if suffix == ".svg" else None)


def _draw_panel(axes: Any, panel: Panel, entries: dict[str, Any]) -> None:
    from matplotlib.ticker import FormatStrFormatter, LogLocator

    for arm in ARMS:
        mine = sorted(
            (row for row in panel.rows if row["arm"] == arm and row["status"] == OK),
            key=lambda row: row[panel.axis],
        )
        if not mine:
            continue
        places = [row[panel.axis] for row in mine]
        times = [1e3 * row["step_seconds"] for row in mine]
        look = {"markersize": 4, "linewidth": 1.3, **STYLES[arm]}
        entries[arm] = axes.plot(places, times, **look)[0]
        bounds = [[1e3 * row["step_seconds_quartiles"][end] for row in mine] for end in (0, 1)]
        axes.fill_between(places, *bounds, color=look["color"], alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({row[panel.axis] for row in panel.rows})
    axes.set_xticks(ticks, [_short(tick) for tick in ticks], rotation=30 if len(ticks) > 4 else 0)
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # a panel may span less than a decade
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.set_title(panel.title, fontsize="small")
    axes.set_xlabel(panel.label, fontsize="small")
    axes.tick_params(labelsize="small")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    _note_missing(axes, panel)


def _short(number: int) -> str:
    """A number as a tick: exact up to the largest batch, then rounded."""
    if number < 20_000:
        return f"{number:,}"
    return f"{number / 1e6:.1f}M" if number >= 1e6 else f"{number / 1e3:.0f}k"


def _note_missing(axes: Any, panel: Panel) -> None:
    """Say in the panel which arms ran out of memory, and from where on."""
    missing: dict[str, int] = {}
    for row in panel.rows:
        if row["status"] == OUT_OF_MEMORY:
            size = row[panel.axis]
            missing[row["arm"]] = min(size, missing.get(row["arm"], size))
    text = "\n".join(f"{arm}: out of memory at {_short(size)}" for arm, size in missing.items())
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
