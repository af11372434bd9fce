"""Sums of clipped per-example gradients, with the sensitivity they have.

`clipped_sum` is the interface; how the gradients are found behind it cannot change the answer.
"""

from dpsur.core.gradients.budget import GradientBudget
from dpsur.core.gradients.clipping import ClippedSum, clipped_sum
from dpsur.core.gradients.plan import EngineChoice, engine_choice, log_choice
from dpsur.core.gradients.record_norms import clipped_norms
from dpsur.core.gradients.support import check_model, draws_randomness

__all__ = [
    "ClippedSum",
    "EngineChoice",
    "GradientBudget",
    "check_model",
    "clipped_norms",
    "clipped_sum",
    "draws_randomness",
    "engine_choice",
    "log_choice",
]
