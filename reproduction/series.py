"""Accuracies against a setting: means over seeds, and how they are drawn."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reproduction.training import mean_and_spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Point:
    """Runs at one value of a setting, their accuracies in percent."""

    value: float
    mean: float
    spread: float
    seeds: int


@dataclass(frozen=True)
class Look:
    """How a series is drawn, and what the legend calls it."""

    label: str
    colour: str
    marker: str = "o"
    dash: str = "-"


def series(measured: Iterable[tuple[float, float]]) -> list[Point]:
    """Points in the order of their values, from pairs of a value and an accuracy as a share."""
    groups: dict[float, list[float]] = {}
    for value, accuracy in measured:
        groups.setdefault(value, []).append(100 * accuracy)
    return [
        Point(value, *mean_and_spread(groups[value]), len(groups[value]))
        for value in sorted(groups)
    ]


def best_of(points: Sequence[Point]) -> Point:
    """The point of the highest mean."""
    return max(points, key=lambda point: point.mean)


def draw(axes: "Axes", points: Sequence[Point], look: Look) -> None:
    """Means joined by a line, with a bar of one standard deviation to either side."""
    axes.errorbar(
        [point.value for point in points],
        [point.mean for point in points],
        yerr=[point.spread for point in points],
        color=look.colour,
        marker=look.marker,
        linestyle=look.dash,
        markersize=3,
        elinewidth=0.8,
        capsize=1.5,
        label=look.label,
    )


def legend_below(figure_axes: Sequence["Axes"], columns: int) -> None:
    """One legend for all panels, of everything that any of them shows."""
    shown = {
        label: handle
        for axes in figure_axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure = figure_axes[0].get_figure()
    assert figure is not None
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=columns)
