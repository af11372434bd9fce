"""Sums of clipped per-example gradients, with the sensitivity they have.

`clipped_sum` is the interface; how the gradients are found behind it cannot change the answer.
"""

from dpsur.per_example.check_and_fix import check_model, draws_randomness
from dpsur.per_example.clipping import ClippedSum, clipped_norms, clipped_sum
from dpsur.per_example.report import EngineReport, engine_report, explain, log_engine

__all__ = [
    "ClippedSum",
    "EngineReport",
    "check_model",
    "clipped_norms",
    "clipped_sum",
    "draws_randomness",
    "engine_report",
    "explain",
    "log_engine",
]
