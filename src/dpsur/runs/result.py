"""What a finished run hands back."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.methods import Method
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.filtered import AnyPlan, FilteredPlan
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.menu_plan import MenuPlan
from dpsur.runs.files import RunFolder
from dpsur.runs.release import NO_ORIGIN, Origin, write_release


@dataclass(frozen=True)
class PrivateDiagnostics:
    """What happened inside a run. None of it may be published."""

    ledger: Ledger
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Run:
    """A finished run.

    `model` has the released weights, `epsilon` the cost under each accounting (None where one does
    not apply), `statement` what to tell a reviewer, `scores` the result on the public test set.
    `private` is kept apart: it must not be published.
    """

    model: nn.Module
    epsilon: Mapping[str, float | None]
    statement: Mapping[str, Any]
    scores: Mapping[str, float] | None
    method: Method
    plan: AnyPlan
    private: PrivateDiagnostics
    origin: Origin = NO_ORIGIN

    def get_epsilon(self, delta: float) -> float:
        """Epsilon at another delta, under the accounting of the run.

        Not below the budget's delta where there is a cap on trials, which was chosen for it.
        """
        checks.probability("delta", delta)
        if isinstance(self.plan, FilteredPlan):
            raise InvalidInputError(
                f"the privacy filter of this run was made for delta {self.plan.budget.delta:g}; "
                "plan the run with another delta"
            )
        if isinstance(self.plan, MenuPlan):
            return self.plan.epsilon(delta)
        capped = self.plan.updates is not None and self.plan.trial.gate is not None
        if capped and delta < self.plan.budget.delta:
            raise InvalidInputError(
                f"the cap on trials was chosen for delta {self.plan.budget.delta:g} and does not "
                f"cover {delta:g}; plan the run with the smaller delta"
            )
        return accounting_named(self.plan.accounting).spent(self.private.ledger, delta)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write `release/` into a new folder and return its path. Nothing private is written."""
        folder = RunFolder(path)
        folder.check_new()
        write_release(folder.release, self.model, self.statement, self.origin)
        return folder.release
