"""Kernels are compiled once per source, ahead of use; where that fails there are none."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.cuda import _utils

from dpsur.mechanism import streams as random_numbers
from dpsur.per_example.kernels import nvrtc

pytestmark = pytest.mark.skipif(
    not hasattr(_utils, "_get_gpu_rtc_library"), reason="torch before 2.8 compiles no kernels"
)
SOURCE = 'extern "C" __global__ void one() {}\nextern "C" __global__ void two() {}\n'


class Library:
    """NVRTC as far as it is called: the binary is the source."""

    def __init__(self, status=0):
        self.status, self.compiled, self.options = status, [], []
        self.open = 0

    def nvrtcCreateProgram(self, program, source, name, headers, *_):  # noqa: N802
        assert (name, headers) == (b"dpsur.cu", 0)
        self.open += 1
        self.compiled.append(source)
        program._obj.value = len(self.compiled)
        return 0

    def nvrtcCompileProgram(self, program, count, options):  # noqa: N802
        self.options += [options[i] for i in range(count)]
        return self.status

    def nvrtcGetCUBINSize(self, program, size):  # noqa: N802
        size._obj.value = len(self.compiled[program.value - 1])
        return 0

    def nvrtcGetCUBIN(self, program, binary):  # noqa: N802
        ctypes.memmove(binary, self.compiled[program.value - 1], len(binary))
        return 0

    def nvrtcDestroyProgram(self, program):  # noqa: N802
        self.open -= 1
        return 0


@pytest.fixture
def library(monkeypatch):
    """A machine that has CUDA, as far as compiling goes."""
    found, loaded = Library(), []

    def load(binary, names=None):
        assert names is None
        loaded.append(binary)
        return SimpleNamespace(one=("one", binary), two=("two", binary))

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(_utils, "_get_gpu_rtc_library", lambda: found)
    monkeypatch.setattr(_utils, "_cuda_load_module", load)
    cached = (nvrtc.compile_kernel, nvrtc._module, nvrtc._binary)
    for one in cached:
        one.cache_clear()
    found.loaded = loaded
    yield found
    for one in cached:
        one.cache_clear()


def test_a_source_is_compiled_and_loaded_once(library):
    constants = (("WIDE", 3),)
    nvrtc.compile_ahead(SOURCE, constants, 0)
    one, two = (nvrtc.compile_kernel(SOURCE, name, constants, 0) for name in ("one", "two"))
    text = b"#define WIDE 3\n" + SOURCE.encode()
    assert (one, two) == (("one", text), ("two", text))
    assert library.compiled == library.loaded == [text]
    assert library.options == [b"--gpu-architecture=sm_90"]
    nvrtc.compile_kernel(SOURCE, "one", (("WIDE", 4),), 0)
    assert len(library.compiled) == 2  # other constants are another source
    assert library.open == 0


def test_where_compiling_fails_there_is_no_kernel_and_one_warning(library):
    library.status = 6
    nvrtc.warn_slower.cache_clear()
    with pytest.warns(nvrtc.SlowerWarning, match="status 6.*same.*slower"):
        first = nvrtc.compile_kernel(SOURCE, "one", (), 0)
    second = nvrtc.compile_kernel(SOURCE, "one", (("HIGH", 2),), 0)  # no second warning
    assert first is None
    assert second is None
    assert library.open == 0


def test_nothing_is_begun_for_other_devices(library, monkeypatch):
    monkeypatch.setattr(random_numbers, "table_on", lambda _: None)
    random_numbers.prepare_kernels(torch.device("cpu"), secret=True)
    assert library.compiled == []
    random_numbers.prepare_kernels(torch.device("cuda:0"), secret=True)
    source = nvrtc._with_constants(random_numbers._SOURCE, random_numbers._constants(True))
    nvrtc._binary(source, (9, 0)).result()
    assert library.compiled == [source.encode()]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [16, 32])
def test_compiled_random_numbers_are_those_of_a_cpu(size):
    nvrtc.compile_kernel.cache_clear()
    key, device = random_numbers.Key(bytes(range(size))), torch.device("cuda")
    found = random_numbers.draw(key, 3, (1, 0, 0), 1000, device, normal=False)
    expected = random_numbers.draw(key, 3, (1, 0, 0), 1000, torch.device("cpu"), normal=False)
    assert torch.equal(found.cpu(), expected)
    noisy = random_numbers.add_normal(key, 3, (1, 0, 0), torch.zeros(1000, device=device), 1.0)
    exact = random_numbers.draw(key, 3, (1, 0, 0), 1000, torch.device("cpu"), normal=True)
    exact /= random_numbers.DEVIATION
    torch.testing.assert_close(noisy.cpu().double(), exact, rtol=1e-6, atol=1e-6)
    nvrtc.compile_kernel.cache_clear()
