"""Loss and accuracy against the budget spent, during runs."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dpsur import figure_style as style
from reproduction.arms import ARMS
from reproduction.artifacts import Artifact, Column, Picture, Table, table_page
from reproduction.base import Row
from reproduction.series import Look, legend_below
from reproduction.training import TrainingCell, TrainingGrid, mean_and_spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TASK, EPSILON, SEEDS = "fmnist", 3, (0, 1, 2)
POINTS = 40
MARKS = (0.75, 1.0, 1.5, 2.0, 2.5, 3.0)
NEXT_TO = 0.05
LOOKS = {
    "proven": Look("DPSUR, proven", style.BLUE),
    "published": Look("DPSUR, published (claimed)", style.GREEN, dash="--"),
    "released-code": Look("released code (claimed)", style.ORANGE, dash="--"),
    "dpsgd-hf": Look("DPSGD-HF, proven", style.INK),
}
TITLE = "Loss and accuracy against the budget spent"
TEXT = """
Fashion-MNIST with the settings of epsilon 3: the weights that would be released at that point,
tried on the public test set about forty times in a run. Lines are means over seeds, bands reach
from the lowest to the highest seed. Epsilon is what the run's own accounting charges for the
updates made so far. The arms do not share a scale: `proven` can be proved; the paper's figure for
Algorithm 1 and for the released code is a claim, and the same updates cost more. A curve begins
where the first evaluation was made. What is spent before the planned number of updates is a figure
of progress, not a guarantee for stopping there.
"""
COLUMNS = (
    Column("what", "what"),
    Column("accounting", "accounting"),
    Column("epsilon spent", "epsilon", ".2f"),
    Column("updates", "updates", ".0f"),
    Column("test loss", "loss", ".3f"),
    Column("accuracy", "accuracy", ".2f"),
    Column("+-", "spread", ".2f"),
    Column("seeds", "seeds"),
)


class Convergence(TrainingGrid):
    """One row per arm and seed, with its curve."""

    name = "convergence"

    def runs(self, seeds: tuple[int, ...] | None) -> Iterator[TrainingCell]:
        """The four arms."""
        for arm in LOOKS:
            for seed in seeds or SEEDS:
                yield TrainingCell(TASK, arm, EPSILON, seed, evaluations=POINTS)

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """Two panels, and a table at a few values of epsilon."""
        picture = Picture(self.name, lambda: _draw(rows))
        return table_page(self.name, TITLE, TEXT, Table(COLUMNS, records(rows)), picture)


EXPERIMENT = Convergence()


def curves_of(rows: Sequence[Row], arm: str) -> list[dict[str, list[float]]]:
    """The curves of an arm, one per seed."""
    return [row["curve"] for row in rows if row["config"]["arm"] == arm]


def at_common_epsilons(
    curves: Sequence[dict[str, list[float]]], name: str, epsilons: Sequence[float]
) -> np.ndarray:
    """A figure of every curve (rows) at given values of epsilon (columns), between its points."""
    return np.array([np.interp(epsilons, curve["epsilon"], curve[name]) for curve in curves])


def shared_range(curves: Sequence[dict[str, list[float]]]) -> tuple[float, float]:
    """From where all curves have begun to where the first of them ends."""
    return max(c["epsilon"][0] for c in curves), min(c["epsilon"][-1] for c in curves)


def records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Means over seeds at a few values of epsilon, as far as an arm's curves reach."""
    found = []
    for arm in LOOKS:
        curves = curves_of(rows, arm)
        if not curves:
            continue
        low, high = shared_range(curves)
        # A run ends next to its budget: its last figures stand for the whole of it.
        inside = [mark for mark in MARKS if low <= mark < high - NEXT_TO] + [high]
        for epsilon in inside:
            values = {
                name: at_common_epsilons(curves, name, [epsilon])[:, 0].tolist()
                for name in ("updates", "loss", "accuracy")
            }
            mean, spread = mean_and_spread([100 * value for value in values["accuracy"]])
            found.append(
                {
                    "what": LOOKS[arm].label,
                    "accounting": ARMS[arm].accounting,
                    "epsilon": epsilon,
                    "updates": mean_and_spread(values["updates"])[0],
                    "loss": mean_and_spread(values["loss"])[0],
                    "accuracy": mean,
                    "spread": spread,
                    "seeds": len(curves),
                }
            )
    return found


def _draw(rows: Sequence[Row]) -> "Figure":
    figure = style.new_figure(style.PAGE, 2.9)
    left, right = figure.subplots(1, 2)
    for arm, look in LOOKS.items():
        curves = curves_of(rows, arm)
        if curves:
            _band(left, curves, "loss", 1.0, look)
            _band(right, curves, "accuracy", 100.0, look)
    for axes in (left, right):
        axes.set(xlabel=r"$\varepsilon$ spent, by the run's own accounting", xlim=(0, EPSILON))
    left.set_ylabel("test loss")
    right.set_ylabel("test accuracy, %")
    style.label_panel(left, "a", "loss")
    style.label_panel(right, "b", "accuracy")
    legend_below([left, right], len(LOOKS))
    return figure


def _band(
    axes: "Axes", curves: Sequence[dict[str, list[float]]], name: str, scale: float, look: Look
) -> None:
    epsilons = np.linspace(*shared_range(curves), 2 * POINTS)
    values = scale * at_common_epsilons(curves, name, epsilons.tolist())
    axes.fill_between(
        epsilons, values.min(0), values.max(0), color=look.colour, alpha=0.15, linewidth=0
    )
    axes.plot(epsilons, values.mean(0), color=look.colour, linestyle=look.dash, label=look.label)
