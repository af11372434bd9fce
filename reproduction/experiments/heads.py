"""What the preset auto reaches at a proven epsilon, beside everything it can be compared with.

Rows are those of the preset. The table of docs/results.md puts them beside the rows of other
experiments (`accuracy`, `best`), the paper's figures and published ones.
"""

import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpsur import figure_style as style
from reproduction.artifacts import Artifact, Column, Page, Picture, Table
from reproduction.base import Row
from reproduction.experiments.accuracy import paper_accuracy
from reproduction.rows import read_rows
from reproduction.series import Look, Point, draw, legend_below
from reproduction.training import TrainingCell, TrainingGrid, mean_and_spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SEEDS = tuple(range(5))
EPSILONS = (1, 2, 3, 4, 8)
ARM = "auto"
# Tasks of the grid, and the data sets that they are about.
DATA_SETS = {
    "cifar10": "CIFAR-10",
    "fmnist": "Fashion-MNIST",
    "mnist": "MNIST",
    "imdb-words": "IMDb",
    "imdb-hashed": "IMDb",
    "imdb": "IMDb",
}
TASKS = ("cifar10", "fmnist", "mnist", "imdb-words", "imdb-hashed")
# What auto is called on a task whose guarantee rests on an assumption, and on one that makes none.
AUTO_ON = {
    "imdb-words": "auto, word ranks taken as public",
    "imdb-hashed": "auto, words hashed, no ranks",
}
RESULTS = Path(__file__).parents[2] / "results"
# What auto is compared with: rows of another experiment, of the first of its arms that has any.
OTHERS = {
    "plain DP-SGD, tuned, scattering or words": ("best", ("best-dpsgd",)),
    "plain DP-SGD, the paper's network": ("accuracy", ("dpsgd",)),
    "Algorithm 1": ("accuracy", ("proven-pld", "proven")),
}
PAPER, WITHOUT, WITH = (
    "the paper's DPSUR (epsilon not proved)",
    "published, no public data",
    "published, *with public data*",
)
LOOKS = {
    "auto": Look("auto", style.BLUE),
    AUTO_ON["imdb-words"]: Look(AUTO_ON["imdb-words"], style.BLUE, "s", ":"),
    AUTO_ON["imdb-hashed"]: Look(AUTO_ON["imdb-hashed"], style.BLUE, "o"),
    **{
        name: Look(name, colour, marker, "--")
        for name, colour, marker in zip(
            OTHERS, (style.GREEN, style.GREY, style.ORANGE), "^vD", strict=True
        )
    },
    PAPER: Look(PAPER, style.INK, "x", ":"),
}
TITLE = "Results at a proven epsilon"


class Heads(TrainingGrid):
    """One row per data set, budget and seed."""

    name = "heads"

    def runs(self, seeds: tuple[int, ...] | None) -> Iterator[TrainingCell]:
        """By data set and budget."""
        for task in TASKS:
            for epsilon in EPSILONS:
                for seed in seeds or SEEDS:
                    yield TrainingCell(task, ARM, epsilon, seed)

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """The figures, and the table as data; `page_tables` writes the table into its page."""
        found = {**of_auto(rows), **of_others()}
        figure = Picture("results", lambda: draw_results(found))
        return [
            Page("tables/results.csv", data(found)),
            figure,
            Picture("hero", lambda: draw_hero(found), png=True),
        ]


EXPERIMENT = Heads()
# A data set and what is run on it -> points in the order of epsilon.
Found = Mapping[tuple[str, str], Sequence[Point]]


def of_auto(rows: Sequence[Row]) -> dict[tuple[str, str], list[Point]]:
    """Mean and spread over seeds of the preset, by data set."""
    named = ((row["config"]["task"], row) for row in rows)
    return _points((DATA_SETS[task], AUTO_ON.get(task, "auto"), row) for task, row in named)


def of_others() -> dict[tuple[str, str], list[Point]]:
    """The same of other experiments, of the paper, and of what is published."""
    found: dict[tuple[str, str], list[Point]] = {}
    for name, (experiment, arms) in OTHERS.items():
        rows = [
            r for r in read_rows(RESULTS / f"{experiment}.jsonl") if not r["config"]["hold_out"]
        ]
        chosen: dict[tuple[str, float], list[Row]] = {}
        for arm in arms:
            of_arm: dict[tuple[str, float], list[Row]] = defaultdict(list)
            for row in rows:
                if row["config"]["arm"] == arm:
                    of_arm[row["config"]["task"], row["config"]["epsilon"]].append(row)
            chosen = {**of_arm, **chosen}
        found |= _points(
            (DATA_SETS[task], name, row) for (task, _), some in chosen.items() for row in some
        )
    for (task, method, epsilon), accuracy in paper_accuracy().items():
        if method == "dpsur":
            point = Point(epsilon, accuracy, 0.0, 1)
            found.setdefault((DATA_SETS[task], PAPER), []).append(point)
    for row in published():
        name = WITH if row["public_data"] == "yes" else WITHOUT
        point = Point(float(row["epsilon"]), float(row["accuracy"]), 0.0, 1)
        found.setdefault((DATA_SETS[row["task"]], name), []).append(point)
    return found


def _points(named: Iterator[tuple[str, str, Row]]) -> dict[tuple[str, str], list[Point]]:
    groups: dict[tuple[str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for data_set, name, row in named:
        groups[data_set, name][row["config"]["epsilon"]].append(100 * row["accuracy"])
    return {
        key: [
            Point(epsilon, *mean_and_spread(by_epsilon[epsilon]), len(by_epsilon[epsilon]))
            for epsilon in sorted(by_epsilon)
        ]
        for key, by_epsilon in groups.items()
    }


def published() -> list[dict[str, str]]:
    """Figures from the literature, each with its source."""
    text = (files("reproduction.experiments") / "published_accuracy.csv").read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))


def _in_order(found: Found) -> list[tuple[str, str]]:
    sets, names = list(dict.fromkeys(DATA_SETS.values())), [*LOOKS, WITHOUT, WITH]
    return sorted(found, key=lambda key: (sets.index(key[0]), names.index(key[1])))


def table(found: Found) -> str:
    """The table of docs/results.md."""
    columns = [Column("data set", "data"), Column("what", "what")]
    columns += [Column(f"epsilon {epsilon}", str(epsilon)) for epsilon in EPSILONS]
    records = []
    for key in _in_order(found):
        record: dict[str, Any] = {"data": key[0], "what": key[1]}
        record |= dict.fromkeys(map(str, EPSILONS), "")
        record |= {f"{point.value:g}": _shown(point) for point in found[key]}
        records.append(record)
    return Table(columns, records).markdown()


def _shown(point: Point) -> str:
    return f"{point.mean:.2f} ± {point.spread:.2f}" if point.seeds > 1 else f"{point.mean:g}"


def data(found: Found) -> str:
    """The table for a program."""
    fields = ("data", "what", "epsilon", "mean", "spread", "seeds")
    records = [
        dict(zip(fields, (*key, point.value, point.mean, point.spread, point.seeds), strict=True))
        for key in _in_order(found)
        for point in found[key]
    ]
    return Table([Column(name, name) for name in fields], records).csv()


def draw_results(found: Found) -> "Figure":
    """A panel for each data set."""
    sets = list(dict.fromkeys(data_set for data_set, _ in _in_order(found)))
    figure = style.new_figure(style.PAGE, 0.9 + 2.3 * ((len(sets) + 1) // 2))
    places: list[Axes] = list(figure.subplots((len(sets) + 1) // 2, 2, squeeze=False).flat)
    for spare in places[len(sets) :]:
        spare.remove()
    for letter, axes, data_set in zip("abcd", places, sets, strict=False):
        for name, look in LOOKS.items():
            if (data_set, name) in found:
                draw(axes, found[data_set, name], look)
        for point in found.get((data_set, WITHOUT), ()):
            axes.plot(point.value, point.mean, "*", color=style.INK, label=WITHOUT, markersize=7)
        axes.set(xlabel=r"$\varepsilon$", ylabel="test accuracy, %")
        axes.set_xticks(EPSILONS)
        style.label_panel(axes, letter, data_set)
    legend_below(places[: len(sets)], 2)
    return figure


# The first figure of the documentation: labels, colours, and points that a label stands below.
HERO = {
    "auto": ("dpsur, no settings", style.BLUE, -20),
    "Algorithm 1": ("the paper's algorithm", style.ORANGE, -36),
    "dpsgd-hf": ("DP-SGD, same features", style.GREY, -24),
}


def draw_hero(found: Found) -> "Figure":
    """Two data sets in one column that a phone shows as it is, lines labelled where they are."""
    figure = style.new_figure(style.COLUMN, 4.4)
    for axes, (task, data_set) in zip(
        figure.subplots(2, 1), (("cifar10", "CIFAR-10"), ("fmnist", "Fashion-MNIST")), strict=True
    ):
        for name, (label, colour, below) in HERO.items():
            points = {p.value: p.mean for p in found.get((data_set, name), ()) if p.value <= 4}
            if name == "dpsgd-hf":
                points = {budget: _mean_of(task, name, budget) for budget in (1, 2, 3, 4)}
            if not points:
                continue
            axes.plot(list(points), list(points.values()), "o-", color=colour, ms=4)
            last = max(points)
            axes.annotate(
                label,
                (last, points[last]),
                (0, below),
                textcoords="offset points",
                ha="right",
                color=colour,
            )
        without = _mean_of(task, "nonprivate")
        axes.axhline(without, color=style.INK, linestyle="--", linewidth=0.9)
        axes.annotate(
            f"without privacy: {without:.1f}",
            (1, without),
            (0, 3),
            textcoords="offset points",
        )
        axes.set(ylabel="test accuracy, %", title=data_set)
        axes.set_xticks([1, 2, 3, 4])
        axes.margins(y=0.14)
    axes.set_xlabel(r"$\varepsilon$, proved (δ = 10$^{-5}$)")
    return figure


def _mean_of(task: str, arm: str, epsilon: float | None = None) -> float:
    """Mean accuracy of an arm of the sixteen cells, in percent."""
    rows = [
        row
        for row in read_rows(RESULTS / "accuracy.jsonl")
        if (row["config"]["task"], row["config"]["arm"]) == (task, arm)
        and (epsilon is None or row["config"]["epsilon"] == epsilon)
        and not row["config"]["hold_out"]
    ]
    return mean_and_spread([100 * row["accuracy"] for row in rows])[0]
