"""Differentially private training in PyTorch with selective update and release.

run = dpsur.fit(model, train_set, loss=F.cross_entropy,
                budget=dpsur.Budget(epsilon=3.0, delta=1e-5), method=dpsur.Dpsur())
run.save("out")
"""

import os

from torch import nn

from dpsur._version import __version__
from dpsur.errors import (
    BudgetError,
    CheckpointError,
    DpsurError,
    InterruptedRunError,
    InvalidInputError,
    NothingReleasedError,
    PrivacyWarning,
    UnsupportedModelError,
)
from dpsur.methods import Dpsgd, Dpsur
from dpsur.privacy.plan import Budget
from dpsur.runs.fit import Run, fit
from dpsur.runs.release import read_release


def load(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Load the model of a release; pass a model of your own that the weights belong to."""
    return read_release(path, model)[0]


__all__ = [
    "Budget",
    "BudgetError",
    "CheckpointError",
    "Dpsgd",
    "Dpsur",
    "DpsurError",
    "InterruptedRunError",
    "InvalidInputError",
    "NothingReleasedError",
    "PrivacyWarning",
    "Run",
    "UnsupportedModelError",
    "__version__",
    "fit",
    "load",
]
