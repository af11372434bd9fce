"""Run the source of a CUDA kernel on the CPU: a thread for every thread of a block."""

import ctypes
import shutil
import subprocess

import pytest
import torch

PRELUDE = """
#include <barrier>
#include <thread>
#include <vector>
struct Place { unsigned x, y, z; };
struct alignas(16) float4 { float x, y, z, w; };
static thread_local Place threadIdx;
static Place blockIdx, gridDim;
static std::barrier<>* meeting;
#define __global__
#define __launch_bounds__(...)
#define __restrict__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __syncthreads() meeting->arrive_and_wait()
#define __syncwarp() meeting->arrive_and_wait()
"""
# Blocks run one after the other, so that shared memory can be static.
LAUNCH = """
extern "C" void launch(unsigned across, unsigned down, unsigned deep, {parameters}) {{
    gridDim = {{across, down, deep}};
    for (unsigned z = 0; z < deep; ++z) for (unsigned y = 0; y < down; ++y)
        for (unsigned x = 0; x < across; ++x) {{
            blockIdx = {{x, y, z}};
            std::barrier<> here({threads});
            meeting = &here;
            std::vector<std::thread> all;
            for (unsigned i = 0; i < {threads}; ++i)
                all.emplace_back([=] {{
                    threadIdx = {{i, 0, 0}};
                    {name}({arguments});
                    meeting->arrive_and_drop();
                }});
            for (auto& one : all) one.join();
        }}
}}
"""


class Emulated:
    """A kernel as `torch.cuda._compile_kernel` gives it, for tensors on the CPU."""

    def __init__(self, source, name, folder, threads, kinds):
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("needs g++")
        names = [f"a{i}" for i in range(len(kinds))]
        text = (
            PRELUDE
            + source
            + LAUNCH.format(
                name=name,
                threads=threads,
                parameters=", ".join(f"{k} {n}" for k, n in zip(kinds, names, strict=True)),
                arguments=", ".join(names),
            )
        )
        (folder / "kernel.cpp").write_text(text)
        options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w"]
        subprocess.run(
            [compiler, *options, "kernel.cpp", "-o", "kernel.so"], cwd=folder, check=True
        )
        self._launch = ctypes.CDLL(str(folder / "kernel.so")).launch
        self._threads = threads

    def __call__(self, grid, block, args):
        assert block == (self._threads, 1, 1)
        values = [
            ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_int(a)
            for a in args
        ]
        self._launch(*(ctypes.c_uint(n) for n in grid), *values)
