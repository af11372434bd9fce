"""Differentially private training in PyTorch with selective update and release.

    run = dpsur.fit(model, train_set, loss=F.cross_entropy,
                    budget=dpsur.Budget(epsilon=3.0, delta=1e-5), method=dpsur.Dpsur())
    run.save("out")

Names are loaded when they are first used, so that accounting does not wait for torch.
"""

from importlib import import_module

from dpsur._version import __version__
from dpsur.errors import (
    BudgetError,
    CheckpointError,
    DiagnosticsWarning,
    DistributedError,
    DpsurError,
    FileError,
    InterruptedRunError,
    InvalidInputError,
    NothingReleasedError,
    PrivacyWarning,
    UnsupportedModelError,
)

TYPE_CHECKING = False  # importing `typing` for it would triple the time that this import takes
if TYPE_CHECKING:
    from typing import Any

    from dpsur.config import Intervals, Performance
    from dpsur.engine.loader import BatchMemoryManager
    from dpsur.engine.privacy_engine import PrivacyEngine
    from dpsur.functional.model_loss import model_loss
    from dpsur.mechanism.gates import BlockGate, CoinGate, LossGate, Metrics
    from dpsur.methods import Dpsgd, DpsgdHf, Dpsur, Nonprivate
    from dpsur.opacus.checkpoint import from_opacus
    from dpsur.per_example import EngineReport, explain
    from dpsur.per_example.api import clipped_sum, per_example_gradients
    from dpsur.per_example.check_and_fix import check, fix
    from dpsur.privacy.account import Account
    from dpsur.privacy.budget import Budget
    from dpsur.privacy.events import CoinTest, Gaussian, LossTest, SampledGaussian, Trial
    from dpsur.privacy.planning import calibrate, selective_epsilon
    from dpsur.privacy.statement import Statement
    from dpsur.runs.fit import fit
    from dpsur.runs.observers import Observer, ProgressBar, Tracker
    from dpsur.runs.release import Predictor, load
    from dpsur.runs.result import Run
    from dpsur.runs.schema_learning import learn_schema
    from dpsur.runs.verification import verify
    from dpsur.tasks.schema import Category, Number, Schema, Text

# module -> the names that it is asked for
_HOMES = {
    "config": "Intervals Performance",
    "engine.loader": "BatchMemoryManager",
    "engine.privacy_engine": "PrivacyEngine",
    "functional.model_loss": "model_loss",
    "mechanism.gates": "BlockGate CoinGate LossGate Metrics",
    "methods": "Dpsgd DpsgdHf Dpsur Nonprivate",
    "opacus.checkpoint": "from_opacus",
    "per_example": "EngineReport explain",
    "per_example.api": "clipped_sum per_example_gradients",
    "per_example.check_and_fix": "check fix",
    "privacy.account": "Account",
    "privacy.budget": "Budget",
    "privacy.planning": "calibrate selective_epsilon",
    "privacy.events": "CoinTest Gaussian LossTest SampledGaussian Trial",
    "privacy.statement": "Statement",
    "runs.fit": "fit",
    "runs.observers": "Observer ProgressBar Tracker",
    "runs.release": "Predictor load",
    "runs.result": "Run",
    "runs.schema_learning": "learn_schema",
    "runs.verification": "verify",
    "tasks.schema": "Category Number Schema Text",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}
# Packages that are imported when they are first named.
_PACKAGES = (
    *("attacks", "audits", "cli", "engine", "features", "functional", "integrations"),
    *("mechanism", "methods", "networks", "opacus", "per_example", "presets", "privacy", "runs"),
    *("reports", "sklearn", "tasks"),
)

__all__ = [
    "Account",
    "BatchMemoryManager",
    "BlockGate",
    "Budget",
    "BudgetError",
    "Category",
    "CheckpointError",
    "CoinGate",
    "CoinTest",
    "DiagnosticsWarning",
    "DistributedError",
    "Dpsgd",
    "DpsgdHf",
    "Dpsur",
    "DpsurError",
    "EngineReport",
    "FileError",
    "Gaussian",
    "InterruptedRunError",
    "Intervals",
    "InvalidInputError",
    "LossGate",
    "LossTest",
    "Metrics",
    "Nonprivate",
    "NothingReleasedError",
    "Number",
    "Observer",
    "Performance",
    "Predictor",
    "PrivacyEngine",
    "PrivacyWarning",
    "ProgressBar",
    "Run",
    "SampledGaussian",
    "Schema",
    "Statement",
    "Text",
    "Tracker",
    "Trial",
    "UnsupportedModelError",
    "__version__",
    "calibrate",
    "check",
    "clipped_sum",
    "explain",
    "fit",
    "fix",
    "from_opacus",
    "learn_schema",
    "load",
    "model_loss",
    "per_example_gradients",
    "selective_epsilon",
    "verify",
]


def __getattr__(name: str) -> "Any":
    if name in _PACKAGES:
        return import_module(f"dpsur.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'dpsur' has no attribute {name!r}")
    return getattr(import_module(f"dpsur.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
