"""The learning rates that the grid on selection is centred on, chosen on held-out records."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reproduction.artifacts import Artifact, Column, Table, table_page
from reproduction.base import Cell, Options, Row
from reproduction.rows import read_rows
from reproduction.selection_runs import (
    CASES,
    EPSILONS,
    SELECTION_ARMS,
    Case,
    SelectionRuns,
    cell_of,
)
from reproduction.series import Point, best_of, series

TRIED = range(-4, 5)  # rates in octaves around the first guess
# Two seeds for linear models and MLPs, one for what takes longer. Short blocks at the noise of a
# whole run show what a search sees.
SHORT, SHORT_EPSILON = (20, 40, 80), 1
TITLE = "Learning rates chosen on held-out records"
TEXT = """
Plain DP-SGD with linear decay at rates in factors of 2, on five sixths of the training records;
accuracy in percent on the other sixth. The best rate is the centre of the starting rates of
[selection](selection-grid.md). Choosing it looked at private records and is not charged. *One short
block* is a run of so few updates at the noise of a whole one: what a search sees.
"""
COLUMNS = (
    Column("data, network", "case"),
    Column("epsilon", "epsilon", "g"),
    Column("what", "arm"),
    Column("updates", "updates"),
    Column("best rate", "rate", "g"),
    Column("accuracy", "accuracy", ".1f"),
    Column("rates", "rates"),
)


class SelectionTuning(SelectionRuns):
    """One row per case, epsilon, schedule, rate and seed."""

    name = "selection-tuning"

    def cells(self, options: Options) -> Iterator[Cell]:
        """All rates of a schedule, one case after the other."""
        for case in CASES.values():
            for epsilon in EPSILONS:
                if options.ask_for(case.name, "linear", epsilon):
                    for octave in TRIED:
                        rate = case.rates[epsilon] * 2.0**octave
                        for seed in options.seeds or range(2 if case.seeds > 3 else 1):
                            yield cell_of(case, "linear", epsilon, seed, rate, hold_out=True)
        for case in CASES.values():
            if options.ask_for(case.name, "short", SHORT_EPSILON):
                yield from _short(case, SHORT_EPSILON, options.seeds or (0,))

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """The best rates."""
        records = [
            {**_names(key), "rate": best.value, "accuracy": best.mean, "rates": len(points)}
            for key, points in sorted(by_rate(rows).items(), key=lambda item: _place(item[0]))
            for best in (best_of(points),)
        ]
        return table_page(self.name, TITLE, TEXT, Table(COLUMNS, records))


EXPERIMENT = SelectionTuning()
Key = tuple[str, int, str, int]  # case, epsilon, arm, updates


def _short(case: Case, epsilon: int, seeds: Sequence[int]) -> Iterator[Cell]:
    for updates in SHORT:
        for octave in TRIED:
            rate = case.rates[epsilon] * 2.0**octave
            for seed in seeds:
                yield cell_of(
                    case, "short", epsilon, seed, rate,
                    hold_out=True, block_of=case.updates, updates=updates,
                )  # fmt: skip


def tuned_rates(results: Path) -> Mapping[tuple[str, int], float]:
    """The best rate of linear decay by case and epsilon, where it was looked for."""
    path = results / f"{EXPERIMENT.name}.jsonl"
    rows = read_rows(path) if path.exists() else []
    return {
        (case, epsilon): best_of(points).value
        for (case, epsilon, arm, _), points in by_rate(rows).items()
        if arm == "linear"
    }


def by_rate(rows: Sequence[Row]) -> dict[Key, list[Point]]:
    """Accuracy against the rate, by case, epsilon, arm and updates."""
    found: dict[Key, list[tuple[float, float]]] = {}
    for row in rows:
        config = row["config"]
        key = (config["case"], config["epsilon"], config["arm"], config["options"]["updates"])
        found.setdefault(key, []).append((config["options"]["learning_rate"], row["accuracy"]))
    return {key: series(pairs) for key, pairs in found.items()}


def _names(key: Key) -> dict[str, Any]:
    case, epsilon, arm, updates = key
    about = {"case": CASES[case].label, "epsilon": epsilon, "updates": updates}
    return {**about, "arm": SELECTION_ARMS[arm].label}


def _place(key: Key) -> tuple[int, ...]:
    """Where a line stands in the table."""
    case, epsilon, arm, updates = key
    return (arm != "linear", list(CASES).index(case), epsilon, updates)
