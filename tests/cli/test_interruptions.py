"""A run that is killed in the middle and resumed ends with the weights it would have had."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpsur.cli import main

COMMAND = [sys.executable, "-m", "dpsur", "train", "--quiet"]
SETTINGS = ["--seed", "0", "--updates", "50", "--batch-size", "64", "--checkpoint-every", "7",
            "--evaluate-every", "1000", "--noise-multiplier", "20"]  # fmt: skip
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}  # as in this process, which rounds alike


def train(*arguments: str) -> None:
    """Train in this process, which spares the imports of another one."""
    assert main(["train", "--quiet", *arguments]) == 0


def rows(folder: Path) -> int:
    metrics = folder / "private" / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def stop_in_the_middle(folder: Path, number: signal.Signals) -> int:
    process = subprocess.Popen(
        [*COMMAND, "--out", str(folder), *SETTINGS],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=ONE_THREAD,
    )
    deadline = time.monotonic() + 120
    while rows(folder) < 18:
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(number)
    process.wait(timeout=60)
    message = process.stderr.read().decode()
    process.stderr.close()
    assert not (folder / "release").exists()
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert f"dpsur train --resume {folder}" in message
    return rows(folder)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("whole") / "run"
    train("--out", str(folder), *SETTINGS)
    return (folder / "release" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_killed_and_resumed(tmp_path, uninterrupted, number):
    folder = tmp_path / "run"
    assert stop_in_the_middle(folder, number) < 50
    train("--resume", str(folder))
    assert (folder / "release" / "model.safetensors").read_bytes() == uninterrupted
    metrics = (folder / "private" / "metrics.jsonl").read_text()
    assert metrics.count('"accepted": true') == 50


@pytest.mark.slow
def test_killed_twice(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    done = stop_in_the_middle(folder, signal.SIGKILL)
    process = subprocess.Popen([*COMMAND, "--resume", str(folder)], stderr=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL, env=ONE_THREAD)  # fmt: skip
    deadline = time.monotonic() + 60
    while rows(folder) < done + 8 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    process.wait(timeout=60)
    if not (folder / "release").exists():
        train("--resume", str(folder))
    assert (folder / "release" / "model.safetensors").read_bytes() == uninterrupted
