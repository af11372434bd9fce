"""Minimal clipping: a bound so small that almost every loss difference is cut to one end of it."""

from typing import TYPE_CHECKING

import numpy as np

from dpsur import figure_style as style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BOUND = 0.13
# Loss differences of imagined candidates, for the marks at the foot.
DIFFERENCES = (-0.93, -0.78, -0.7, -0.55, -0.47, -0.34, -0.27, 0.07, 0.24, 0.38, 0.5, 0.66, 0.86)


def draw() -> "Figure":
    """Draw what comes out of clipping against what goes in."""
    figure = style.new_figure(style.COLUMN, 2.4)
    axes = figure.subplots()
    at = np.array([-1.0, -BOUND, BOUND, 1.0])
    axes.axvspan(-BOUND, BOUND, color=style.SHADE, linewidth=0)
    axes.plot([-0.42, 0.62], [-0.42, 0.62], color=style.GREY, linewidth=0.8, linestyle=(0, (4, 2)))
    axes.plot(at, np.clip(at, -BOUND, BOUND), color=style.ORANGE, linewidth=1.8)
    axes.text(0, 0.66, "rarely\ninside", fontsize=8, ha="center", va="top")
    axes.text(0.6, 0.5, "unclipped", color=style.GREY, ha="left", va="center")
    axes.text(0.98, BOUND + 0.03, "worse: $+C_v$", color=style.ORANGE, ha="right", va="bottom")
    axes.text(-0.98, -BOUND - 0.04, "better: $-C_v$", color=style.ORANGE, ha="left", va="top")
    for difference in DIFFERENCES:
        colour = style.GREY if abs(difference) < BOUND else style.ORANGE
        axes.plot([difference] * 2, [-0.7, -0.62], color=colour, linewidth=1.0)
    axes.text(-0.98, -0.59, "differences of candidates", fontsize=8, va="bottom")
    axes.set(xlim=(-1, 1), ylim=(-0.7, 0.7))
    axes.set_xticks([-BOUND, BOUND], ["$-C_v$ ", " $C_v$"])
    axes.set_yticks([-BOUND, BOUND], ["$-C_v$", "$C_v$"])
    axes.set_xlabel(r"loss difference $\Delta E$")
    axes.set_ylabel("clipped difference")
    return figure
