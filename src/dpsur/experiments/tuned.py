"""Settings that the paper does not give, as they were chosen: python -m dpsur.experiments.tuned

DPIS and DPAGD have no published settings, and the arms of the preset `best` are our own.
`dpsur reproduce tuning` tries some on held-out training records; this module picks the best of each
block from those rows and keeps it as data, which the presets read. Run it again after the rows have
changed.
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


# An arm, a task and the epsilon at which settings were tried.
Block = tuple[str, str, int]


@cache
def tuned_settings() -> dict[Block, dict[str, Any]]:
    """The chosen hyper-parameters by arm, task and epsilon."""
    text = (files("dpsur.experiments") / FILE).read_text(encoding="utf-8")
    return {
        (row["arm"], row["task"], int(row["epsilon"])): json.loads(row["settings"])
        for row in csv.DictReader(text.splitlines())
    }


def tuned_setting(arm: str, task: str, epsilon: int) -> dict[str, Any]:
    """What was chosen at this epsilon, else at the nearest that was tried; nothing if none was."""
    tried = [block for block in tuned_settings() if block[:2] == (arm, task)]
    if not tried:
        return {}
    return dict(tuned_settings()[min(tried, key=lambda block: abs(block[2] - epsilon))])


def best_settings(rows: list[dict[str, Any]]) -> dict[Block, dict[str, Any]]:
    """The setting with the best mean accuracy of every block that has rows.

    Where some were tried at a budget stretched to the records that were left, only those count.
    """
    stretched = {_block(row) for row in rows if "stretch" in row["config"]}
    found: dict[Block, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        config, block = row["config"], _block(row)
        if block not in stretched or "stretch" in config:
            setting = json.dumps(config["tried"], sort_keys=True)
            found[block][setting].append(row["accuracy"])
    return {
        block: json.loads(max(tried, key=lambda one: sum(tried[one]) / len(tried[one])))
        for block, tried in found.items()
    }


def _block(row: dict[str, Any]) -> Block:
    config = row["config"]
    return config["arm"], config["task"], round(config["epsilon"] / config.get("stretch", 1))


def main() -> None:
    """Write the best settings of the rows into the data of this package."""
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    chosen = {**tuned_settings(), **best_settings(rows)}
    with (Path(__file__).parent / FILE).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["arm", "task", "epsilon", "settings"])
        for block, setting in sorted(chosen.items()):
            writer.writerow([*block, json.dumps(setting, sort_keys=True)])


if __name__ == "__main__":
    main()
