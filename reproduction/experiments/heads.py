"""Private linear models on the features of the shipped encoder, trained by the library's DP-SGD."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reproduction.artifacts import Artifact, Column, Table, table_page
from reproduction.base import Row
from reproduction.training import TrainingCell, TrainingGrid, mean_and_spread

SEEDS = tuple(range(5))
TASKS = ("cifar10", "fmnist", "mnist", "imdb-bags")
EPSILONS = (1, 2, 3, 4, 8)
# Settings are compared on held-out training records at these.
HELD_OUT = {"cifar10": 10_000, "fmnist": 10_000, "mnist": 10_000, "imdb-bags": 5_000}
HELD_OUT_EPSILONS, HELD_OUT_SEEDS = (1, 3), (0, 1)
ARM = "auto"
# Features and changes of the options that are compared with auto's.
VARIANTS: Mapping[str, Sequence[tuple[str, Mapping[str, Any]]]] = {
    "cifar10": (("encoder-zoom", {}),),
    "fmnist": (("encoder", {}), ("encoder-zoom", {}), ("whitened-scattering", {})),
    "mnist": (("scattering+encoder", {"max_grad_norm": 0.1}), ("whitened-scattering", {})),
    "imdb-bags": (("vectors", {"max_grad_norm": 0.1}), ("vectors", {"max_grad_norm": 0.5})),
}
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
            for features, changes in settings(task):
                for epsilon in EPSILONS:
                    for seed in seeds or SEEDS:
                        yield TrainingCell(task, ARM, epsilon, seed, changes, features=features)
                for epsilon in HELD_OUT_EPSILONS:
                    for seed in HELD_OUT_SEEDS:
                        held = HELD_OUT[task]
                        yield TrainingCell(
                            task, ARM, epsilon, seed, changes, held, features=features
                        )

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """One table."""
        return table_page(self.name, TITLE, TEXT, Table(COLUMNS, summary(rows)))


def settings(task: str) -> list[tuple[str | None, Mapping[str, Any]]]:
    """Features and changed options: those of the preset first."""
    return [(None, {}), *VARIANTS[task]]


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
