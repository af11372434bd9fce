"""Settings of the whole process: precision, global seeds, deterministic kernels."""

import os
import platform
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Whether TF32 was allowed outside of our own `precision`, while that holds. For the whole process:
# backward passes run in threads of their own.
_allowed_outside: bool | None = None
# Kinds of devices on which layers may round to bfloat16 by autocast.
_AUTOCAST = ("cpu", "cuda")


@contextmanager
def precision(tf32: bool | None, *, whole_run: bool = False) -> Iterator[None]:
    """Compute matrix products and convolutions in full float32, or with TF32 where asked for.

    None leaves the settings as they are. For a `whole_run` this is what the user asks for.

    PyTorch rounds convolutions to TF32 by default. A clipped contribution that is summed with other
    roundings than its norm was measured with could pass the bound. So layers may round, and norms
    and clipped sums never do, whatever a run asks for. (A rule may round what layers were given:
    then the norm is that of the rounded gradient, which is what is added up.)
    For the same reason autocast is off, where a user calls `backward` within it.
    """
    global _allowed_outside
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    outermost = _allowed_outside is None and not whole_run
    if outermost:
        _allowed_outside = matmul or cudnn
    if tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    try:
        rounds = [kind for kind in _AUTOCAST if torch.is_autocast_enabled(kind)]
        if tf32 is None or whole_run or not rounds:
            yield
            return
        with ExitStack() as stack:
            for kind in rounds:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
        if outermost:
            _allowed_outside = None


def tf32_is_forbidden() -> bool:
    """Whether the user lets nothing be computed from numbers of TF32, not even sums of several."""
    if _allowed_outside is not None:
        return not _allowed_outside
    return not (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32)


@contextmanager
def seeded_globally(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators, and put them back afterwards.

    Those of torch on the host and on a device, NumPy's and Python's, which models draw from too.
    `torch.manual_seed` would seed those of all other devices as well, and leave them so.
    """
    own = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            if device.type == "cuda":
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            yield
    finally:
        random.setstate(own[0])
        np.random.set_state(own[1])


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
    # The other function for this, `use_deterministic_algorithms`, imports TorchInductor, whose
    # settings it changes too. That takes seconds, and nothing is compiled here.
    algorithms = torch.get_deterministic_debug_mode()
    cudnn = torch.backends.cudnn.deterministic
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")
    torch.backends.cudnn.deterministic = True
    memory.fill_uninitialized_memory = False  # nothing here reads such memory
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(algorithms)
        torch.backends.cudnn.deterministic = cudnn
        memory.fill_uninitialized_memory = fill


def as_autocast_sees(values: Tensor) -> Tensor:
    """What autocast gives to a product or a convolution on a GPU.

    Rounded once for the layer and for the norm of its gradient, which would else keep both types.
    """
    if values.dtype == torch.float32 and values.is_cuda and torch.is_autocast_enabled("cuda"):
        return values.to(torch.get_autocast_dtype("cuda"))
    return values


def widen(values: Tensor) -> Tensor:
    """Norms and sums are never taken in half precision."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line for line in lines if "model name" in line]
    return names[0].split(":", 1)[1].strip() if names else platform.machine()
