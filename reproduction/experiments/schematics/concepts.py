"""A private step in six words: record, batch, clip, noise, step, charge."""

from typing import TYPE_CHECKING

from dpsur import figure_style as style
from reproduction.experiments.schematics.shapes import arrow, box, say, sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = (
    ("record", "one row, image or text:\nwhat privacy is about", style.SHADE, style.GREY),
    ("batch", "each record joins by its own\ncoin (Poisson sampling)", style.SHADE, style.GREY),
    ("clip", "each record's gradient is cut\nto a norm of at most C", style.PALE_BLUE, style.BLUE),
    ("noise", "Gaussian noise σC is added\nto the sum of gradients", style.PALE_BLUE, style.BLUE),
    (
        "step",
        "the optimizer moves the\nweights; others may see them",
        style.PALE_GREEN,
        style.GREEN,
    ),
    (
        "charge",
        "its price, known in advance,\nis booked within ε and δ",
        style.PALE_ORANGE,
        style.ORANGE,
    ),
)
TALL, GAP = 0.46, 0.2


def draw() -> "Figure":
    """Draw the words from top to bottom, as wide as a phone."""
    height = len(ROWS) * (TALL + GAP) + 0.1
    figure, axes = sheet(style.COLUMN, height)
    y = height - 0.05 - TALL / 2
    for number, (word, text, fill, edge) in enumerate(ROWS):
        box(axes, (0.62, y), (1.0, TALL), word, fill=fill, edge=edge, fontsize=12)
        say(axes, (1.28, y), text, ha="left", fontsize=9.5)
        if number + 1 < len(ROWS):
            arrow(axes, [(0.62, y - TALL / 2), (0.62, y - TALL / 2 - GAP)])
        y -= TALL + GAP
    return figure
