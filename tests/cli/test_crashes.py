"""What the command does when it is killed, interrupted, or loses its disk, streams or folders."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from dpsur.cli import main
from dpsur.runs.session import ActiveRun
from tests.cli.test_commands import dpsur
from tests.conftest import blobs

SHORT = ["--method", "dpsgd", "--updates", "6", "--batch-size", "20", "--delta", "1e-3",
         "--noise-multiplier", "8", "--checkpoint-every", "2", "--device", "cpu"]  # fmt: skip
PROCESS = [sys.executable, "-m", "dpsur"]
NETWORK = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Linear(2, 8).requires_grad_(False)
        self.register_buffer("shift", torch.randn(8))
        self.layer = nn.Linear(8, 3)

    def forward(self, inputs):
        return self.layer((self.front(inputs.flatten(1)) + self.shift).tanh())
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    (tmp_path / "random_front_of_tests.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = blobs(80)
    np.savez(tmp_path / "points.npz", x=data.inputs.numpy(), y=data.targets.numpy(), classes=3)
    return f"npz:{tmp_path / 'points.npz'}"


def command(folder, task, *more):
    return ["train", "--out", str(folder), "--task", task, *SHORT, *more]


def weights(folder):
    return (folder / "release" / "model.safetensors").read_bytes()


class Killed(BaseException):
    pass


def die(*_, **__):
    raise Killed


def killed_before(place, arguments, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(place, die)
        with pytest.raises(Killed):
            main(arguments)


def interrupted(arguments, monkeypatch, at=4):
    """Run until an update of this number, then raise KeyboardInterrupt."""
    real = ActiveRun._evaluation_is_due

    def stop(self, last, position):
        if position == at:
            raise KeyboardInterrupt
        return real(self, last, position)

    with monkeypatch.context() as patch:
        patch.setattr(ActiveRun, "_evaluation_is_due", stop)
        assert main(arguments) == 130


@pytest.mark.parametrize(
    "place",
    [
        "dpsur.runs.files.RunFolder.lock",
        "dpsur.runs.fit.write_atomically",  # the settings
        "dpsur.runs.session.Session.fingerprint",
        "dpsur.runs.session.save_checkpoint",
    ],
)
def test_killed_before_the_first_checkpoint(place, task, tmp_path, monkeypatch, capsys):
    assert main(command(tmp_path / "whole", task, "--seed", "0")) == 0
    for again in ("--out", "--resume"):
        folder = tmp_path / f"cut {again}"
        start = command(folder, task, "--seed", "0")
        killed_before(place, start, monkeypatch)
        if again == "--resume":
            capsys.readouterr()
            status = main(["train", "--resume", str(folder)])
            if status == 2:  # there are no settings yet: the message says how to start again
                message = capsys.readouterr().err.strip()
                words = shlex.split(message[message.index("dpsur train --out") :])
                assert words[:4] == ["dpsur", "train", "--out", str(folder)]
                assert main(start) == 0
        else:
            assert main(start) == 0
        assert weights(folder) == weights(tmp_path / "whole")


def test_other_settings_replace_those_of_a_run_that_never_began(task, tmp_path, monkeypatch):
    killed_before(
        "dpsur.runs.session.save_checkpoint", command(tmp_path / "run", task), monkeypatch
    )
    assert main(command(tmp_path / "run", task, "--epsilon", "2")) == 0
    assert json.loads((tmp_path / "run/private/config.json").read_text())["epsilon"] == 2


def test_the_message_after_an_interruption_can_be_pasted(task, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "my run's folder"
    interrupted(command(folder, task, "--quiet"), monkeypatch)
    message = capsys.readouterr().err.strip()
    assert len(message.splitlines()) == 1
    words = shlex.split(message[message.index("dpsur train --resume") :])
    assert words == ["dpsur", "train", "--resume", str(folder)]
    _, _, refusal = dpsur(*command(folder, task), capsys=capsys)
    assert shlex.quote(str(folder)) in refusal
    assert main(words[1:]) == 0


def test_an_empty_release_folder_is_not_reported_as_success(task, tmp_path, monkeypatch, capsys):
    interrupted(command(tmp_path / "run", task), monkeypatch)
    (tmp_path / "run" / "release").mkdir()
    assert dpsur("train", "--resume", str(tmp_path / "run"), capsys=capsys)[0] == 0
    assert weights(tmp_path / "run")


def test_an_unseeded_run_with_random_frozen_weights_is_resumed(task, tmp_path, monkeypatch):
    own = ["--model", "random_front_of_tests:Net"]
    interrupted(command(tmp_path / "run", task, *own), monkeypatch)
    torch.manual_seed(99)
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
    settings = json.loads((tmp_path / "run/private/config.json").read_text())
    assert settings["seed"] is None
    for file in (tmp_path / "run" / "release").iterdir():
        assert str(settings["network_seed"]).encode() not in file.read_bytes()


def test_initial_weights_of_unseeded_runs_differ(task, tmp_path):
    own = ["--model", "random_front_of_tests:Net"]
    for name in "ab":
        assert main(command(tmp_path / name, task, *own)) == 0
    seeds = {json.loads((tmp_path / name / "private/config.json").read_text())["network_seed"]
             for name in "ab"}  # fmt: skip
    assert len(seeds) == 2


CONFIGS = [
    (b"[]", "must hold a JSON object"),
    (b"\xff\xfe", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    ({"epsilon": "3"}, "epsilon cannot be '3'"),
    ({"epsilon": None}, "epsilon cannot be None"),
    ({"seed": 1.5}, "seed cannot be 1.5"),
    ({"seed": True}, "seed cannot be True"),
    ({"tf32": 1}, "tf32 cannot be 1"),
    ({"task": ["mnist"]}, "task cannot be"),
    ({"options": []}, "options cannot be"),
    ({"options": {"updates": "many"}}, "updates"),
    ({"options": {"updates": [1]}}, "updates"),
    ({"options": {"wings": 2}}, "wings"),
    ({"network": {"wings": 2}}, "wings"),
    ({"network": {"name": 7}}, ""),
    ({"method": "magic"}, "magic"),
    ({"checkpoint_every": 0}, "checkpoint_every"),
    ({"data_dir": {}}, "data_dir cannot be"),
    ({"wings": 2}, "wings"),
]


@pytest.mark.parametrize(("change", "message"), CONFIGS, ids=range(len(CONFIGS)))
def test_wrong_settings_are_one_line(change, message, task, tmp_path, monkeypatch, capsys):
    interrupted(command(tmp_path / "run", task), monkeypatch)
    path = tmp_path / "run" / "private" / "config.json"
    settings = json.loads(path.read_text())
    path.write_bytes(
        change if isinstance(change, bytes) else json.dumps(settings | change).encode()
    )
    capsys.readouterr()
    status, out, err = dpsur("train", "--resume", str(tmp_path / "run"), capsys=capsys)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err


def test_a_removed_checkpoint_is_named(task, tmp_path, monkeypatch, capsys):
    interrupted(command(tmp_path / "run", task), monkeypatch)
    (tmp_path / "run/private/checkpoint.safetensors").unlink()
    capsys.readouterr()
    status, _, err = dpsur("train", "--resume", str(tmp_path / "run"), capsys=capsys)
    assert status == 2
    assert "checkpoint.safetensors is missing; start a new run" in err


def test_a_full_disk_is_one_line_with_the_command_that_resumes(task, tmp_path, monkeypatch, capsys):
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) > 8:
            raise OSError(28, os.strerror(28))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        status, _, err = dpsur(*command(tmp_path / "run", task, "--quiet"), capsys=capsys)
    assert status == 2
    assert len(err.splitlines()) == 1
    assert "cannot be written (No space left on device)" in err
    words = shlex.split(err[err.index("dpsur train --resume") :])
    assert main(words[1:]) == 0


def test_an_error_of_the_system_is_one_line_for_every_command(monkeypatch, capsys):
    def fail(options):
        raise PermissionError(13, "Permission denied", "/some/path")

    monkeypatch.setattr("dpsur.cli.listings.run_proof", fail)
    assert dpsur("proof", capsys=capsys) == (
        2, "", "dpsur: error: [file] /some/path: Permission denied\n"
    )  # fmt: skip


def shell(line, **more):
    quoted = " ".join(shlex.quote(word) for word in PROCESS)
    return subprocess.run(
        ["bash", "-c", line.replace("DPSUR", quoted)], capture_output=True, text=True, **more
    )


def test_a_reader_that_leaves_is_no_error():
    done = shell("DPSUR proof | head -1; echo ${PIPESTATUS[0]}")
    assert done.stdout.splitlines()[1:] == ["0"]
    assert done.stderr == ""


def test_letters_that_the_terminal_does_not_have():
    done = shell("PYTHONIOENCODING=ascii DPSUR proof")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert len(done.stdout) > 10_000


def test_a_full_disk_behind_standard_output():
    done = shell("DPSUR proof > /dev/full")
    assert done.returncode == 2
    assert done.stderr == (
        "dpsur: error: [file] standard output cannot be written (No space left on device)\n"
    )


@pytest.mark.parametrize(
    "stream",
    [
        "2>&-", "2> /dev/full", "2>&- >&-",
        *(pytest.param(other, marks=pytest.mark.slow) for other in ("2> >(true)", "0<&- 2>&-")),
    ],
)  # fmt: skip
def test_a_run_survives_the_loss_of_standard_error(stream, task, tmp_path):
    line = shlex.join(command(tmp_path / "run", task, "--evaluate-every", "1"))
    done = shell(f"DPSUR {line} {stream}")
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path / "run")
    shown = done.stdout.splitlines()
    assert ">&- >&-" in stream or shown[-1].startswith("release: ")
    assert not any("warning" in word for word in shown)


def interrupt_when(ready, arguments, folder=None):
    """Start the command, send SIGINT once `ready(process)`, and return what came of it."""
    process = subprocess.Popen(
        [*PROCESS, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        # a suite that runs in the background may ignore SIGINT, and its children with it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not ready(process) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=60)
    return process.returncode, message.decode()


def mapped(library):
    """Whether a process has begun to load a library."""
    return lambda process: library in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.parametrize("library", ["_multiarray_umath", "libtorch_cpu", "libtorch_python"])
def test_ctrl_c_during_imports(library, tmp_path):
    status, message = interrupt_when(mapped(library), ["train", "--out", str(tmp_path / "run")])
    assert (status, message) == (130, "dpsur: stopped\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_set_up_stops_at_once(number, task, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "dpsur.cli.train.build_task_session", lambda *_, **__: os.kill(os.getpid(), number)
    )
    status, _, err = dpsur(*command(tmp_path / "run", task), capsys=capsys)
    assert status == 130
    assert err == "dpsur: stopped; nothing was trained, so run the same command again\n"
    assert not (tmp_path / "run").exists()
