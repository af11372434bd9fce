"""DPSGD-TS on CIFAR-10 with Tramèr and Boneh's batch and rate, over the noise, at small budgets.

The paper's settings for this method are said to be theirs, with the noise tuned for each epsilon.
The values tried are to either side of what gives as many updates as theirs.
"""

from collections.abc import Iterator, Sequence

from reproduction.arms import TS_FIXED
from reproduction.artifacts import Artifact, Column, Table, table_page
from reproduction.base import Row
from reproduction.experiments.accuracy import paper_accuracy
from reproduction.series import series
from reproduction.training import TrainingCell, TrainingGrid

TASK, SEEDS, NOISE = "cifar10", (0, 1, 2), "noise_multiplier"
TRIED = {1: (2.0, 2.6, 1.8, 2.3, 3.0), 2: (1.7, 1.8, 2.0)}
TITLE = "DPSGD-TS on CIFAR-10: the noise at epsilon 1 and 2"
TEXT = """
Accuracy in percent, mean and standard deviation over seeds, of DPSGD-TS with batch 1,024 and rate 1
(Tramèr and Boneh's end-to-end network), by the paper's accounting, which gives the number of
updates that a noise multiplier affords. The paper says that its noise was tuned for each epsilon
and gives no values for this method.
"""
COLUMNS = (
    Column("epsilon", "epsilon"),
    Column("noise multiplier", "noise", "g"),
    Column("updates", "updates", ".0f"),
    Column("accuracy", "mean", ".2f"),
    Column("+-", "spread", ".2f"),
    Column("seeds", "seeds"),
    Column("paper", "paper", ".2f"),
)


class TsNoise(TrainingGrid):
    """One row per budget, noise multiplier and seed."""

    name = "ts-noise"

    def runs(self, seeds: tuple[int, ...] | None) -> Iterator[TrainingCell]:
        """By budget, the likeliest values first."""
        for epsilon, values in TRIED.items():
            for noise in values:
                for seed in seeds or SEEDS:
                    yield TrainingCell(TASK, TS_FIXED.name, epsilon, seed, {NOISE: noise})

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """The table."""
        records = []
        for epsilon in TRIED:
            some = [row for row in rows if row["config"]["epsilon"] == epsilon]
            for point in series((row["config"]["options"][NOISE], row["accuracy"]) for row in some):
                updates = {
                    row["updates"] for row in some if row["config"]["options"][NOISE] == point.value
                }
                records.append(
                    {
                        **vars(point),
                        "epsilon": epsilon,
                        "noise": point.value,
                        "updates": max(updates),
                        "spread": point.spread if point.seeds > 1 else None,
                        "paper": paper_accuracy()[TASK, "dpsgd-ts", epsilon],
                    }
                )
        return table_page(self.name, TITLE, TEXT, Table(COLUMNS, records))


EXPERIMENT = TsNoise()
