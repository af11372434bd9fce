"""How accurate a model can be at a proven epsilon, beside what the paper reports at its own."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from reproduction.arms import ARMS, BEST_ARMS
from reproduction.artifacts import Artifact, Column, Table, table_page
from reproduction.base import Row
from reproduction.experiments.accuracy import paper_accuracy
from reproduction.presets.settings import EPSILONS
from reproduction.presets.tuned import MODELS
from reproduction.training import TrainingCell, TrainingGrid, mean_and_spread

SEEDS = tuple(range(5))
# What the paper calls the data, where we have another name for what is made of them.
PAPER_NAMES = {"imdb-words": "imdb"}
TITLE = "Tuned settings at a proven epsilon"
TEXT = """
Accuracy in percent on the public test set of the last iterate, mean and standard deviation over
seeds, with the preset `tuned`, at a proven epsilon. Beside it stands the figure that the paper
reports for DPSUR, at an epsilon that is not proved: of the paper's epsilon 3, the proven one is 4.0
to 4.3. MNIST and Fashion-MNIST are a linear model on scattering features, CIFAR-10 is the paper's
network on the same, reviews are a linear model on counts of words (`imdb-words`; the paper trains a
recurrent network on their first 80 words). On reviews "proven" takes the ranks of words as public,
which were counted on these reviews; [without ranks](../results.md) the default is about two points
lower. Number of updates and learning rate, of MNIST and of
reviews the batch too, were chosen on held-out training records, which epsilon does not cover; on
Fashion-MNIST one setting, known from earlier measurements, was tried at each of epsilon 1 and 3
([tuning](tuning.md)). On CIFAR-10 test accuracies with features normalised by group had been seen
before noisy statistics were tried on held-out records, and won; an average of weights is released
at 3, and with the present settings there are no rows at 2 and 4.
*dpsgd* is plain DP-SGD, *dpsur* adds the test of every candidate (gate coin) and pays for it.
"""
COLUMNS = (
    Column("data set", "task"),
    Column("epsilon", "epsilon"),
    Column("method", "method"),
    Column("accuracy", "mean", ".2f"),
    Column("+-", "spread", ".2f"),
    Column("seeds", "seeds"),
    Column("paper's DPSUR", "paper", ".2f"),
    Column("difference", "difference", "+.2f"),
    Column("updates", "updates", ".0f"),
    Column("trials", "trials", ".0f"),
    Column("proven epsilon", "proven", ".3f"),
)


class Best(TrainingGrid):
    """One row per data set, arm, budget and seed."""

    name = "best"

    def runs(self, seeds: tuple[int, ...] | None) -> Iterator[TrainingCell]:
        """By data set and budget, plain DP-SGD before the selective one."""
        for task in MODELS:
            for epsilon in EPSILONS:
                for arm in BEST_ARMS:
                    for seed in seeds or SEEDS:
                        yield TrainingCell(task, arm.name, epsilon, seed)

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """One table."""
        return table_page(self.name, TITLE, TEXT, Table(COLUMNS, summary(rows)))


EXPERIMENT = Best()


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Mean and spread over seeds of every data set, budget and arm, beside the paper's."""
    groups: dict[tuple[str, int, str], list[Row]] = defaultdict(list)
    for row in rows:
        config = row["config"]
        groups[config["task"], config["epsilon"], config["arm"]].append(row)
    tasks = list(MODELS)
    keys = sorted(groups, key=lambda key: (tasks.index(key[0]), *key[1:]))
    return [_record(key, groups[key]) for key in keys]


def _record(key: tuple[str, int, str], rows: Sequence[Row]) -> dict[str, Any]:
    task, epsilon, arm = key
    mean, spread = mean_and_spread([100 * row["accuracy"] for row in rows])
    paper = paper_accuracy()[PAPER_NAMES.get(task, task), "dpsur", epsilon]
    return {
        "task": task,
        "epsilon": epsilon,
        "method": ARMS[arm].method.name,
        "mean": mean,
        "spread": spread,
        "seeds": len(rows),
        "paper": paper,
        "difference": mean - paper,
        "updates": sum(row["updates"] for row in rows) / len(rows),
        "trials": sum(row["trials"] for row in rows) / len(rows),
        "proven": rows[0]["epsilon"]["proven"],
    }
