"""The tables of membership inference: figures of every attack over the seeds of a target."""

import csv
import statistics
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

from dpsur.attacks.metrics import LOW_RATES, Figure
from dpsur.experiments.artifacts import Column
from dpsur.experiments.base import Row
from dpsur.experiments.roc import hits_from, low_rate_interval
from dpsur.experiments.settings import EPSILONS

NONPRIVATE = "nonprivate"
RATE_FIELDS = ("tpr_at_1_percent", "tpr_at_01_percent")
# names in the paper's table
PAPER_NAMES = {"shadow": "black-box-shadow", "white-box": "white-box-partial"}
_TARGET = (Column("data", "task"), Column("target", "target"))
ACCURACIES = (
    *_TARGET,
    Column("train accuracy", "train", ".3f"),
    Column("test accuracy", "test", ".3f"),
    Column("attack", "attack"),
    Column("accuracy", "accuracy", ".3f"),
    Column("from", "low", ".3f"),
    Column("to", "high", ".3f"),
    Column("paper", "paper", ".3f"),
    Column("seeds", "seeds"),
)
RATES = (
    *_TARGET,
    Column("attack", "attack"),
    Column("AUC", "auc", ".3f"),
    Column("from", "auc_low", ".3f"),
    Column("to", "auc_high", ".3f"),
    Column("TPR at FPR 1%", "tpr_1", ".4f"),
    Column("from", "tpr_1_low", ".4f"),
    Column("to", "tpr_1_high", ".4f"),
    Column("TPR at FPR 0.1%", "tpr_01", ".4f"),
    Column("from", "tpr_01_low", ".4f"),
    Column("to", "tpr_01_high", ".4f"),
)


def summary(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """The figures of every attack on every kind of target, over its seeds."""
    known = _paper()
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        config = row["config"]
        key = (config["task"], config["method"], str(config["epsilon"] or ""))
        groups.setdefault(key, []).append(row)
    for (task, method, epsilon), mine in groups.items():
        for attack in dict.fromkeys(name for row in mine for name in row["attacks"]):
            found = [row["attacks"][attack] for row in mine if attack in row["attacks"]]
            hits = [hits_from(row["gains"][attack]) for row in mine if attack in row["attacks"]]
            yield {
                "task": task,
                "target": f"{method}, ε {epsilon}" if epsilon else method,
                "train": statistics.mean(row["train_accuracy"] for row in mine),
                "test": statistics.mean(row["test_accuracy"] for row in mine),
                "attack": attack,
                **_over_seeds("accuracy", "", [_stored(f, "balanced_accuracy") for f in found]),
                "paper": known.get((task, PAPER_NAMES.get(attack, ""), method, epsilon)),
                **_over_seeds("auc", "auc_", [_stored(f, "auc") for f in found]),
                **_low_rates(found, hits),
                "seeds": len(found),
            }


def _low_rates(found: Sequence[dict[str, Any]], hits: Sequence[list[int]]) -> dict[str, float]:
    """Rates as they were stored, their intervals by points of the curves.

    Stored intervals of rows that were made before these counted the threshold are too narrow.
    """
    records: dict[str, float] = {}
    for name, field, rate in zip(("tpr_1", "tpr_01"), RATE_FIELDS, LOW_RATES, strict=True):
        figures = []
        for stored, counts in zip(found, hits, strict=True):
            ends = low_rate_interval(counts, stored["members"], stored["others"], rate)
            figures.append(Figure(stored[field]["value"], *ends))
        records |= _over_seeds(name, f"{name}_", figures)
    return records


def _stored(figures: dict[str, Any], name: str) -> Figure:
    return Figure(**figures[name])


def _over_seeds(name: str, prefix: str, figures: Sequence[Figure]) -> dict[str, float]:
    """The mean, and the widest interval."""
    return {
        name: float(statistics.mean(figure.value for figure in figures)),
        f"{prefix}low": min(figure.low for figure in figures),
        f"{prefix}high": max(figure.high for figure in figures),
    }


def _paper() -> dict[tuple[str, str, str, str], float]:
    """The paper's values by data set, attack, target and budget."""
    text = (files("dpsur.experiments") / "paper_membership.csv").read_text(encoding="utf-8")
    values = {}
    for row in csv.DictReader(text.splitlines()):
        for epsilon in EPSILONS:
            key = (row["dataset"], row["attack"], row["target"], str(epsilon))
            values[key] = float(row[f"eps{epsilon}"])
        values[row["dataset"], row["attack"], NONPRIVATE, ""] = float(row["nonprivate"])
    return values
