"""A run as a sequence of rejected and accepted updates, and what each accounting charges for it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from dpsur import figure_style as style
from reproduction.experiments.schematics.shapes import box, say, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# R: rejected, A: accepted, a point: any number of both.
RUN = "RRARARRRA.RA"
PITCH = 0.335
FIRST = 1.28
TRIALS = 1.72
UPDATES = ("1", "2", "3", "T")
SMALL = 8
# what is charged, where, and in words
CHARGES: tuple[tuple[str, Callable[[str], bool], str, str], ...] = (
    ("published", lambda kind: kind == "A", "white", "as if nothing were\nselected (not proved)"),
    ("proven", lambda kind: kind == "A", style.INK, "price of an update\nthat was selected"),
    ("every-trial", lambda kind: kind in "RA", style.INK, "gradient and test\nof every trial"),
)


def draw() -> "Figure":
    """Draw the trials in a row, and one line of charges per accounting."""
    figure, axes = sheet(style.PAGE, 2.25)
    say(axes, (0.12, TRIALS), "trials", ha="left")
    for place, kind in enumerate(RUN):
        _trial(axes, FIRST + PITCH * place, kind)
    say(axes, (5.45, TRIALS), "R  rejected\nA  accepted", ha="left", fontsize=SMALL)
    say(axes, (0.12, 1.32), "charged under", ha="left", style="italic", fontsize=SMALL)
    _updates(axes)
    for line, (name, charged, fill, words) in enumerate(CHARGES):
        y = 1.02 - 0.36 * line
        say(axes, (0.12, y), name, ha="left")
        axes.plot(
            [FIRST - 0.15, FIRST + PITCH * len(RUN) - 0.18], [y, y], color=style.PALE, linewidth=0.6
        )
        say(axes, (5.45, y), words, ha="left", fontsize=SMALL, linespacing=1.0)
        for place, kind in enumerate(RUN):
            if charged(kind):
                x = FIRST + PITCH * place
                axes.plot([x], [y], "o", color=style.INK, markerfacecolor=fill, markersize=4.5)
    return figure


def _trial(axes: "Axes", x: float, kind: str) -> None:
    if kind == ".":
        say(axes, (x, TRIALS), "…")
        return
    fill, edge = (
        (style.PALE_GREEN, style.GREEN) if kind == "A" else (style.PALE_ORANGE, style.ORANGE)
    )
    box(axes, (x, TRIALS), (0.28, 0.28), kind, fill=fill, edge=edge)


def _updates(axes: "Axes") -> None:
    """Brackets over the trials that led to each update."""
    start = 0
    names = iter(UPDATES)
    for place, kind in enumerate(RUN):
        if kind == ".":
            start = place + 1
        if kind != "A":
            continue
        left, right = (FIRST + PITCH * at for at in (start, place))
        axes.plot(
            [left - 0.14, left - 0.14, right + 0.14, right + 0.14],
            [1.92, 1.96, 1.96, 1.92],
            color=style.GREY,
            linewidth=0.7,
        )
        say(axes, ((left + right) / 2, 2.08), f"update ${next(names)}$", fontsize=SMALL)
        start = place + 1
