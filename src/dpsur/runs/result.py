"""What a finished run hands back, and the curves of runs and of guarantees."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from dpsur import checks, figure_style
from dpsur.environment import versions
from dpsur.errors import DpsurError, InvalidInputError
from dpsur.mechanism.blocks import released_metrics
from dpsur.mechanism.streams import HOLDOUT, SETUP
from dpsur.mechanism.trial import Progress
from dpsur.methods import Method
from dpsur.per_example import EngineReport
from dpsur.privacy.events import Ledger
from dpsur.privacy.plan import Plan
from dpsur.privacy.statement import (
    BY_CONSTRUCTION,
    WAS_CHECKED,
    RunFacts,
    format_epsilon,
    guarantee_rows,
    plan_from_statement,
    privacy_statement,
)
from dpsur.runs.evaluation import evaluate, noisy_figures, shown_scores
from dpsur.runs.files import METRICS, PRIVATE, RunFolder, numbered
from dpsur.runs.observers import read_rows
from dpsur.runs.release import (
    NO_ORIGIN,
    Origin,
    Predictor,
    released_model,
    write_release,
)
from dpsur.runs.session import Session
from dpsur.runs.verification import read_statement
from dpsur.status import html_table, notes
from dpsur.tasks.schema import Values

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class PrivateDiagnostics:
    """What happened inside a run. None of it may be published."""

    ledger: Ledger
    rows: Sequence[Mapping[str, Any]]

    def __repr__(self) -> str:
        return "PrivateDiagnostics(ledger and rows; private, not to be published)"


@dataclass(frozen=True, repr=False)
class Run:
    """A finished run.

    `model` has the released weights and is in evaluation mode; call `model.train()` to train it
    further. `epsilon` is the cost under each accounting (None where one does not apply),
    `statement` what to show a reviewer, `scores` the result on the public test set, `engine` how
    gradients were found and why, `saved` where the release was written. `private` is kept apart: it
    must not be published.
    """

    model: nn.Module
    epsilon: Mapping[str, float | None]
    statement: Mapping[str, Any]
    scores: Mapping[str, float] | None
    method: Method
    plan: Plan
    private: PrivateDiagnostics
    origin: Origin = NO_ORIGIN
    engine: EngineReport | None = None
    saved: Path | None = None

    def __repr__(self) -> str:
        guarantee = self.statement["guarantee"]
        return (
            f"Run of {self.method.label}: epsilon {format_epsilon(guarantee['epsilon'])}, delta "
            f"{guarantee['delta']:g} (accounting {guarantee['accounting']})\n"
            f"  {self.statement['accepted_updates']} updates, "
            f"{'not saved' if self.saved is None else f'saved to {self.saved}'}"
        )

    def _repr_html_(self) -> str:
        scores = () if self.scores is None else shown_scores(self.scores)
        saved = "not saved: run.save(folder)" if self.saved is None else str(self.saved)
        rows = [
            *((f"test {name}", text) for name, text in scores),
            *guarantee_rows(self.statement),
            ("release", saved),
        ]
        return html_table(f"Run of {self.method.name}", rows)

    @cached_property
    def predictor(self) -> Predictor:
        """The model with what it takes to predict for records as they are."""
        return Predictor(self.model, self.statement, self.origin)

    def predict(self, records: Any) -> Values:
        """Predictions for records as they are: a post-processing, which costs nothing.

        Classes by name, numbers in their units: what `dpsur.load` returns of the release.
        """
        return self.predictor.predict(records)

    def predict_proba(self, records: Any) -> Values:
        """Probabilities, with a column for each of `predictor.classes`."""
        return self.predictor.predict_proba(records)

    def get_epsilon(self, delta: float) -> float:
        """Epsilon at another delta, under the accounting of the run.

        Not below the budget's delta where there is a cap on trials, which was chosen for it, and
        at no other where there is a privacy filter.
        """
        checks.probability("delta", delta)
        return self.plan.epsilon(delta)

    def plot(self, kind: str = "epsilon") -> "Figure":
        """A matplotlib figure: `epsilon`, `accuracy`, `tradeoff`, or the private `acceptance`.

        A notebook shows it; `run.plot().savefig("epsilon.pdf")` writes it.
        """
        return plot_runs([RunCurves(self.method.label, self.plan, self.private.rows)], kind)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write `release/` into a new folder and return its path. Nothing private is written.

        A folder that is in use stays as it is, and the release goes to the next free name (`out-2`
        beside `out`), which a line on stderr says: the budget of this run is spent already.
        """
        path = Path(path)
        names = (path.with_name(name) if path.name else path for name in numbered(path.name))
        root = next(p for p in names if not path.name or not (p.is_dir() and any(p.iterdir())))
        folder = RunFolder(root)
        folder.check_new()
        if root != path:
            notes([f"{path} is in use; the release is written to {root}"])
        write_release(folder.release, self.model, self.statement, self.origin)
        object.__setattr__(self, "saved", folder.release)  # for `repr` alone
        return folder.release


def finish_run(
    session: Session,
    progress: Progress,
    rows: Sequence[Mapping[str, Any]],
    committed: Mapping[str, str] | None = None,
) -> Run:
    with session.arithmetic():
        released, engine = progress.state.released_params, session.engine()
        scores = None
        if session.test is not None:
            scores = evaluate(session.problem, released, session.test)
        model = released_model(session.original, session.layers, released)
        holdout, fraction = None, session.config.holdout
        if session.holdout is not None and fraction is not None:
            holdout = noisy_figures(
                model,
                session.holdout,
                session.problem.loss,
                fraction=fraction,
                target=(session.plan.epsilon(), session.plan.budget.delta),
                stream=session.streams.at(SETUP)[HOLDOUT],
            )
        facts = RunFacts(
            dataset_size=session.problem.size,
            method=session.method.label,
            settings=asdict(session.method),
            seeded=session.streams.seeded,
            average=progress.state.average is not None,
            tf32=session.tf32,
            bf16=session.config.performance.bf16,
            hide_rejections=session.config.hide_rejections,
            versions=versions(),
            public=session.origin.public,
            independence=WAS_CHECKED if engine.is_slow else BY_CONSTRUCTION,
            metrics=released_metrics(session.procedure, progress.state),
            test=None if session.test is None else {"records": len(session.test), "scores": scores},
            holdout=holdout,
            replay=committed,
        )
        return Run(
            model=model,
            epsilon=session.plan.figures(),
            statement=privacy_statement(session.plan, progress.ledger, facts),
            scores=scores,
            method=session.method,
            plan=session.plan,
            private=PrivateDiagnostics(progress.ledger, tuple(rows)),
            origin=session.origin,
            engine=engine,
        )


SCORES = ("accuracy", "micro_f1", "r2", "loss")  # of which the first that is known is plotted
POINTS = 24  # of a curve that the accountant computes
KINDS: Final = {
    "epsilon": "epsilon by update, under each accounting that applies",
    "accuracy": "accuracy, or another score, on the public test set against epsilon",
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
        return RunCurves(Path(path).resolve().name, plan, run_rows(Path(path)))


def plot_runs(runs: Sequence[RunCurves], kind: str) -> "Figure":
    checks.one_of("kind", kind, tuple(KINDS))
    with figure_style.common():
        figure = figure_style.new_figure(4.6, 3.2)
        axes = figure.subplots()
        drawn = [name for run in runs for name in _draw(axes, run, kind, alone=len(runs) == 1)]
        if not drawn:
            raise InvalidInputError(
                f"there is nothing to plot as {kind}: the run folder holds no such values"
            )
        labels = {
            "epsilon": ("updates", "epsilon"),
            "accuracy": ("epsilon spent", f"test {drawn[0]}"),
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


def _draw(axes: "Axes", run: RunCurves, kind: str, *, alone: bool) -> list[str]:
    found: Curve | None = None
    curves: list[Curve] = []
    if kind == "epsilon":  # under every accounting that applies

        def named(shorter: Plan) -> dict[str, float | None]:
            figures = shorter.figures()
            return {label: figures.get(name) for name, label in ACCOUNTING_NAMES.items()}

        curves = _by_update(run.plan, named)
    elif kind == "accuracy" and not run.plan.run_all_trials:
        scores = (accuracy_by_epsilon(run.rows, score) for score in SCORES)
        found = next((curve for curve in scores if curve), None)
    elif kind == "tradeoff":
        found = tradeoff(run.plan)
    elif kind == "acceptance":
        found = private_curves(run.rows).get("accepted updates")
    curves += [found] if found else []
    for curve in curves:
        label = curve.name if alone else f"{run.name}, {curve.name}"
        if not alone and len(curves) == 1:
            label = run.name
        axes.plot(curve.x, curve.y, marker="o" if kind == "accuracy" else None, ms=3, label=label)
    return [curve.name for curve in curves]


def _by_update(plan: Plan, figures: Callable[[Plan], Mapping[str, float | None]]) -> list[Curve]:
    """What runs of fewer updates by the same plan would cost, by name."""
    points: dict[str, list[tuple[int, float]]] = {}
    for count in sorted({max(1, round(plan.length * (i + 1) / POINTS)) for i in range(POINTS)}):
        try:
            found = figures(plan.limited(count))
        except DpsurError:  # a plan that cannot end earlier, or the blocks of a search
            continue
        for name, value in found.items():
            if value is not None and math.isfinite(value):
                points.setdefault(name, []).append((count, value))
    return [Curve(name, *zip(*some, strict=True)) for name, some in points.items() if len(some) > 1]


def epsilon_by_update(plan: Plan) -> Curve | None:
    """The same under the accounting of the run. Nothing where there is no price."""
    return next(iter(_by_update(plan, lambda shorter: {"epsilon": shorter.epsilon()})), None)


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


def run_rows(folder: Path) -> list[dict[str, Any]]:
    """The private record of a run; empty where there is none."""
    try:
        return read_rows(folder / PRIVATE / METRICS)
    except OSError:
        return []


def accuracy_by_epsilon(rows: Sequence[Mapping[str, Any]], score: str = "accuracy") -> Curve | None:
    """A score of the kept weights on public test records. It says nothing of rejections."""
    found = [
        (row["epsilon"], row[score])
        for row in rows
        if row["kind"] == "evaluation" and None not in (row.get("epsilon"), row.get(score))
    ]
    return Curve(score, *zip(*found, strict=True)) if len(found) > 1 else None


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
                curves[label] = Curve(label, *zip(*points, strict=True))
    return curves
