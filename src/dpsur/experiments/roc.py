"""ROC curves of attacks on logarithmic axes, where the few that are found for certain show."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from dpsur.attacks.metrics import Scores, roc_curve
from dpsur.experiments import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = tuple[list[float], list[float]]
POINTS = 200
LEAST = 1e-4
GAP = "gap"
COLOURS = (style.BLUE, style.ORANGE, style.GREEN, style.INK, style.GREY)
DASHES = ("-", "--", ":")


def thinned(scores: Scores) -> Curve:
    """A curve in so many points, evenly spaced in the logarithm of the false positive rate."""
    false, true = roc_curve(scores)
    at = np.geomspace(max(LEAST, 1 / len(scores.others)), 1.0, POINTS)
    # the highest point that keeps to the rate, never one between two thresholds
    place = np.searchsorted(false, at * (1 + 1e-12), "right") - 1
    return [round(float(x), 6) for x in at], [round(float(y), 6) for y in true[place]]


def draw_roc(panels: Mapping[str, Mapping[str, Curve]]) -> "Figure":
    """A panel per target, with the line of guessing and one legend for all.

    The gap attack has no curve: its only threshold is a point, which is marked.
    """
    figure = style.new_figure(style.COLUMN * (len(panels) + 0.45), style.COLUMN)
    places = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    for axes, (title, curves) in zip(places, panels.items(), strict=True):
        for name, (false, true) in curves.items():
            _curve(axes, names.index(name), name, false, true)
        axes.plot([LEAST, 1], [LEAST, 1], color=style.PALE, linewidth=1, zorder=0)
        axes.set(xscale="log", yscale="log", xlim=(LEAST, 1), ylim=(LEAST, 1), title=title)
        axes.set_xlabel("false positive rate")
    places[0].set_ylabel("true positive rate")
    handles, labels = places[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=7)
    return figure


def _curve(axes: "Axes", index: int, name: str, false: list[float], true: list[float]) -> None:
    colour = COLOURS[index % len(COLOURS)]
    if name == GAP:
        rise = next((i for i, y in enumerate(true) if y > 0), len(true) - 1)
        # whole, also on the edge of the panel
        axes.plot(
            false[rise], true[rise], "o", color=colour, label=name, markersize=4, clip_on=False
        )
        return
    dash = DASHES[index // len(COLOURS) % len(DASHES)]
    axes.plot(false, np.maximum(true, LEAST / 10), dash, color=colour, label=name)
