"""One trial of Algorithm 1, from the training set to an accepted or a rejected update."""

from typing import TYPE_CHECKING

from dpsur import figure_style as style
from reproduction.experiments.schematics.shapes import arrow, badge, box, diamond, say, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOP, REJECTED, ACCEPTED = 2.02, 1.1, 0.4
MIDDLE = (REJECTED + ACCEPTED) / 2
TALL = 0.74
SMALL = 8
TEST = 6.32  # where the test stands, below the fourth step
STEPS = (
    (
        2.06,
        1.26,
        "DPSGD step on $B_t$:\nclip, noise $\\sigma_t$, update;\ncandidate $w_{new}$",
    ),
    (3.58, 1.24, "on a fresh batch $B_v$:\nlosses $J(w_{new})$\nand $J(w_{t-1})$"),
    (4.96, 1.0, "difference\n$\\Delta E = J(w_{new})$\n$-\\ J(w_{t-1})$"),
    (TEST, 1.2, "clip to $[-C_v, C_v]$,\nadd noise $2 C_v \\sigma_v$:\nnoisy $\\Delta E$"),
)


def draw() -> "Figure":
    """Draw the steps from left to right, and the two ways back."""
    figure, axes = sheet(style.PAGE, 2.5)
    box(axes, (0.62, TOP), (1.08, TALL), "training set $D$,\nmodel $w_{t-1}$", fill=style.SHADE)
    before = 0.62 + 0.54
    for number, (x, width, text) in enumerate(STEPS, start=1):
        blue = {"fill": style.PALE_BLUE, "edge": style.BLUE}
        box(axes, (x, TOP), (width, TALL), text, **blue, fontsize=SMALL)
        badge(axes, (x - width / 2, TOP + TALL / 2), str(number))
        arrow(axes, [(before, TOP), (x - width / 2, TOP)])
        before = x + width / 2
    _test(axes)
    _ways_on(axes)
    return figure


def _test(axes: "Axes") -> None:
    diamond(axes, (TEST, MIDDLE), (1.2, 0.84), "noisy\n$\\Delta E < \\beta C_v$ ?")
    badge(axes, (TEST - 0.4, MIDDLE + 0.27), "5")
    arrow(axes, [(TEST, TOP - TALL / 2), (TEST, MIDDLE + 0.42)])
    corner = TEST - 0.6
    for y, word in ((REJECTED, "no"), (ACCEPTED, "yes")):
        turn = corner - 0.12
        arrow(axes, [(corner, MIDDLE), (turn, MIDDLE), (turn, y), (corner - 0.3, y)])
        say(axes, (turn + 0.05, y), word, ha="left", style="italic", fontsize=SMALL)


def _ways_on(axes: "Axes") -> None:
    orange = {"fill": style.PALE_ORANGE, "edge": style.ORANGE}
    green = {"fill": style.PALE_GREEN, "edge": style.GREEN}
    size = (1.4, 0.46)
    rejected, accepted = (
        "reject: restore $w_{t-1}$,\nmomentum, everything",
        "accept: $w_t = w_{new}$,\n$t$ becomes $t + 1$",
    )
    box(axes, (4.72, REJECTED), size, rejected, **orange, fontsize=SMALL)
    box(axes, (4.72, ACCEPTED), size, accepted, **green, fontsize=SMALL)
    diamond(axes, (3.2, ACCEPTED), (0.94, 0.56), "$t = T$ ?")
    box(axes, (1.56, ACCEPTED), (1.0, 0.46), "release $w_T$", fill=style.SHADE)
    arrow(axes, [(4.02, ACCEPTED), (3.67, ACCEPTED)])
    arrow(axes, [(2.73, ACCEPTED), (2.06, ACCEPTED)])
    arrow(axes, [(4.02, REJECTED), (2.06, REJECTED), (2.06, TOP - TALL / 2)])
    arrow(axes, [(3.2, ACCEPTED + 0.28), (3.2, REJECTED)])
    say(axes, (2.42, ACCEPTED + 0.09), "yes", style="italic", fontsize=SMALL)
    say(axes, (3.25, ACCEPTED + 0.42), "no", ha="left", style="italic", fontsize=SMALL)
    say(axes, (2.16, REJECTED + 0.13), "next trial", ha="left", style="italic", fontsize=SMALL)
