"""Rows of the experiments, as the pages of the reproduction speak of them."""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from reproduction.experiments.accuracy import summary
from reproduction.experiments.best import summary as best_summary
from reproduction.experiments.robustness import RATES
from reproduction.series import Point, series

Row = Mapping[str, Any]
# A pattern with a group for every figure, and these figures.
Claim = tuple[str, tuple[str, ...]]
ROOT = Path(__file__).parents[2]
NUMBER = r"([-+]?\d+(?:\.\d+)?)"
THREE = rf"{NUMBER}, {NUMBER} and {NUMBER}"
FOUR = ", ".join([NUMBER] * 3) + f" and {NUMBER}"
MEASURED = rf"{NUMBER} ± {NUMBER}"
WORDS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five"}
WORD = f"({'|'.join(WORDS.values())})"
BUDGETS = (1, 2, 3, 4)
DPSUR_ON_PHOTOS = ("CIFAR-10", "dpsur")
INTERVAL = ("value", "low", "high")


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of an experiment."""
    path = ROOT / "results" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


ROWS = rows_of("accuracy")
FOUND = {(r["task"], r["arm"], r["epsilon"]): r for r in summary(ROWS)}


def fmnist(arm: str) -> list[dict[str, Any]]:
    """An arm on Fashion-MNIST at every budget."""
    return [FOUND["fmnist", arm, epsilon] for epsilon in BUDGETS]


def shown(form: str, values: Iterable[float]) -> tuple[str, ...]:
    """Figures as they are written."""
    return tuple(format(value, form) for value in values)


def gaps(one: str, other: str) -> list[float]:
    """How far one arm is ahead of another on Fashion-MNIST."""
    return [b["mean"] - a["mean"] for a, b in zip(fmnist(one), fmnist(other), strict=True)]


def demo(arm: str) -> float:
    """Mean accuracy on the embedded digits."""
    return mean_accuracy([row for row in rows_of("demo") if row["arm"] == arm])


def best_of(task: str, method: str, epsilon: float) -> dict[str, Any]:
    """A cell of the table of best settings."""
    cell = {"task": task, "method": method, "epsilon": epsilon}
    return next(r for r in best_summary(rows_of("best")) if cell.items() <= r.items())


def mean_accuracy(rows: Sequence[Row]) -> float:
    """In percent."""
    return float(100 * np.mean([row["accuracy"] for row in rows]))


def released(task: str) -> list[dict[str, Any]]:
    """The released code at every budget."""
    return [FOUND[task, "released-code", e] for e in BUDGETS]


def printed(task: str) -> list[dict[str, Any]]:
    """Algorithm 1 by the published accounting at every budget."""
    return [FOUND[task, "published", e] for e in BUDGETS]


def plain_on(task: str) -> list[dict[str, Any]]:
    """Plain DP-SGD on the features of DPSUR, at a proven epsilon."""
    return [FOUND[task, "dpsgd" if task == "imdb" else "dpsgd-hf", e] for e in BUDGETS]


def place_of(row: Row) -> tuple[Any, ...]:
    """Task, arm and budget of a row."""
    return tuple(row["config"][name] for name in ("task", "arm", "epsilon"))


KINDS = {
    "every trial charged": ("every-trial", "constant"),
    "Algorithm 1, proven": ("proven", "constant"),
    "DP-SGD": ("dpsgd-hf", "constant"),
    "DP-SGD, rate decaying": ("dpsgd-hf", "linear"),
}


@cache
def rate_curves() -> dict[tuple[int, tuple[str, str]], list[Point]]:
    """Accuracy against the learning rate, by epsilon and by arm and schedule."""
    curves = {}
    for epsilon, kind in itertools.product((1, 3), KINDS.values()):
        chosen = [r for r in rows_of("robustness") if _kind(r) == kind]
        chosen = [r for r in chosen if r["config"]["epsilon"] == epsilon]
        pairs = ((r["config"]["options"]["learning_rate"], r["accuracy"]) for r in chosen)
        curves[epsilon, kind] = series(pairs)
        assert len(curves[epsilon, kind]) == len(RATES) == 7  # "best of seven rates"
    return curves


def _kind(row: Row) -> tuple[str, str]:
    return row["config"]["arm"], row["config"]["options"]["schedule"]
