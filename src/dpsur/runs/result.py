"""What a finished run hands back."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from dpsur import checks
from dpsur.methods import Method
from dpsur.per_example import EngineReport
from dpsur.privacy.events import Ledger
from dpsur.privacy.plan import Plan
from dpsur.privacy.statement import format_epsilon, guarantee_rows
from dpsur.runs.evaluation import shown_scores
from dpsur.runs.files import RunFolder
from dpsur.runs.plots import RunCurves, plot_runs
from dpsur.runs.predictor import Predictor
from dpsur.runs.release import NO_ORIGIN, Origin, write_release
from dpsur.status import html_table, notes
from dpsur.tasks.schema import Values

if TYPE_CHECKING:
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
        folder = _free_folder(Path(path))
        if folder.root != Path(path):
            notes([f"{path} is in use; the release is written to {folder.root}"])
        write_release(folder.release, self.model, self.statement, self.origin)
        object.__setattr__(self, "saved", folder.release)  # for `repr` alone
        return folder.release


def _free_folder(path: Path) -> RunFolder:
    """The folder of this name, or the first numbered one that holds nothing."""
    names = chain([path.name], (f"{path.name}-{number}" for number in count(2)))
    folders = (RunFolder(path.with_name(name) if path.name else path) for name in names)
    folder = next(one for one in folders if not path.name or not _in_use(one.root))
    folder.check_new()
    return folder


def _in_use(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())
