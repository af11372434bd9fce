"""The CUDA kernels of this library, run on the CPU: what they compute, not how fast."""

import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from dpsur.per_example.kernels import nvrtc as compiler
from dpsur.per_example.kernels.cuda_weight_grad import summed_gradient
from dpsur.per_example.rules.patches import Window, instantiate
from tests.per_example.emulation import Emulated

PARAMETERS = ("float*", "float*", "float*", "int")


@pytest.fixture
def on_the_cpu(monkeypatch, tmp_path):
    """Let the kernel be compiled for the CPU, whatever the tensors' device."""
    sources = []

    def compile_module(source, _):
        sources.append(source)
        folder = tmp_path / str(len(sources))
        folder.mkdir()
        said = re.search(r"#define THREADS (\d+)", source)
        kernel = Emulated(source, "summed", folder, int(said[1]) if said else 256, PARAMETERS)
        return SimpleNamespace(summed=kernel)

    monkeypatch.setattr(compiler, "_module", compile_module)
    monkeypatch.setattr(compiler, "_can_compile", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(compiler, "DEVICE", "cpu")
    compiler.compile_kernel.cache_clear()
    yield sources
    compiler.compile_kernel.cache_clear()


@pytest.mark.parametrize(
    ("channels", "height", "sides", "window"),
    [
        (81, 16, (7, 7), Window((3, 3), (2, 2), (1, 1), (1, 1))),
        (50, 32, (6, 9), Window((2, 3), (1, 2), (1, 1), (0, 2))),
        (100, 16, (4, 3), Window((1, 1), (1, 1), (1, 1), (0, 0))),
        (158, 48, (5, 5), Window((3, 3), (1, 1), (1, 1), (1, 1))),  # in two parts, by rows
    ],
)
def test_the_summing_kernel_gives_the_usual_gradient(channels, height, sides, window, on_the_cpu):
    torch.manual_seed(0)
    inputs = torch.randn(33, channels, *sides)
    places = [
        (side + 2 * margin - size) // stride + 1
        for side, margin, size, stride in zip(
            sides, window.margins, window.sizes, window.strides, strict=True
        )
    ]
    outputs = torch.randn(33, height, *places)
    found = summed_gradient(inputs, outputs, window)
    assert found is not None
    assert len(on_the_cpu) == 1
    exact = instantiate(inputs.double(), outputs.double(), window, 1).sum(0)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-3)
    assert not torch.allclose(found.double(), exact.roll(1, 1), rtol=1e-4, atol=1e-3)
