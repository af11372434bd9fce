"""What became of an arm in a cell: a measurement, or a status and a reason."""

from dataclasses import dataclass

import torch

from dpsur.bench.cell import NotInstalledError
from dpsur.errors import UnsupportedModelError

OK = "ok"
OUT_OF_MEMORY = "out-of-memory"
UNSUPPORTED = "unsupported"
NOT_INSTALLED = "not-installed"
TOO_SLOW = "too-slow"
FAILED = "failed"
# What torch says on the CPU, where running out of memory has no exception of its own.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "cannot allocate memory")
_LONGEST_REASON = 200


@dataclass(frozen=True)
class Outcome:
    """Whether a step could be made; if so, its peak memory and how long one step took."""

    status: str
    reason: str | None = None
    peak_bytes: int | None = None
    seconds: float | None = None


def outcome_of(error: BaseException) -> Outcome:
    """Put an error into words that a row can carry."""
    text = str(error).strip()
    first = (text.splitlines() or [""])[0][:_LONGEST_REASON]
    reason = f"{type(error).__name__}: {first}"
    if isinstance(error, NotInstalledError):
        return Outcome(NOT_INSTALLED, first)
    if isinstance(error, UnsupportedModelError):
        return Outcome(UNSUPPORTED, first)
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return Outcome(OUT_OF_MEMORY, reason)
    if any(words in text.lower() for words in _NO_MEMORY):
        return Outcome(OUT_OF_MEMORY, reason)
    lacks_rule = isinstance(error, NotImplementedError) or "batching rule" in text.lower()
    if lacks_rule or "Unsupported" in type(error).__name__:
        return Outcome(UNSUPPORTED, reason)
    return Outcome(FAILED, reason)
