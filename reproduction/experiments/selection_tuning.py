"""The learning rates that the grid on selection is centred on, chosen on held-out records."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from reproduction.artifacts import Artifact, Column, Table, table_page
from reproduction.base import Cell, Options, Row
from reproduction.rows import read_rows
from reproduction.selection_runs import (
    CASES,
    EPSILONS,
    SelectionRuns,
    cell_of,
)
from reproduction.series import Point, best_of, series

# Rates in octaves around the first guess, with two seeds for linear models and MLPs and one for
# what takes longer. Where rates in factors of 8 had shown the region, only that.
TRIED, NARROW = range(-4, 5), range(-1, 4)
NARROWED = {
    ("mnist-cnn", 3), ("fmnist-cnn", 3), ("cifar10-head", 3), ("cifar10-cnn", 1),
    ("cifar10-cnn", 3), ("imdb-transformer", 3),
}  # fmt: skip
TITLE = "Learning rates chosen on held-out records"
TEXT = """
Plain DP-SGD with linear decay at rates in factors of 2, on five sixths of the training records;
accuracy in percent on the other sixth. The best rate is the centre of the starting rates of
[selection](selection-grid.md). Choosing it looked at private records and is not charged.
"""
COLUMNS = (
    Column("data, network", "case"),
    Column("epsilon", "epsilon", "g"),
    Column("best rate", "rate", "g"),
    Column("accuracy", "accuracy", ".1f"),
    Column("rates", "rates"),
)


class SelectionTuning(SelectionRuns):
    """One row per case, epsilon, schedule, rate and seed."""

    name = "selection-tuning"

    def cells(self, options: Options) -> Iterator[Cell]:
        """All rates, one case after the other."""
        for case in CASES.values():
            for epsilon in EPSILONS:
                if options.ask_for(case.name, "linear", epsilon):
                    for octave in NARROW if (case.name, epsilon) in NARROWED else TRIED:
                        rate = case.rates[epsilon] * 2.0**octave
                        for seed in options.seeds or range(2 if case.seeds > 3 else 1):
                            yield cell_of(case, "linear", epsilon, seed, rate, hold_out=True)

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """The best rates."""
        records = [
            {
                "case": CASES[case].label,
                "epsilon": epsilon,
                "rate": best.value,
                "accuracy": best.mean,
                "rates": len(points),
            }
            for (case, epsilon), points in by_rate(rows).items()
            for best in (best_of(points),)
        ]
        return table_page(self.name, TITLE, TEXT, Table(COLUMNS, records))


EXPERIMENT = SelectionTuning()
Key = tuple[str, int]  # case and epsilon


def tuned_rates(results: Path) -> Mapping[Key, float]:
    """The best rate of linear decay by case and epsilon, where it was looked for."""
    path = results / f"{EXPERIMENT.name}.jsonl"
    rows = read_rows(path) if path.exists() else []
    return {key: best_of(points).value for key, points in by_rate(rows).items()}


def by_rate(rows: Sequence[Row]) -> dict[Key, list[Point]]:
    """Accuracy against the rate, by case and epsilon."""
    found: dict[Key, list[tuple[float, float]]] = {}
    for row in rows:
        config = row["config"]
        key = (config["case"], config["epsilon"])
        found.setdefault(key, []).append((config["options"]["learning_rate"], row["accuracy"]))
    return {key: series(pairs) for key, pairs in found.items()}
