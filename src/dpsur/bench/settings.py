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
    """How to measure. `grid` pairs networks with batch sizes."""

    grid: Sequence[tuple[str, int]]
    arms: Sequence[str]
    device: torch.device
    repetitions: int
    threads: int
    tf32: bool = False


@contextmanager
def machine(settings: Settings) -> Iterator[None]:
    """Threads and precision for all arms alike, put back afterwards; no warnings meanwhile."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = torch.get_num_threads(), matmul.allow_tf32, cudnn.allow_tf32
    try:
        torch.set_num_threads(settings.threads)
        matmul.allow_tf32 = cudnn.allow_tf32 = settings.tf32
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(before[0])
        matmul.allow_tf32, cudnn.allow_tf32 = before[1:]


def origin_of(settings: Settings) -> dict[str, Any]:
    """What all rows of a run have in common."""
    made = provenance()
    made["versions"] = {**made["versions"], "opacus": _version("opacus")}
    return {
        "config": {
            "threads": settings.threads,
            "tf32": settings.tf32,
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
        [line for line in info.read_text().splitlines() if "model name" in line]
        if info.exists()
        else []
    )
    return names[0].split(":", 1)[1].strip() if names else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
