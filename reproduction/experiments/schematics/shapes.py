"""Boxes, arrows and words on a sheet whose unit is the inch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpsur import figure_style as style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, float]


def sheet(width: float, height: float) -> "tuple[Figure, Axes]":
    """A figure with one area that fills it, without axes."""
    figure = style.new_figure(width, height)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    return figure, axes


def box(
    axes: "Axes",
    centre: Point,
    size: Point,
    text: str,
    *,
    fill: str = "white",
    edge: str = style.GREY,
    **words: Any,
) -> None:
    """A box with rounded corners and words in its middle."""
    from matplotlib.patches import FancyBboxPatch

    (x, y), (width, height) = centre, size
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=fill,
            edgecolor=edge,
        )
    )
    say(axes, centre, text, **words)


def diamond(axes: "Axes", centre: Point, size: Point, text: str, **words: Any) -> None:
    """A question."""
    from matplotlib.patches import Polygon

    (x, y), (width, height) = centre, size
    corners = [(x - width / 2, y), (x, y + height / 2), (x + width / 2, y), (x, y - height / 2)]
    axes.add_patch(Polygon(corners, facecolor="white", edgecolor=style.GREY))
    say(axes, centre, text, **words)


def badge(axes: "Axes", centre: Point, number: str) -> None:
    """The number of a step, on a corner of its box."""
    from matplotlib.patches import Circle

    axes.add_patch(Circle(centre, 0.085, facecolor=style.INK, edgecolor="white", zorder=3))
    x, y = centre
    say(axes, (x, y - 0.005), number, color="white", fontsize=7, zorder=4)


def say(axes: "Axes", where: Point, text: str, **words: Any) -> None:
    """Words, centred unless said otherwise."""
    axes.text(*where, text, **{"ha": "center", "va": "center", "linespacing": 1.25, **words})


def arrow(axes: "Axes", points: Sequence[Point], colour: str = style.INK) -> None:
    """A line through points, with a head at the last one."""
    if len(points) > 2:
        axes.plot(*zip(*points[:-1], strict=True), color=colour, linewidth=0.8)
    axes.annotate(
        "",
        xy=points[-1],
        xytext=points[-2],
        arrowprops={
            "arrowstyle": "-|>,head_length=0.35,head_width=0.15",
            "color": colour,
            "linewidth": 0.8,
            "shrinkA": 0,
            "shrinkB": 0,
        },
    )
