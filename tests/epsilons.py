"""Epsilon of every plan that the results were made with, and of the published settings.

`python -m tests.epsilons` writes the table; `tests/privacy/test_epsilons.py` holds plans against
it. Plans may be restructured; what they promise may not change.
"""

import json
import math
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpsur.errors import DpsurError
from dpsur.methods import METHODS
from dpsur.presets.settings import DATASET_SIZES, paper_settings
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import event_to_json, feature_mean, feature_statistics

TABLE = Path(__file__).with_name("epsilons.json")
RESULTS = Path(__file__).parents[1] / "results"
SIZES = {**DATASET_SIZES, "imdb-words": 25_000, "imdb-hashed": 25_000}
SETUPS = {"private": feature_statistics(8.0), "mean": feature_mean(40.0)}
# Settings that no guarantee depends on.
FREE = {
    *("learning_rate", "schedule", "optimizer", "momentum", "adam_beta1", "adam_beta2", "adam_eps"),
    *("average_decay", "loss_clip", "largest_step", "step_sizes", "max_grad_norm", "head_start"),
}


def configurations() -> Iterator[dict[str, Any]]:
    """What decides a plan, once each: of all rows of results, and of the published settings."""
    seen = set()
    for path in sorted(RESULTS.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            config = json.loads(line).get("config")
            if not isinstance(config, dict) or config.get("method") not in METHODS:
                continue
            if "options" not in config or "task" not in config:
                continue
            found = {
                "method": config["method"],
                "size": SIZES[config["task"]] - config.get("hold_out", 0),
                "budget": [config["epsilon"], config["delta"]],
                "accounting": config["accounting"],
                "setup": config.get("normalisation"),
                "options": {k: v for k, v in config["options"].items() if k not in FREE},
            }
            key = json.dumps(found, sort_keys=True)
            if key not in seen:
                seen.add(key)
                yield found
    for setting in paper_settings():
        for accounting in ("published", "proven", "every-trial"):
            yield {
                "method": "dpsur",
                "size": setting.dataset_size,
                "budget": [2 * setting.epsilon, 1e-5],
                "accounting": accounting,
                "setup": "private" if setting.private_statistics else None,
                "options": {
                    "batch_size": setting.batch_size,
                    "noise_multiplier": setting.noise_multiplier,
                    "val_batch_size": setting.val_batch_size,
                    "val_noise_multiplier": setting.val_noise_multiplier,
                    "accept_threshold": setting.accept_threshold,
                    "gate": "loss",
                },
            }


def promised(config: dict[str, Any]) -> dict[str, Any]:
    """What a configuration is planned to: figures, counts and the typical trial, or an error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, plan = METHODS[config["method"]](**config["options"]).settle(
                config["size"],
                Budget(*config["budget"]),
                config["accounting"],
                SETUPS.get(config["setup"], ()),
            )
            return {
                "epsilon": plan.epsilon(),
                "figures": plan.figures(),
                "trials": plan.trials,
                "updates": plan.updates,
                "length": plan.length,
                "typical": event_to_json(plan.typical),
            }
    except DpsurError as error:
        return {"error": type(error).__name__}


def gap(one: Any, other: Any) -> float:
    """Largest relative difference of numbers in two promises; infinite where they differ else."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return max((gap(one[key], other[key]) for key in one), default=0.0)
    if one == other:
        return 0.0
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) / max(abs(one), abs(other))
    return math.inf


def compare() -> None:
    """Print the largest gap between the table and what plans promise now."""
    rows = json.loads(TABLE.read_text(encoding="utf-8"))
    worst = max(gap(row["promised"], promised(row)) for row in rows)
    print(f"{len(rows)} plans, largest relative difference {worst:.1e}")


def main() -> None:
    """Write the table."""
    rows = []
    for config in configurations():
        rows.append({**config, "promised": promised(config)})
        print(len(rows), end="\r", file=sys.stderr)
    TABLE.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    compare() if "--compare" in sys.argv else main()
