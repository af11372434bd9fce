"""The learning rates that the grid on selection is centred on, chosen on held-out records."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reproduction.artifacts import Artifact, Column, Table, table_page
from reproduction.base import Cell, Options, Row
from reproduction.rows import read_rows
from reproduction.selection_runs import CASES, EPSILONS, SELECTION_ARMS, SelectionRuns, cell_of
from reproduction.series import Point, best_of, series

# Rates in octaves around the first guess, and seeds.
TRIED = {"linear": (range(-4, 5), (0, 1)), "constant": (range(-4, 3), (0,))}
TITLE = "Learning rates chosen on held-out records"
TEXT = """
Plain DP-SGD with a constant rate and with linear decay at rates in factors of 2, on five sixths of
the training records; accuracy in percent on the other sixth. The best rate is the centre of the
starting rates of [selection](selection-grid.md). Choosing it looked at private records and is not
charged.
"""
COLUMNS = (
    Column("data, network", "case"),
    Column("epsilon", "epsilon", "g"),
    Column("schedule", "arm"),
    Column("best rate", "rate", "g"),
    Column("accuracy", "accuracy", ".1f"),
    Column("rates", "rates"),
)


class SelectionTuning(SelectionRuns):
    """One row per case, epsilon, schedule, rate and seed."""

    name = "selection-tuning"

    def cells(self, options: Options) -> Iterator[Cell]:
        """All rates of a schedule, one case after the other."""
        for arm, (octaves, seeds) in TRIED.items():
            for case in CASES.values():
                for epsilon in EPSILONS:
                    if not options.ask_for(case.name, arm, epsilon):
                        continue
                    for octave in octaves:
                        rate = case.rates[epsilon] * 2.0**octave
                        for seed in options.seeds or seeds:
                            yield cell_of(case, arm, epsilon, seed, rate, hold_out=True)

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """The best rates."""
        records = [
            {**_names(key), "rate": best.value, "accuracy": best.mean, "rates": len(points)}
            for key, points in by_rate(rows).items()
            for best in (best_of(points),)
        ]
        return table_page(self.name, TITLE, TEXT, Table(COLUMNS, records))


EXPERIMENT = SelectionTuning()
Key = tuple[str, int, str]


def tuned_rates(results: Path) -> Mapping[Key, float]:
    """The best rate by case, epsilon and arm, where it was looked for."""
    path = results / f"{EXPERIMENT.name}.jsonl"
    rows = read_rows(path) if path.exists() else []
    return {key: best_of(points).value for key, points in by_rate(rows).items()}


def by_rate(rows: Sequence[Row]) -> dict[Key, list[Point]]:
    """Accuracy against the rate, by case, epsilon and arm."""
    found: dict[Key, list[tuple[float, float]]] = {}
    for row in rows:
        config = row["config"]
        key = (config["case"], config["epsilon"], config["arm"])
        found.setdefault(key, []).append((config["options"]["learning_rate"], row["accuracy"]))
    return {key: series(pairs) for key, pairs in found.items()}


def _names(key: Key) -> dict[str, Any]:
    case, epsilon, arm = key
    return {"case": CASES[case].label, "epsilon": epsilon, "arm": SELECTION_ARMS[arm].label}
