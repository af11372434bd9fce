"""Custom kernels for a GPU, compiled when they are first needed."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dpsur.per_example.rules.patches import Window

# The kind of device that the kernels are for.
DEVICE = "cuda"
Kernel = Callable[..., None]
# What a kernel is compiled with, by the names that its source has for it.
Constants = tuple[tuple[str, int], ...]


class SlowerWarning(UserWarning):
    """Something is computed in a slower way than it might be, with the same results."""


@cache
def compile_kernel(source: str, name: str, constants: Constants, device: int) -> Kernel | None:
    """The kernel with its constants on one GPU; None, and a warning, if it cannot be compiled."""
    compile_kernel: Any = getattr(torch.cuda, "_compile_kernel", None)
    if compile_kernel is None or torch.version.hip:
        return None
    defined = "".join(f"#define {key} {value}\n" for key, value in constants)
    try:
        with torch.cuda.device(device), _without_toolkit():
            kernel: Kernel = compile_kernel(defined + source, name)
            return kernel
    except Exception as error:  # no compiler or setuptools at hand, or another call
        warn_slower(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        return None  # other kernels remain


@cache
def warn_slower(reason: str) -> None:
    """Say why kernels are missing: once, however many shapes of layers ask for one."""
    warnings.warn(
        f"a CUDA kernel could not be compiled ({reason}); results are the same, but "
        "steps may be slower",
        SlowerWarning,
        stacklevel=3,
    )


def shapes(inputs: Tensor, outputs: Tensor, window: "Window") -> Constants:
    """The shapes of a convolution in two dimensions, as constants of a kernel."""
    return (
        ("IN_CHANNELS", inputs.shape[1]),
        ("IN_HIGH", inputs.shape[2]),
        ("IN_WIDE", inputs.shape[3]),
        ("OUT_CHANNELS", outputs.shape[1]),
        ("HIGH", outputs.shape[2]),
        ("WIDE", outputs.shape[3]),
        ("KERNEL_HIGH", window.sizes[0]),
        ("KERNEL_WIDE", window.sizes[1]),
        ("STRIDE_DOWN", window.strides[0]),
        ("STRIDE_ALONG", window.strides[1]),
        ("TOP", window.margins[0]),
        ("LEFT", window.margins[1]),
    )


@contextmanager
def _without_toolkit() -> Iterator[None]:
    """PyTorch asks where the headers of a toolkit lie. None are included: any folder will do."""
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = home or gettempdir()
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = home
