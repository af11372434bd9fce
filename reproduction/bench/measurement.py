"""Time and peak memory of steps, arm by arm in turn, as rows.

On CUDA the allocator counts memory. On the CPU it is the rise of resident memory, measured in a
separate process: in a common one it would mix with what other arms left behind. As a command, this
module is that process.
"""

import ctypes
import gc
import json
import math
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dpsur.errors import UnsupportedModelError
from reproduction.bench.basic_arms import (
    OPACUS,
    PLAIN,
    Arm,
    Cell,
    CpuContention,
    Network,
    NotInstalledError,
    Settings,
    Step,
    arm_named,
    machine,
    network_named,
)

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


LONGEST_STEP = 30.0


def rows(
    settings: Settings, say: Callable[[str], None] = lambda _: None
) -> Iterator[dict[str, Any]]:
    """Measure cell by cell; one row per network, batch size and arm, whatever becomes of it."""
    for network, _ in settings.grid:
        settings.network(network)
    for arm in settings.arms:
        arm_named(arm)
    seen: dict[tuple[str, str], tuple[int, float]] = {}
    with machine(settings):
        for network, batch_size in settings.grid:
            outcomes = {}
            for arm in settings.arms:
                say(f"{network}, batch {batch_size}: {arm}")
                outcomes[arm] = _probe(settings, network, batch_size, arm, seen.get((network, arm)))
                if (seconds := outcomes[arm].seconds) is not None:
                    seen[network, arm] = (batch_size, seconds)
            say(f"{network}, batch {batch_size}: timing")
            contention = CpuContention()
            timings = _timings(settings, network, batch_size, outcomes)
            cores = contention.cores()
            described = settings.network(network)
            for row in _cell_rows(described, batch_size, outcomes, timings):
                yield {**row, "cores_used_by_others": cores}


def _probe(
    settings: Settings, network: str, batch_size: int, arm: str, seen: tuple[int, float] | None
) -> Outcome:
    refusal = arm_named(arm).refusal(batch_size, settings.device)
    if refusal is not None:
        return Outcome(UNSUPPORTED, refusal)
    if seen is not None:
        smaller, seconds = seen
        expected = seconds * batch_size / smaller
        if expected > LONGEST_STEP:
            return Outcome(
                TOO_SLOW,
                f"a step took {seconds:.3g} s at batch {smaller}, so about {expected:.3g} s here",
            )
    return probe(network, batch_size, arm, settings)


def _timings(
    settings: Settings, network: str, batch_size: int, outcomes: dict[str, Outcome]
) -> dict[str, Timing]:
    """Time the arms that can make the step; those that fail meanwhile change their outcome."""
    described = settings.network(network)
    cell = Cell(described, described.batch(batch_size, settings.device))
    steps: dict[str, Step] = {}
    for arm in [name for name, outcome in outcomes.items() if outcome.status == OK]:
        try:
            steps[arm] = arm_named(arm).make(cell)
        except Exception as error:  # for example, no room beside the other arms
            outcomes[arm] = outcome_of(error)
    timings = {}
    for arm, found in interleaved(steps, settings.repetitions, settings.device).items():
        if isinstance(found, Timing):
            timings[arm] = found
        else:
            outcomes[arm] = found
    steps.clear()
    release(settings.device)
    return timings


def _cell_rows(
    network: Network,
    batch_size: int,
    outcomes: dict[str, Outcome],
    timings: dict[str, Timing],
) -> Iterator[dict[str, Any]]:
    for arm, outcome in outcomes.items():
        timing = timings.get(arm)
        yield {
            "network": network.name,
            "parameters": network.parameters,
            "batch_size": batch_size,
            "arm": arm,
            "status": outcome.status,
            "reason": outcome.reason,
            "step_seconds": None if timing is None else timing.median,
            "step_seconds_least": None if timing is None else min(timing.seconds),
            "step_seconds_quartiles": None if timing is None else list(timing.quartiles),
            "samples_per_second": None if timing is None else batch_size / timing.median,
            "peak_memory_bytes": outcome.peak_bytes,
            "time_over_plain": _ratio(timing, timings.get(PLAIN)),
            "time_over_opacus": _ratio(timing, timings.get(OPACUS)),
            "memory_over_plain": _memory_ratio(outcome, outcomes.get(PLAIN)),
            "repetitions": 0 if timing is None else len(timing.seconds),
            "steps_per_repetition": 0 if timing is None else timing.burst,
        }


def _ratio(timing: Timing | None, other: Timing | None) -> float | None:
    return None if timing is None or other is None else timing.median / other.median


def _memory_ratio(outcome: Outcome, other: Outcome | None) -> float | None:
    if other is None or outcome.peak_bytes is None or not other.peak_bytes:
        return None
    return outcome.peak_bytes / other.peak_bytes


def line(row: Mapping[str, Any]) -> str:
    """What a reader wants to see of a row while it is being measured."""
    head = f"{row['network']:<17}{row['batch_size']:>6}  {row['arm']:<15}"
    if row["status"] != OK:
        return f"{head}{row['status']}: {row['reason']}"
    lower, upper = (1e3 * value for value in row["step_seconds_quartiles"])
    parts = [
        f"{1e3 * row['step_seconds']:9.2f} ms [{lower:.2f}, {upper:.2f}]",
        f"{row['peak_memory_bytes'] / 2**20:8.0f} MiB",
        f"{row['samples_per_second']:10.0f} samples/s",
    ]
    for key, label in (("time_over_plain", "x plain"), ("time_over_opacus", "x Opacus")):
        if row[key] is not None:
            parts.append(f"{row[key]:.2f} {label}")
    return head + "  ".join(parts)


TIME_LIMIT = 300.0
TINY_BATCH = 2
# Steps before the peak is read: the first makes buffers that the second finds in place.
STEPS = 2
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_MEMINFO = Path("/proc/meminfo")
_SHARE_OF_MEMORY = 0.9


def probe(network: str, batch_size: int, arm: str, settings: Settings) -> Outcome:
    """Make a few steps and report their peak memory, or why they could not be made."""
    if settings.device.type != "cpu":
        return peak(settings.network(network), batch_size, arm, settings.device)
    task = {
        "networks": settings.networks,
        "network": network,
        "batch_size": batch_size,
        "arm": arm,
        "threads": settings.threads,
        "memory_limit": settings.memory_limit,
    }
    try:
        found = subprocess.run(
            [sys.executable, "-m", "reproduction.bench.measurement", json.dumps(task)],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIME_LIMIT,
        )
    except subprocess.TimeoutExpired:
        return Outcome(TOO_SLOW, f"{STEPS + 1} steps took more than {TIME_LIMIT:g} s")
    if found.returncode < 0:
        return Outcome(OUT_OF_MEMORY, f"the process was ended by signal {-found.returncode}")
    try:
        return Outcome(**json.loads(found.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        said = (found.stderr.strip().splitlines() or ["no answer"])[-1]
        return Outcome(FAILED, f"the measuring process failed: {said}")


def peak(network: Network, batch_size: int, arm: str, device: torch.device) -> Outcome:
    """The rise of memory over steps in this process, with one copy of the batch.

    An arm that works on the batch it is given is charged for it: in training it would be gathered
    from a data set first, as ours do.
    """
    try:
        found = _peak(network, batch_size, arm_named(arm), device)
    except Exception as error:  # whatever goes wrong becomes a row
        found = outcome_of(error)
    release(device)
    return found


def _peak(network: Network, batch_size: int, arm: Arm, device: torch.device) -> Outcome:
    # Once with next to no data, so that code, kernels and workspaces are there before counting.
    arm.make(Cell(network, network.batch(min(TINY_BATCH, batch_size), device)))()
    cell = Cell(network, network.batch(batch_size, device))
    before = _start_counting(device)
    step = arm.make(cell)
    for _ in range(STEPS):
        step()
    synchronize(device)
    peak_bytes = max(0, _highest(device) - before)
    if not arm.gathers:
        peak_bytes += cell.batch.inputs.nbytes + cell.batch.targets.nbytes
    start = time.perf_counter()
    step()
    synchronize(device)
    return Outcome(OK, None, peak_bytes, time.perf_counter() - start)


def _start_counting(device: torch.device) -> int:
    release(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if _CLEAR.exists():
        _CLEAR.write_text(
            "5", encoding="utf-8"
        )  # resets the high-water mark to what is resident now
    return _highest(device)


def _highest(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        # Not ru_maxrss: a child process starts with its parent's.
        return 1024 * _kilobytes(_STATUS, "VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _kilobytes(path: Path, key: str) -> int:
    lines = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return next(int(words[1]) for words in lines if words and words[0] == f"{key}:")


def _limit_memory(room: int | None) -> None:
    """Let an allocation fail where the system would otherwise end some process, maybe not this."""
    if _STATUS.exists() and _MEMINFO.exists():
        most = int(_SHARE_OF_MEMORY * 1024 * _kilobytes(_MEMINFO, "MemAvailable"))
        limit = 1024 * _kilobytes(_STATUS, "VmSize") + (most if room is None else min(room, most))
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(task["threads"])
    _limit_memory(task["memory_limit"])
    warnings.simplefilter("ignore")
    network = network_named(task["networks"], task["network"])
    found = peak(network, task["batch_size"], task["arm"], torch.device("cpu"))
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    _main()
