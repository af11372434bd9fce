"""Repeatable kernels for a seeded run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def repeatable(device: torch.device, seeded: bool) -> Iterator[None]:
    """Choose deterministic kernels for a seeded run on CUDA, and put the settings back.

    Without them sums in kernels depend on the order in which threads finish, so that a resumed run
    would drift from an uninterrupted one. Unseeded runs keep the faster kernels.
    """
    if not seeded or device.type != "cuda":
        yield
        return
    # cuBLAS reads this when it is first used, so that it is not put back.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    algorithms = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.deterministic
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    memory.fill_uninitialized_memory = False  # nothing here reads such memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
        torch.backends.cudnn.deterministic = cudnn
        memory.fill_uninitialized_memory = fill
