"""Private linear models on the features of the shipped encoder, trained by the library's DP-SGD."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from reproduction.arms import ENCODER_ARMS
from reproduction.artifacts import Artifact, Column, Table, table_page
from reproduction.base import Row
from reproduction.training import TrainingCell, TrainingGrid, mean_and_spread

SEEDS = tuple(range(5))
TASKS = ("cifar10", "fmnist", "mnist")
EPSILONS = (1, 2, 3, 4, 8)
TITLE = "Private linear models on the encoder's features"
TEXT = """
Accuracy in percent on the public test set, mean and standard deviation over seeds, with the preset
`encoder`, at a proven epsilon and delta 1e-5. The settings follow from public facts by rules that
were chosen on held-out training records ([features](../features.md)).
"""
COLUMNS = (
    Column("data set", "task"),
    Column("epsilon", "epsilon"),
    Column("features", "features"),
    Column("accuracy", "mean", ".2f"),
    Column("+-", "spread", ".2f"),
    Column("seeds", "seeds"),
    Column("proven epsilon", "proven", ".3f"),
)


class Heads(TrainingGrid):
    """One row per data set, budget and seed."""

    name = "heads"

    def runs(self, seeds: tuple[int, ...] | None) -> Iterator[TrainingCell]:
        """By data set and budget."""
        for task in TASKS:
            for epsilon in EPSILONS:
                for arm in ENCODER_ARMS:
                    for seed in seeds or SEEDS:
                        yield TrainingCell(task, arm.name, epsilon, seed)

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """One table."""
        return table_page(self.name, TITLE, TEXT, Table(COLUMNS, summary(rows)))


EXPERIMENT = Heads()


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Mean and spread over seeds of every data set and budget."""
    groups: dict[tuple[str, float, str], list[Row]] = defaultdict(list)
    for row in rows:
        config = row["config"]
        groups[config["task"], config["epsilon"], config["features"]].append(row)
    records = []
    for task, epsilon, features in sorted(groups, key=lambda key: (TASKS.index(key[0]), key[1])):
        group = groups[task, epsilon, features]
        mean, spread = mean_and_spread([100 * row["accuracy"] for row in group])
        records.append(
            {
                "task": task,
                "epsilon": epsilon,
                "features": features,
                "mean": mean,
                "spread": spread,
                "seeds": len(group),
                "proven": group[0]["epsilon"]["proven"],
            }
        )
    return records
