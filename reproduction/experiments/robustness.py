"""How much a wrong learning rate costs, with selection and without."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpsur import figure_style as style
from reproduction.artifacts import Artifact, Column, Picture, Table, table_page
from reproduction.base import Row
from reproduction.series import Look, Point, best_of, draw, legend_below, series
from reproduction.training import TrainingCell, TrainingGrid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TASK, EPSILONS, SEEDS = "fmnist", (1, 3), (0, 1, 2)
# A range of 64, around the paper's 4.
RATES = tuple(0.5 * 2**k for k in range(7))
TOLERANCE = 1.0


@dataclass(frozen=True)
class Contender:
    """An arm with a schedule."""

    arm: str
    schedule: str
    look: Look


CONTENDERS = (
    Contender("every-trial", "constant", Look("selective, every trial charged", style.BLUE)),
    Contender("proven", "constant", Look("selective, proven", style.GREEN, "s")),
    Contender("dpsgd-hf", "constant", Look("DP-SGD, constant rate", style.ORANGE, "^", "--")),
    Contender("dpsgd-hf", "linear", Look("DP-SGD, linear decay", style.INK, "v", "--")),
)
TITLE = "Accuracy against the learning rate"
TEXT = f"""
Fashion-MNIST on scattering features at a proven epsilon, the learning rate changed over a range of
{RATES[-1] / RATES[0]:g} and nothing else: batch, clipping, noise and momentum are the preset's.
Selective runs have the paper's gate; where every trial is charged the momentum of rejected steps is
kept. Mean and standard deviation over seeds of the accuracy in percent, last iterate, on the public
test set. *From* and *to* bound the learning rates next to the best one whose mean accuracy is
within {TOLERANCE:g} point of it, among those that were run; *fold* is their ratio. Under
differential privacy tuning is paid for, so a wide range is worth something, and so is a high best.
"""
COLUMNS = (
    Column("epsilon", "epsilon", "g"),
    Column("what", "what"),
    Column("best", "best", ".2f"),
    Column("+-", "spread", ".2f"),
    Column("at", "at", "g"),
    Column("from", "low", "g"),
    Column("to", "high", "g"),
    Column("fold", "fold", "g"),
    Column("lowest", "lowest", ".2f"),
    Column("rates run", "rates"),
    Column("seeds", "seeds"),
)


class Robustness(TrainingGrid):
    """One row per budget, contender, learning rate and seed."""

    name = "robustness"

    def runs(self, seeds: tuple[int, ...] | None) -> Iterator[TrainingCell]:
        """One contender after another, so that whole curves come first."""
        for epsilon in EPSILONS:
            for contender in CONTENDERS:
                for rate in RATES:
                    changes = {"learning_rate": rate, "schedule": contender.schedule}
                    for seed in seeds or SEEDS:
                        yield TrainingCell(TASK, contender.arm, epsilon, seed, changes)

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """A panel and a block of the table per budget that has rows."""
        picture = Picture(self.name, lambda: _draw(rows))
        return table_page(self.name, TITLE, TEXT, Table(COLUMNS, records(rows)), picture)


EXPERIMENT = Robustness()


def measured(rows: Sequence[Row], epsilon: float, contender: Contender) -> list[Point]:
    """Accuracy against the learning rate."""
    wanted = (epsilon, contender.arm, contender.schedule)
    return series(
        (row["config"]["options"]["learning_rate"], row["accuracy"])
        for row in rows
        if _kind(row) == wanted
    )


def _kind(row: Row) -> tuple[float, str, str]:
    config = row["config"]
    return config["epsilon"], config["arm"], config["options"]["schedule"]


def tolerated(points: Sequence[Point]) -> tuple[float, float]:
    """The learning rates on either side of the best, up to the first that falls too far."""
    best = best_of(points)
    start = points.index(best)
    low = high = start
    while low > 0 and points[low - 1].mean >= best.mean - TOLERANCE:
        low -= 1
    while high < len(points) - 1 and points[high + 1].mean >= best.mean - TOLERANCE:
        high += 1
    return points[low].value, points[high].value


def records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The best of every contender, and how far its learning rate may be off."""
    found = []
    for epsilon in EPSILONS:
        for contender in CONTENDERS:
            points = measured(rows, epsilon, contender)
            if points:
                found.append(_record(epsilon, contender, points))
    return found


def _record(epsilon: float, contender: Contender, points: Sequence[Point]) -> dict[str, Any]:
    best, (low, high) = best_of(points), tolerated(points)
    return {
        "epsilon": epsilon,
        "what": contender.look.label,
        "best": best.mean,
        "spread": best.spread,
        "at": best.value,
        "low": low,
        "high": high,
        "fold": high / low,
        "lowest": min(point.mean for point in points),
        "rates": len(points),
        "seeds": best.seeds,
    }


def _draw(rows: Sequence[Row]) -> "Figure":
    shown = [e for e in EPSILONS if any(row["config"]["epsilon"] == e for row in rows)]
    figure = style.new_figure(style.PAGE, 2.9)
    places = list(figure.subplots(1, len(shown), squeeze=False, sharey=True)[0])
    for letter, axes, epsilon in zip("ab", places, shown, strict=False):
        for contender in CONTENDERS:
            points = measured(rows, epsilon, contender)
            if points:
                draw(axes, points, contender.look)
        axes.set_xscale("log", base=2)
        axes.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
        axes.set_xlabel(r"learning rate $\eta$")
        style.label_panel(axes, letter, rf"$\varepsilon$ = {epsilon}")
    places[0].set_ylabel("test accuracy, %")
    legend_below(places, 4)
    return figure
