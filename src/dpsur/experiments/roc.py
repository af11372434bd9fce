"""ROC curves of attacks on logarithmic axes, where the few that are found for certain show."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from dpsur.attacks.metrics import Scores, roc_curve
from dpsur.experiments import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve = tuple[list[float], list[float]]
POINTS = 200
LEAST = 1e-4


def thinned(scores: Scores) -> Curve:
    """A curve in so many points, evenly spaced in the logarithm of the false positive rate."""
    false, true = roc_curve(scores)
    at = np.geomspace(max(LEAST, 1 / len(scores.others)), 1.0, POINTS)
    # the highest point that keeps to the rate, never one between two thresholds
    place = np.searchsorted(false, at * (1 + 1e-12), "right") - 1
    return [round(float(x), 6) for x in at], [round(float(y), 6) for y in true[place]]


def draw_roc(curves: Mapping[str, Curve]) -> "Figure":
    """All curves in one panel, and the line of guessing."""
    figure = style.new_figure(style.COLUMN * 1.25, style.COLUMN)
    axes = figure.subplots()
    colours = (style.BLUE, style.ORANGE, style.GREEN, style.INK, style.GREY)
    dashes = ("-", "--", ":")
    for index, (name, (false, true)) in enumerate(curves.items()):
        axes.plot(
            false,
            np.maximum(true, LEAST / 10),
            dashes[index // len(colours) % len(dashes)],
            color=colours[index % len(colours)],
            label=name,
        )
    axes.plot([LEAST, 1], [LEAST, 1], color=style.PALE, linewidth=1, zorder=0)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(LEAST, 1),
        ylim=(LEAST, 1),
        xlabel="false positive rate",
        ylabel="true positive rate",
    )
    axes.legend(fontsize=7, loc="lower right")
    return figure
