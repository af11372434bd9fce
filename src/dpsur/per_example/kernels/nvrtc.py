"""Custom kernels for a GPU, compiled when they are first needed."""

import ctypes
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
import torch.cuda._utils

# The kind of device that the kernels are for.
DEVICE = "cuda"
Kernel = Callable[..., None]
# What a kernel is compiled with, by the names that its source has for it.
Constants = tuple[tuple[str, int], ...]


class SlowerWarning(UserWarning):
    """Something is computed in a slower way than it might be, with the same results."""


@cache
def compile_kernel(
    source: str, name: str, constants: Constants, device: int | None
) -> Kernel | None:
    """The kernel with its constants on one GPU; None, and a warning, if it cannot be compiled."""
    if not _can_compile():
        return None
    try:
        found: Kernel = getattr(_module(_with_constants(source, constants), device), name)
        return found
    except Exception as error:  # whatever goes wrong, PyTorch's operations compute the same
        warn_slower(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        return None


def _can_compile() -> bool:
    """Whether there is NVRTC, and what loads its results: torch 2.8 and later, with CUDA."""
    return bool(torch.version.cuda) and hasattr(torch.cuda._utils, "_get_gpu_rtc_library")


def compile_ahead(source: str, constants: Constants, device: int) -> None:
    """Begin to compile in another thread; `compile_kernel` takes the result when it is needed."""
    if _can_compile():
        _binary(_with_constants(source, constants), torch.cuda.get_device_capability(device))


def _with_constants(source: str, constants: Constants) -> str:
    return "".join(f"#define {key} {value}\n" for key, value in constants) + source


@cache
def _module(text: str, device: int) -> Any:
    binary = _binary(text, torch.cuda.get_device_capability(device)).result()
    with torch.cuda.device(device):
        return torch.cuda._utils._cuda_load_module(binary)


@cache
def _binary(text: str, capability: tuple[int, int]) -> "Future[bytes]":
    """The compiled source. The compiler runs beside the interpreter, in a thread."""
    return _threads().submit(_compile, text, capability)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(4, thread_name_prefix="dpsur-nvrtc")


def _compile(text: str, capability: tuple[int, int]) -> bytes:
    """Compile by NVRTC. PyTorch's own function imports setuptools and compiles per kernel."""
    library: Any = torch.cuda._utils._get_gpu_rtc_library()

    def check(status: int) -> None:
        if status:
            raise RuntimeError(f"NVRTC failed with status {status}")

    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode()]
    check(
        library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"dpsur.cu", 0, None, None)
    )
    try:
        given = (ctypes.c_char_p * len(options))(*options)
        check(library.nvrtcCompileProgram(program, len(options), given))
        check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        binary = ctypes.create_string_buffer(size.value)
        check(library.nvrtcGetCUBIN(program, binary))
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw


@cache
def warn_slower(reason: str) -> None:
    """Say why kernels are missing: once, however many shapes of layers ask for one."""
    warnings.warn(
        f"a CUDA kernel could not be compiled ({reason}); results are the same, but "
        "steps may be slower",
        SlowerWarning,
        stacklevel=3,
    )
