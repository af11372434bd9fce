"""The paper's settings of the test: what each allows, costs and accepts."""

from collections.abc import Iterator, Sequence
from typing import Any

from reproduction.artifacts import Artifact, Column, Table, table_page
from reproduction.base import Cell, OneByOne, Options, Row
from reproduction.experiments.accounting import costs, setting_cells, setting_of

TITLE = "The noise of the test, and what follows from it"
TEXT = """
The paper's sigma_v for each data set and target epsilon (delta = 1e-5, beta = -1, C_v = 0.001,
B_v), with the batch B_t and the sigma_t of the commands released with it. T: the accepted updates
that the published accounting allows. *Proven*: the certified epsilon of these T updates. a_min and
a_max: the probability that the gate accepts a candidate that is worse or better by C_v or more.
Their ratio is what selection adds to the cost of an update: the less noise in the test, the larger
the ratio.
"""
COLUMNS = (
    Column("data set", "dataset"),
    Column("epsilon", "epsilon"),
    Column("sigma_v", "sigma_v", ".1f"),
    Column("B_v", "val_batch_size"),
    Column("sigma_t", "sigma_t", "g"),
    Column("B_t", "batch_size"),
    Column("T", "updates"),
    Column("published", "published", ".3f"),
    Column("proven", "proven", ".3f"),
    Column("a_min", "accept_min", ".3f"),
    Column("a_max", "accept_max", ".3f"),
    Column("ratio", "ratio", ".2f"),
)


class SigmaV(OneByOne):
    """One row per setting."""

    name = "sigma-v"

    def cells(self, options: Options) -> Iterator[Cell]:  # noqa: ARG002
        """The paper's settings."""
        yield from setting_cells()

    def measure(self, cell: Cell, options: Options) -> Row:  # noqa: ARG002
        """Cost and acceptance of one setting."""
        setting = setting_of(cell)
        gate = setting.trial.gate
        assert gate is not None
        return {
            **costs(setting),
            "accept_min": gate.accept_min,
            "accept_max": gate.accept_max,
            "ratio": gate.accept_max / gate.accept_min,
        }

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """The table."""
        return table_page(self.name, TITLE, TEXT, Table(COLUMNS, [_record(row) for row in rows]))


EXPERIMENT = SigmaV()


def _record(row: Row) -> dict[str, Any]:
    config, epsilon = row["config"], row["epsilon"]
    return {
        **row,
        **config,
        "sigma_v": config["val_noise_multiplier"],
        "sigma_t": config["noise_multiplier"],
        "published": epsilon["published"],
        "proven": epsilon["proven"],
    }
