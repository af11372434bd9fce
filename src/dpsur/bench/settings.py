"""How a run measures, and what its rows say about it."""

import platform
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dpsur.bench.cell import LEARNING_RATE, MAX_GRAD_NORM, MOMENTUM, NOISE_MULTIPLIER
from dpsur.bench.own import VAL_BATCH_SIZE
from dpsur.experiments.rows import provenance


@dataclass(frozen=True)
class Settings:
    """How to measure. `grid` pairs networks with batch sizes.

    `memory_limit` is in bytes: on a card what this process may take of it, on a CPU what the
    process that makes a first step may add to what it has when it starts.
    """

    grid: Sequence[tuple[str, int]]
    arms: Sequence[str]
    device: torch.device
    repetitions: int
    threads: int
    tf32: bool = False
    memory_limit: int | None = None


@contextmanager
def machine(settings: Settings) -> Iterator[None]:
    """Threads, precision and memory for all arms alike, put back afterwards; no warnings."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = torch.get_num_threads(), matmul.allow_tf32, cudnn.allow_tf32
    try:
        torch.set_num_threads(settings.threads)
        matmul.allow_tf32 = cudnn.allow_tf32 = settings.tf32
        _limit_card(settings, settings.memory_limit)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(before[0])
        matmul.allow_tf32, cudnn.allow_tf32 = before[1:]
        _limit_card(settings, None)


def _limit_card(settings: Settings, limit: int | None) -> None:
    """Let this process take so many bytes of a card, or all of it."""
    if settings.memory_limit is not None and settings.device.type == "cuda":
        whole = torch.cuda.mem_get_info(settings.device)[1]
        fraction = 1.0 if limit is None else min(1.0, limit / whole)
        torch.cuda.set_per_process_memory_fraction(fraction, settings.device)


def origin_of(settings: Settings) -> dict[str, Any]:
    """What all rows of a run have in common."""
    made = provenance()
    made["versions"] = {**made["versions"], "opacus": _version("opacus")}
    return {
        "config": {
            "threads": settings.threads,
            "tf32": settings.tf32,
            "memory_limit": settings.memory_limit,
            "dtype": "float32",
            "learning_rate": LEARNING_RATE,
            "momentum": MOMENTUM,
            "max_grad_norm": MAX_GRAD_NORM,
            "noise_multiplier": NOISE_MULTIPLIER,
            "val_batch_size": VAL_BATCH_SIZE,
        },
        "device": settings.device.type,
        "device_name": device_name(settings.device),
        **made,
    }


def device_name(device: torch.device) -> str:
    """What the machine calls the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    names = (
        [line for line in info.read_text(encoding="utf-8").splitlines() if "model name" in line]
        if info.exists()
        else []
    )
    return names[0].split(":", 1)[1].strip() if names else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
