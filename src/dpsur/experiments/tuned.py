"""Settings that the paper does not give, as they were chosen: python -m dpsur.experiments.tuned

DPIS and DPAGD have no published settings. `dpsur reproduce tuning` tries some on held-out training
records; this module picks the best of each block from those rows and keeps it as data, which the
presets read. Run it again after the rows have changed.
"""

import csv
import json
from collections import defaultdict
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

FILE = "tuned_settings.csv"
ROWS = Path("results") / "tuning.jsonl"


@cache
def tuned_settings() -> dict[tuple[str, str], dict[str, Any]]:
    """The chosen hyper-parameters by method and task."""
    text = (files("dpsur.experiments") / FILE).read_text()
    return {
        (row["method"], row["task"]): json.loads(row["settings"])
        for row in csv.DictReader(text.splitlines())
    }


def best_settings(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The setting with the best mean accuracy of every method and task that has rows."""
    found: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        config = row["config"]
        setting = json.dumps(config["tried"], sort_keys=True)
        found[config["arm"], config["task"]][setting].append(row["accuracy"])
    return {
        block: json.loads(max(tried, key=lambda one: sum(tried[one]) / len(tried[one])))
        for block, tried in found.items()
    }


def main() -> None:
    """Write the best settings of the rows into the data of this package."""
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    chosen = {**tuned_settings(), **best_settings(rows)}
    with (Path(__file__).parent / FILE).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["method", "task", "settings"])
        for (method, task), setting in sorted(chosen.items()):
            writer.writerow([method, task, json.dumps(setting, sort_keys=True)])


if __name__ == "__main__":
    main()
