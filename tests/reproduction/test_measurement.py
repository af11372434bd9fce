"""How steps are measured: in turn, with memory in a process of its own."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reproduction.bench import measurement as memory
from reproduction.bench.basic_arms import CpuContention, NotInstalledError, Settings, machine
from reproduction.bench.measurement import Timing, interleaved, outcome_of

CPU = torch.device("cpu")
NETWORKS = "reproduction.bench.networks:network_named"
TINY = Settings(
    networks=NETWORKS, grid=[("pixel-28", 4)], arms=["plain"], device=CPU, repetitions=2, threads=1
)


def test_memory_is_measured_in_a_process_that_finds_the_network():
    found = memory.probe("pixel-28", 64, "plain", TINY)
    assert found.status == "ok"
    assert 26_010 * 4 < found.peak_bytes < 2**28  # weights, activations of 64 images


def test_a_missing_package_and_a_missing_rule_have_a_status():
    assert outcome_of(NotInstalledError("pip install x")).status == "not-installed"
    no_rule = RuntimeError("Batching rule not implemented for aten::lstm")
    assert outcome_of(no_rule).status == "unsupported"
    assert outcome_of(torch.OutOfMemoryError("CUDA out of memory")).status == "out-of-memory"


def test_arms_take_turns():
    order = []
    steps = {name: (lambda name=name: order.append(name)) for name in "abc"}
    found = interleaved(steps, 4, CPU)
    assert all(isinstance(timing, Timing) and len(timing.seconds) == 4 for timing in found.values())
    bursts = {name: timing.burst for name, timing in found.items()}
    turns = [name for _ in range(4) for name in "abc" for _ in range(bursts[name])]
    assert order[-len(turns) :] == turns


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc/stat")
def test_other_processes_on_the_cpu_are_noticed():
    contention = CpuContention()
    code = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    assert contention.cores() * (time.perf_counter() - start) > 0.4


def test_threads_and_precision_are_put_back():
    before = torch.get_num_threads(), torch.backends.cudnn.allow_tf32
    with machine(replace(TINY, tf32=not before[1])):
        assert torch.get_num_threads() == 1
        assert torch.backends.cudnn.allow_tf32 is not before[1]
    assert (torch.get_num_threads(), torch.backends.cudnn.allow_tf32) == before
