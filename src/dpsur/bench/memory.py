"""Peak memory of a step, and whether it can be made at all.

On CUDA the allocator counts. On the CPU it is the rise of resident memory, measured in a separate
process: in a common one it would mix with what other arms left behind. As a command, this module
is that process: `python -m dpsur.bench.memory '{"network": ...}'`.
"""

import json
import resource
import subprocess
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path

import torch

from dpsur.bench.arms import Arm, arm_named
from dpsur.bench.measurement import (
    FAILED,
    OK,
    OUT_OF_MEMORY,
    TOO_SLOW,
    Outcome,
    outcome_of,
    release,
    synchronize,
)
from dpsur.bench.settings import Cell, Network, Settings, network_named

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
            [sys.executable, "-m", "dpsur.bench.memory", json.dumps(task)],
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
