"""What the features are worth: docs/tables/features.md, from the rows of a simulator of DP-SGD.

The simulator trains linear heads on fixed features exactly as DP-SGD does (Poisson samples, clipped
gradients, Gaussian noise of the calibrated multiplier), several at once on a GPU. Its rows are not
runs of the library; `python -m reproduction heads` makes those.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

from reproduction.artifacts import Column, Table
from reproduction.rows import read_rows
from reproduction.training import mean_and_spread

ROOT = Path(__file__).parent.parent
ROWS = ROOT / "results" / "encoder_heads_simulated.jsonl"
TASKS = {"cifar10": "CIFAR-10", "fmnist": "Fashion-MNIST", "mnist": "MNIST"}


def table() -> str:
    """Mean and standard deviation over seeds of every setting, on the test sets."""
    groups: dict[tuple[str, str, float], dict[int, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    rows = [row for row in read_rows(ROWS) if row["config"]["records"] == "test"]
    for row in rows:
        config = row["config"]
        key = (config["task"], config["note"], config["rate_factor"])
        groups[key][row["epsilon"]].append(row["accuracy"])
    epsilons = sorted({row["epsilon"] for row in rows})
    columns = [Column("data set", "task"), Column("features", "note"), Column("factor", "factor")]
    columns += [Column(f"epsilon {epsilon}", str(epsilon)) for epsilon in epsilons]
    records = [
        _record(key, groups[key]) for key in sorted(groups, key=lambda k: list(TASKS).index(k[0]))
    ]
    return Table(columns, records).markdown()


def _record(key: tuple[str, str, float], accuracies: dict[int, list[float]]) -> dict[str, Any]:
    task, note, factor = key
    record: dict[str, Any] = {"task": TASKS[task], "note": _plain(note), "factor": f"{factor:g}"}
    for epsilon, values in accuracies.items():
        mean, spread = mean_and_spread(values)
        record[str(epsilon)] = f"{mean:.2f} ± {spread:.2f}"
    return record


def _plain(note: str) -> str:
    """The note of a row without the notation of the program that wrote it."""
    return note.replace("{'grids': (4, 4, 4)}", "(grids 4, 4, 4),")
