"""The figure of the trajectories: paths on the loss contours, and the loss after each update."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpsur.experiments import style
from dpsur.experiments.base import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (style.BLUE, style.ORANGE, style.GREY)
LEVELS = (0.02, 0.1, 0.3, 0.7, 1.3, 2.2, 3.5, 5.0)
MARGIN = 0.35


def excess_losses(row: Row) -> NDArray[np.float64]:
    """The loss above its minimum at every point of a row's path."""
    away = np.array(row["path"]) - np.array(row["loss"]["best"])
    found: NDArray[np.float64] = _above(away, row)
    return found


def _above(away: NDArray[np.float64], row: Row) -> Any:
    return np.einsum("...i,ij,...j->...", away, np.array(row["loss"]["curvature"]), away)


def draw(groups: Mapping[str, Sequence[Row]]) -> "Figure":
    """Both panels."""
    figure = style.new_figure(style.PAGE, 2.9)
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    colours = dict(zip(groups, COLOURS, strict=True))
    shown = {arm: rows[0] for arm, rows in list(groups.items())[:2]}
    _contours(left, list(shown.values()))
    for arm, row in shown.items():
        _path(left, row, colours[arm], arm)
    left.legend(loc="upper right", bbox_to_anchor=(1.0, 1.0))
    for arm, rows in groups.items():
        _losses(right, rows, colours[arm], arm)
    right.set(yscale="log", xlabel="updates", ylabel="loss above its minimum")
    right.legend(loc="upper right")
    style.label_panel(left, "a", "weights")
    style.label_panel(right, "b", "mean over seeds")
    return figure


def _contours(axes: "Axes", rows: Sequence[Row]) -> None:
    points = np.concatenate([row["path"] for row in rows])
    low, high = points.min(axis=0) - MARGIN, points.max(axis=0) + MARGIN
    slope, intercept = np.meshgrid(*(np.linspace(a, b, 80) for a, b in zip(low, high, strict=True)))
    best = np.array(rows[0]["loss"]["best"])
    heights = _above(np.stack([slope, intercept], axis=-1) - best, rows[0])
    axes.contour(slope, intercept, heights, levels=LEVELS, colors=style.PALE, linewidths=0.7)
    axes.plot(*best, "+", color=style.INK, markersize=9, markeredgewidth=1.4, zorder=5)
    axes.plot(*rows[0]["path"][0], "o", color=style.INK, markersize=4, zorder=5)
    axes.annotate(
        "start", rows[0]["path"][0], (6, 2), textcoords="offset points", ha="left", va="bottom"
    )
    axes.set(xlabel="slope $w$", ylabel="intercept $b$")


def _path(axes: "Axes", row: Row, colour: str, arm: str) -> None:
    slopes, intercepts = zip(*row["path"], strict=True)
    axes.plot(
        slopes, intercepts, "-o", color=colour, linewidth=0.9, markersize=1.8, label=arm, zorder=4
    )


def _losses(axes: "Axes", rows: Sequence[Row], colour: str, arm: str) -> None:
    losses = np.stack([excess_losses(row) for row in rows])
    updates = np.arange(losses.shape[1])
    low, high = np.quantile(losses, (0.25, 0.75), axis=0)
    axes.fill_between(updates, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(updates, losses.mean(axis=0), color=colour, label=arm)
