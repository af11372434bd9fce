"""Curves of runs and of guarantees, and their plots."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dpsur import checks, figure_style
from dpsur.errors import DpsurError, InvalidInputError
from dpsur.privacy.plan import Plan
from dpsur.privacy.statement import plan_from_statement
from dpsur.runs.files import METRICS, PRIVATE
from dpsur.runs.verification import read_statement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 24  # of a curve that the accountant computes
KINDS: Final = {
    "epsilon": "epsilon by update, under each accounting that applies",
    "accuracy": "accuracy on the public test set against epsilon",
    "tradeoff": "the best attack that the guarantee allows",
    "acceptance": "accepted updates against trials; private",
}
ACCOUNTING_NAMES: Final = {
    "proven": "proven",
    "proven_pld": "proven, by privacy loss distributions",
    "every_trial": "every trial charged",
    "published": "as published (not proved)",
}


@dataclass(frozen=True)
class Curve:
    """One line of a plot."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class RunCurves:
    """What is needed of a run to plot it. `rows` are private."""

    name: str
    plan: Plan
    rows: Sequence[Mapping[str, Any]]

    @staticmethod
    def read(path: str | os.PathLike[str]) -> "RunCurves":
        """Read a run folder, or a release folder, which has no rows."""
        plan = plan_from_statement(read_statement(path))
        return RunCurves(Path(path).resolve().name, plan, read_rows(Path(path)))


def plot_runs(runs: Sequence[RunCurves], kind: str) -> "Figure":
    checks.one_of("kind", kind, tuple(KINDS))
    with figure_style.common():
        figure = figure_style.new_figure(4.6, 3.2)
        axes = figure.subplots()
        drawn = [_draw(axes, run, kind, alone=len(runs) == 1) for run in runs]
        if not any(drawn):
            raise InvalidInputError(
                f"there is nothing to plot as {kind}: the run folder holds no such values"
            )
        labels = {
            "epsilon": ("updates", "epsilon"),
            "accuracy": ("epsilon spent", "test accuracy"),
            "tradeoff": ("false positive rate", "true positive rate"),
            "acceptance": ("trials", "accepted updates"),
        }
        axes.set(xlabel=labels[kind][0], ylabel=labels[kind][1])
        axes.grid(alpha=0.3)
        if kind == "tradeoff":
            axes.plot([0, 1], [0, 1], ":", color=figure_style.GREY, label="guessing")
        if kind == "acceptance":
            axes.set_title("Private: do not publish", color=figure_style.ORANGE)
        if kind == "epsilon":
            axes.set_ylim(bottom=0)
        axes.legend()
        figure.canvas.draw()  # in this style; a later draw would use the user's
    return figure


def _draw(axes: "Axes", run: RunCurves, kind: str, *, alone: bool) -> bool:
    """Draw one run; whether it has what this kind of plot shows."""
    if kind == "epsilon":
        curves = epsilons_by_update(run.plan)
    elif kind == "accuracy":
        found = None if run.plan.run_all_trials else accuracy_by_epsilon(run.rows)
        curves = [found] if found else []
    elif kind == "tradeoff":
        found = tradeoff(run.plan)
        curves = [found] if found else []
    else:
        found = private_curves(run.rows).get("accepted updates")
        curves = [found] if found else []
    for curve in curves:
        label = curve.name if alone else f"{run.name}, {curve.name}"
        if not alone and len(curves) == 1:
            label = run.name
        axes.plot(curve.x, curve.y, marker="o" if kind == "accuracy" else None, ms=3, label=label)
    return bool(curves)


def epsilons_by_update(plan: Plan) -> list[Curve]:
    """Epsilon by update under every accounting that applies to the plan."""
    points: dict[str, list[tuple[int, float]]] = {}
    for count in _counts(plan.length):
        try:
            figures = plan.limited(count).figures()
        except DpsurError:
            continue
        for name, label in ACCOUNTING_NAMES.items():
            value = figures.get(name)
            if value is not None and math.isfinite(value):
                points.setdefault(label, []).append((count, value))
    return [
        Curve(label, [x for x, _ in found], [y for _, y in found])
        for label, found in points.items()
        if len(found) > 1
    ]


def _counts(total: int) -> list[int]:
    return sorted({max(1, round(total * (i + 1) / POINTS)) for i in range(POINTS)})


def epsilon_by_update(plan: Plan) -> Curve | None:
    """What a run of fewer updates by the same plan would cost. Nothing where there is no price."""
    points = []
    for count in _counts(plan.length):
        try:
            epsilon = plan.limited(count).epsilon()
        except DpsurError:  # a plan that cannot end earlier, or the blocks of a search
            continue
        if math.isfinite(epsilon):
            points.append((count, epsilon))
    if len(points) < 2:
        return None
    return Curve("epsilon", [x for x, _ in points], [y for _, y in points])


def tradeoff(plan: Plan) -> Curve | None:
    """The most powerful attack that the guarantee allows, at each false positive rate.

    Every pair (epsilon, delta) that holds bounds the true positive rate of a test for membership;
    the curve is the least of these bounds.
    """
    pairs = []
    for exponent in (0, 1, 2, 3, 4, 5, 6, 8, 10):
        for base in (1.0, 0.3):
            delta = base * 10.0**-exponent
            if delta < 1 and plan.supports_delta(delta):
                try:
                    pairs.append((plan.epsilon(delta), delta))
                except DpsurError:  # beyond what an accountant can compute
                    continue
    pairs = [(epsilon, delta) for epsilon, delta in pairs if math.isfinite(epsilon)]
    if not pairs:
        return None
    rates = [i / 100 for i in range(101)]
    bounds = [
        min(
            1.0,
            *(math.exp(epsilon) * rate + delta for epsilon, delta in pairs),
            *(1 - math.exp(-epsilon) * (1 - delta - rate) for epsilon, delta in pairs),
        )
        for rate in rates
    ]
    return Curve("highest true positive rate", rates, bounds)


def guess_bound(curve: Curve) -> float:
    """The share of right guesses of the best attack, where members and others are equally many."""
    return max((1 - x + y) / 2 for x, y in zip(curve.x, curve.y, strict=True))


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The private record of a run; empty where there is none."""
    path = folder / PRIVATE / METRICS
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "kind" in row:
            rows.append(row)
    return rows


def accuracy_by_epsilon(rows: Sequence[Mapping[str, Any]]) -> Curve | None:
    """Accuracy of the kept weights on public test records. It says nothing of rejections."""
    found = [
        (row["epsilon"], row["accuracy"])
        for row in rows
        if row["kind"] == "evaluation" and row.get("epsilon") is not None and "accuracy" in row
    ]
    if len(found) < 2:
        return None
    return Curve("accuracy", [x for x, _ in found], [y for _, y in found])


def private_curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """What happened at every trial. None of it may be published."""
    trials = [row for row in rows if row["kind"] == "trial"]
    curves = {}
    if trials:
        numbers = [row["trial"] for row in trials]
        curves["accepted updates"] = Curve(
            "accepted updates", numbers, [row["updates"] for row in trials]
        )
        known = {"kind", "trial", "updates", "accepted"}
        names = {name: None for row in trials for name in row if name not in known}
        for name in names:
            points = [
                (row["trial"], row[name])
                for row in trials
                if isinstance(row.get(name), (int, float)) and math.isfinite(row[name])
            ]
            if len(points) > 1:
                label = name.replace("_", " ")
                curves[label] = Curve(label, [x for x, _ in points], [y for _, y in points])
    return curves
