"""Claims against lower bounds, as a figure."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpsur import figure_style as style
from dpsur.audits.bounds import CONTRADICTED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABEL = (
    "ε: bar, lower bound; dot, exact; tick, claimed\n"
    "orange: contradicted, by the bound, the exact ε or the p-value"
)


def draw_findings(records: Sequence[dict[str, Any]]) -> "Figure":
    """Claims and bounds, a line each; what is contradicted has a colour of its own."""
    figure = style.new_figure(style.PAGE, 0.6 + 0.17 * len(records))
    axes = figure.subplots()
    for place, record in enumerate(reversed(list(records))):
        broken = CONTRADICTED in record["verdict"] and "not" not in record["verdict"]
        colour = style.ORANGE if broken else style.BLUE
        axes.plot([0, record["lower"]], [place, place], color=colour, linewidth=2.5)
        axes.plot([record["claimed"]] * 2, [place - 0.35, place + 0.35], color=style.INK)
        if record["exact"] is not None:
            axes.plot(record["exact"], place, "o", color=colour, markersize=3)
    axes.set_yticks(
        range(len(records)),
        [f"{r['subject']} ({r['accounting']})" for r in reversed(list(records))],
        fontsize=6.5,
    )
    axes.set(xlabel=LABEL, xlim=(0, None))
    axes.set_ylim(-0.8, len(records) - 0.2)
    return figure
