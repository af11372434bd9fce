"""ChaCha20 and Philox: published vectors, and the same bits whatever computes them."""

import ctypes
import math
import shutil
import subprocess
from functools import partial

import numpy as np
import pytest
import torch

from dpsur.mechanism import noise_table
from dpsur.mechanism import streams as random_numbers
from dpsur.mechanism.streams import Key

CPU = torch.device("cpu")
KEYS = {"chacha": Key(bytes(range(32))), "philox": Key(bytes(range(16)))}
# RFC 8439, 2.3.2: key 00..1f, counter 1, nonce 00:00:00:09:00:00:00:4a:00:00:00:00.
RFC_BLOCK = bytes.fromhex(
    "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
    "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
)
RFC_ADDRESS, RFC_STEP = (0, 0x0900, 8), 0x4A000000  # purpose, rank, offset of 8 words
# What a CUDA compiler has and C++ has not, one thread after the other.
HOST = """
#include <math.h>
struct Place { int x, y; };
static Place blockIdx, threadIdx, blockDim;
#define __device__ static
#define __global__
#define __noinline__
#define __umul64hi(a, b) ((word)(((unsigned __int128)(a) * (b)) >> 64))
#define __ddiv_rn(a, b) ((a) / (b))
#define __dadd_rn(a, b) ((a) + (b))
#define __dmul_rn(a, b) ((a) * (b))
#define __double2float_rn(a) ((float)(a))
#define __shfl_down_sync(mask, value, lanes) (0 * (value))
#define atomicAdd(place, value) (*(place) += (value))
"""
THREADS = """
extern "C" void for_thread(int thread) { blockDim.x = 1; blockIdx.x = thread; threadIdx.x = 0; }
"""


def as_uniform(stream):
    return torch.from_numpy((np.frombuffer(stream, "<u8") >> np.uint64(11)) * 2.0**-53)


def test_chacha_gives_the_block_of_the_rfc():
    found = random_numbers.draw(KEYS["chacha"], RFC_STEP, RFC_ADDRESS, 8, CPU, normal=False)
    assert torch.equal(found, as_uniform(RFC_BLOCK))


def test_a_key_has_a_length_of_one_of_the_generators():
    with pytest.raises(ValueError, match="16 or 32 bytes, not 24"):
        Key(bytes(24))


def test_a_draw_ends_with_the_counter():
    """After 2^32 blocks words would come again."""
    last = 8 * 2**32
    draw = partial(random_numbers.draw, KEYS["chacha"], 1, (1, 0, last - 9), device=CPU)
    assert len(draw(9, normal=False)) == 9
    for normal in (False, True):
        with pytest.raises(OverflowError, match="longer than its counter"):
            draw(10, normal=normal)


def on_cpu(key, step, first, blocks, *, normal):
    place = (3, 1, first * key.block)
    return random_numbers.draw(key, step, place, key.block * blocks, CPU, normal=normal)


@pytest.fixture(scope="module", params=["chacha", "philox"])
def on_host(request, tmp_path_factory):
    """The source of the kernels, compiled as C++."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no compiler for C++ here")
    folder, key = tmp_path_factory.mktemp("kernel"), KEYS[request.param]
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    constants = "".join(f"#define {n} {v}\n" for n, v in random_numbers._constants(key.secret))
    source.write_text(HOST + constants + random_numbers._SOURCE + THREADS)
    command = [compiler, "-O1", "-w", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True, capture_output=True)
    return key, ctypes.CDLL(str(library))


@pytest.mark.parametrize("normal", [False, True])
@pytest.mark.parametrize("first", [0, 5, 2**29 - 20_000])
def test_the_kernel_draws_the_same_numbers(on_host, first, normal):
    key, kernels = on_host
    blocks, step = 50, torch.tensor(2**40 + 3)
    found = torch.zeros(blocks * key.block, dtype=torch.float64)
    for thread in range(blocks):
        kernels.for_thread(thread)
        there = (key.on(CPU), step, found, *noise_table.table_on(CPU))
        places = [ctypes.c_void_p(one.data_ptr()) for one in there]
        kernels.draw(*places, 3, 1, *random_numbers._two_halves(first), blocks, int(normal))
    assert torch.equal(found, on_cpu(key, int(step), first, blocks, normal=normal))


def noise_of_the_kernel(on_host, values, scale):
    key, kernels = on_host
    count, step = len(values), torch.tensor(9)
    grid = torch.tensor(scale, dtype=torch.float64) / noise_table.DEVIATION
    found = torch.full((count + 1,), 7.0)
    places = [key.on(CPU), step, values, grid, found, *noise_table.table_on(CPU)]
    for thread in range(-(-count // key.block)):
        kernels.for_thread(thread)
        pointers = [ctypes.c_void_p(one.data_ptr()) for one in places]
        kernels.add_noise(*pointers, 3, 0, 0, 0, count)
    assert found[count] == 7.0  # nothing is written beyond the end
    return found[:count]


@pytest.mark.parametrize("count", [1, 9, 403, 100_003])
def test_the_kernel_adds_the_same_noise(on_host, count):
    """To the last bit; among so many numbers some need further bits."""
    values = torch.linspace(-1, 1, count)
    expected = random_numbers.add_normal(on_host[0], 9, (3, 0, 0), values, 0.3)
    assert torch.equal(noise_of_the_kernel(on_host, values, 0.3), expected)


def test_the_kernel_decides_by_the_same_further_bits(on_host, monkeypatch):
    """With limits whose first bits are 2 in every column, so that few draws stay in theirs."""
    entries, rest = (part.copy() for part in noise_table.table())
    entries[:] = 2 << noise_table.BITS | noise_table.CENTRE
    rest[:] = 2**62
    made = noise_table.Table(entries, rest)
    there = tuple(
        torch.from_numpy(part.view(kind)) for part, kind in ((entries, "i4"), (rest, "i8"))
    )
    monkeypatch.setattr(random_numbers, "table", lambda: made)
    monkeypatch.setattr(noise_table, "table_on", lambda _: there)
    values = torch.zeros(100_000)
    expected = random_numbers.add_normal(on_host[0], 9, (3, 0, 0), values, 0.3)
    assert torch.equal(noise_of_the_kernel(on_host, values, 0.3), expected)
    assert 3 <= len(expected.unique()) < 100


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e38, 1e-45])
def test_extreme_sums_become_the_same_numbers(on_host, value):
    values = torch.full((3,), value)
    expected = random_numbers.add_normal(on_host[0], 9, (3, 0, 0), values, 0.3)
    found = noise_of_the_kernel(on_host, values, 0.3)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("first", [0, 5, 2**29 - 20_000])
def test_a_gpu_draws_the_same_numbers(compiled, first, name, monkeypatch):
    if not compiled:
        monkeypatch.setattr(random_numbers.nvrtc, "compile_kernel", lambda *_: None)
    key, gpu = KEYS[name], torch.device("cuda")
    for normal in (False, True):
        here = on_cpu(key, 9, first, 20_000, normal=normal)
        address, count = (3, 1, first * key.block), 20_000 * key.block
        there = random_numbers.draw(key, 9, address, count, gpu, normal=normal).cpu()
        assert torch.equal(there, here)
    values = torch.linspace(-1, 1, 100_003)
    here = random_numbers.add_normal(key, 9, (3, 1, 0), values, 0.3)
    there = random_numbers.add_normal(key, 9, (3, 1, 0), values.to(gpu), 0.3)
    assert torch.equal(there.cpu(), here)
