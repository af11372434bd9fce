"""`dpsur bench`: a user's model beside its peers, and how steps are measured."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from dpsur.bench import measurement as memory
from dpsur.bench import measurement as run
from dpsur.bench.arms import ARMS, CpuContention, NotInstalledError, Settings, machine
from dpsur.bench.measurement import Timing, interleaved, outcome_of
from dpsur.bench.user_model import NETWORKS, model_named
from tests.cli.test_commands import dpsur

CPU = torch.device("cpu")
MODEL = "tests.bench.test_bench:make"
TINY = Settings(
    networks=NETWORKS, grid=[(MODEL, 4)], arms=["plain"], device=CPU, repetitions=2, threads=1
)
SHORT = ("--repetitions", "1", "--threads", "1", "--device", "cpu")
not_a_function = 3


def make(batch_size):
    """A model of 9 parameters and a batch for it."""
    model = nn.Sequential(nn.Linear(2, 3))
    return model, torch.randn(batch_size, 2), torch.randint(3, (batch_size,))


def make_wrong(batch_size):
    return make(batch_size)[:2]


def make_short(batch_size):
    return make(batch_size - 1 if batch_size > 1 else 2)


@pytest.fixture
def in_process(monkeypatch):
    """Probe memory in this process: the figure is worthless, the rest is the same and quick."""
    monkeypatch.setattr(
        run,
        "probe",
        lambda name, size, arm, settings: memory.peak(
            settings.network(name), size, arm, settings.device
        ),
    )
    monkeypatch.setattr("dpsur.bench.measurement.WARM_UP_STEPS", 1)
    monkeypatch.setattr("dpsur.bench.measurement.BURST_SECONDS", 0.0)


@pytest.mark.usefixtures("in_process")
def test_a_model_is_measured_beside_plain_pytorch(capsys):
    given = ("bench", "--model", MODEL, "--batch-size", "8", "4", *SHORT)
    status, out, said = dpsur(*given, "--arms", "plain", "dpsgd", "--json", capsys=capsys)
    assert "one-pass" in said  # how gradients are found
    assert status == 0
    rows = [json.loads(line) for line in out.splitlines()]
    arms = ("plain", "dpsgd")
    assert [(row["batch_size"], row["arm"]) for row in rows] == [
        (n, a) for n in (4, 8) for a in arms
    ]
    for row in rows:
        assert (row["network"], row["parameters"], row["status"]) == (MODEL, 9, "ok")
        assert row["step_seconds"] > 0
        assert row["time_over_plain"] > 0
        assert "commit" not in row


@pytest.mark.usefixtures("in_process")
def test_without_names_all_arms_are_measured_that_the_device_can_run(capsys, monkeypatch):
    for name in set(ARMS) - {"plain", "plain-captured", "dpsgd", "dpsgd-captured"}:
        monkeypatch.delitem(ARMS, name)  # registered by the benchmarks of the repository
    given = ("bench", "--model", MODEL, "--batch-size", "4", *SHORT)
    status, out, _ = dpsur(*given, capsys=capsys)
    assert status == 0
    shown = [line.split()[2] for line in out.splitlines()]
    assert shown == ["plain", "dpsgd"]


def test_every_arm_gets_the_same_model_and_batch():
    one, two = model_named(MODEL), model_named(MODEL)
    assert torch.equal(one.model(CPU)[0].weight, two.model(CPU)[0].weight)
    assert torch.equal(one.batch(5, CPU).inputs, two.batch(5, CPU).inputs)
    assert not torch.equal(one.model(CPU)[0].weight, one.model(CPU, seed=1)[0].weight)


def test_memory_is_measured_in_a_process_that_finds_the_model(tmp_path, monkeypatch):
    (tmp_path / "wide.py").write_text(
        "import torch\n"
        "def make(size):\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.Linear(1000, 2))\n"
        "    return model, torch.randn(size, 1000), torch.randint(2, (size,))\n"
    )
    monkeypatch.chdir(tmp_path)
    found = memory.probe("wide:make", 4, "plain", TINY)
    assert found.status == "ok"
    assert 3 * 4_000_000 < found.peak_bytes < 100 * 4_000_000  # weights, gradients and momentum


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "nowhere"), "must be module:function"),
        (("--model", "no.such:make"), "cannot find --model no.such:make"),
        (("--model", "tests.bench.test_bench:nothing"), "cannot find --model"),
        (("--model", "tests.bench.test_bench:not_a_function"), "got int"),
        (("--model", "tests.bench.test_bench:make_wrong"), "returns (model, inputs, labels)"),
        (("--model", "tests.bench.test_bench:make_short"), "asked for a batch of 1 and made 2"),
        (("--arms", "magic"), "unknown arm 'magic'"),
        (("--batch-size", "0"), "batch size must be"),
        (("--repetitions", "0"), "repetitions must be"),
        (("--threads", "-1"), "threads must be"),
        (("--memory-limit", "0"), "memory_limit must be"),
        (("--memory-limit", "1e308"), "memory_limit must be at most"),
        (("--device", "abacus"), "unknown device 'abacus'"),
    ],
)
def test_bad_input_is_one_line_and_status_two(arguments, words, capsys):
    usual = ("bench", "--model", MODEL, "--batch-size", "4")
    status, _, err = dpsur(*usual, *arguments, capsys=capsys)
    assert status == 2
    assert words in err
    assert err.startswith("dpsur: error: ")
    assert err.count("\n") == 1


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
