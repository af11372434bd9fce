"""How a candidate is evaluated: two independent samples of one training set."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dpsur import figure_style as style
from reproduction.experiments.schematics.shapes import arrow, box, say, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIDE = 9
STEP = 0.165
CORNER = (0.14, 0.44)
# Records by number, spread out by hand; two of them are in both samples, as chance would have it.
TRAINING = (2, 7, 11, 13, 20, 24, 30, 33, 37, 45, 49, 52, 56, 60, 64, 70, 74, 79)
TESTING = (5, 13, 27, 40, 43, 52, 67, 77)
UPPER, BETWEEN, LOWER = 1.68, 1.11, 0.5
TALL = 0.5
SMALL = 8


def draw() -> "Figure":
    """Draw the records on the left, and what is made of each sample on the right."""
    figure, axes = sheet(style.PAGE, 2.15)
    _records(axes)
    blue: dict[str, Any] = {"fill": style.PALE_BLUE, "edge": style.BLUE, "fontsize": SMALL}
    orange: dict[str, Any] = {"fill": style.PALE_ORANGE, "edge": style.ORANGE, "fontsize": SMALL}
    box(axes, (2.4, UPPER), (1.12, TALL), "training batch,\nrate $B_t / N$", **blue)
    box(axes, (2.4, LOWER), (1.12, TALL), "test batch,\nrate $B_v / N$", **orange)
    box(axes, (3.77, UPPER), (1.16, TALL), "DPSGD step\nwith noise $\\sigma_t$", **blue)
    box(axes, (5.08, UPPER), (0.96, TALL), "candidate\n$w_{new}$", **blue)
    box(axes, (3.77, BETWEEN), (1.16, 0.3), "accepted last: $w_{t-1}$", fontsize=SMALL)
    box(axes, (4.375, LOWER), (2.37, TALL), "mean loss of both models\non the same batch", **orange)
    difference = "$\\Delta E =$\n$J(w_{new}) - J(w_{t-1})$"
    say(axes, (5.9, LOWER), difference, ha="left", fontsize=SMALL)
    edge = CORNER[0] + SIDE * STEP + 0.03
    for y, colour in ((UPPER, style.BLUE), (LOWER, style.ORANGE)):
        arrow(axes, [(edge, y), (1.84, y)], colour)
    for line in (
        [(2.96, UPPER), (3.19, UPPER)],
        [(4.35, UPPER), (4.6, UPPER)],
        [(3.77, BETWEEN + 0.15), (3.77, UPPER - TALL / 2)],
        [(3.77, BETWEEN - 0.15), (3.77, LOWER + TALL / 2)],
        [(5.08, UPPER - TALL / 2), (5.08, LOWER + TALL / 2)],
        [(2.96, LOWER), (3.19, LOWER)],
        [(5.56, LOWER), (5.84, LOWER)],
    ):
        arrow(axes, line)
    return figure


def _records(axes: "Axes") -> None:
    left, bottom = CORNER
    everyone = range(SIDE * SIDE)

    def places(numbers: Iterable[int]) -> tuple[list[float], list[float]]:
        rows, columns = zip(*(divmod(number, SIDE) for number in numbers), strict=True)
        return (
            [left + (column + 0.5) * STEP for column in columns],
            [bottom + (row + 0.5) * STEP for row in rows],
        )

    dot: dict[str, Any] = {
        "marker": "o",
        "markersize": 6,
        "markeredgewidth": 0,
        "linestyle": "none",
    }
    ring = {**dot, "markersize": 9.2, "markeredgewidth": 1.2, "markerfacecolor": "none"}
    axes.plot(
        *places(number for number in everyone if number not in TRAINING), **dot, color=style.PALE
    )
    axes.plot(*places(TRAINING), **dot, color=style.BLUE)
    axes.plot(*places(TESTING), **ring, color=style.ORANGE)
    say(axes, (left + SIDE * STEP / 2, 0.26), "training set $D$: $N$ records", fontsize=SMALL)
