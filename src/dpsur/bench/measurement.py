"""What became of an arm in a cell: step times, arm by arm in turn, or a status and a reason."""

import ctypes
import gc
import math
import statistics
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from dpsur.bench.settings import NotInstalledError, Step
from dpsur.errors import UnsupportedModelError

OK = "ok"
OUT_OF_MEMORY = "out-of-memory"
UNSUPPORTED = "unsupported"
NOT_INSTALLED = "not-installed"
TOO_SLOW = "too-slow"
FAILED = "failed"
# What torch says on the CPU, where running out of memory has no separate exception.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "cannot allocate memory")
_LONGEST_REASON = 200
# Warm-up ends after this many steps or, where steps are slow, this many seconds.
WARM_UP_STEPS, WARM_UP_SECONDS = 10, 2.0
# A repetition is as many steps as take about this long, with one wait for the device at its end:
# training does not wait for the device after every step either.
BURST_SECONDS, LONGEST_BURST = 0.05, 50
# A slow arm stops early instead of making everybody wait, but not before a few repetitions.
ARM_SECONDS, FEWEST_REPETITIONS = 20.0, 3


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


@dataclass(frozen=True)
class Timing:
    """Seconds per step, one figure a repetition, each the mean over a burst of steps."""

    seconds: tuple[float, ...]
    burst: int

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        lower, _, upper = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return lower, upper


def interleaved(
    steps: Mapping[str, Step], repetitions: int, device: torch.device
) -> dict[str, Timing | Outcome]:
    """Time all arms in turn, so that whatever drifts meanwhile drifts for all of them.

    An arm that fails is left out of later rounds, and what it failed with is returned for it.
    """
    found: dict[str, Timing | Outcome] = {}
    bursts: dict[str, int] = {}
    for name, step in steps.items():
        try:
            bursts[name] = _warm_up(step, device)
        except Exception as error:  # whatever goes wrong becomes a row
            found[name] = outcome_of(error)
            release(device)
    seconds: dict[str, list[float]] = {name: [] for name in bursts}
    for _ in range(repetitions):
        for name, burst in bursts.items():
            if name in found or _enough(seconds[name], burst):
                continue
            try:
                seconds[name].append(_per_step(steps[name], burst, device))
            except Exception as error:
                found[name] = outcome_of(error)
                release(device)
    for name, values in seconds.items():
        if name not in found:
            found[name] = Timing(tuple(values), bursts[name])
    return found


def _warm_up(step: Step, device: torch.device) -> int:
    """Run in, and return how many steps make a repetition."""
    start = time.perf_counter()
    last = math.inf
    for _ in range(WARM_UP_STEPS):
        last = _per_step(step, 1, device)
        if time.perf_counter() - start > WARM_UP_SECONDS:
            break
    return max(1, min(LONGEST_BURST, round(BURST_SECONDS / last)))


def _per_step(step: Step, count: int, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / count


def _enough(seconds: list[float], burst: int) -> bool:
    return len(seconds) >= FEWEST_REPETITIONS and burst * sum(seconds) > ARM_SECONDS


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if Path("/proc/self/status").exists():
        with suppress(OSError, AttributeError):  # glibc keeps freed memory resident otherwise
            ctypes.CDLL(None).malloc_trim(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()
