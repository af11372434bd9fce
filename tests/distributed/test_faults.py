"""Ranks that die, hang, or have other data; runs that are resumed on another number of ranks."""

import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import dpsur
from dpsur.errors import DistributedError
from dpsur.runs.files import RunFolder
from tests.distributed import jobs, launch
from tests.distributed.test_runs import KINDS, NOISE, assert_all_same, assert_same

EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed" / "train.py"
COIN = KINDS["dpsur with a coin"][0]
PLAIN = dpsur.Dpsgd(**NOISE, updates=12)


def errors(found):
    assert all(isinstance(one, DistributedError) for one in found), found
    return {str(one) for one in found}


def test_other_data_and_other_settings_are_refused_at_the_start(processes):
    (said,) = errors(processes.run(3, partial(jobs.fit, PLAIN, settings_by_rank={("data", 2): 1})))
    assert "rank 2 has other records" in said
    other = {1: {"max_updates": 3}}
    (said,) = errors(processes.run(2, partial(jobs.fit, PLAIN, settings_by_rank=other)))
    assert "rank 1 has other settings than rank 0" in said


def test_a_rank_whose_state_differs_by_one_bit_ends_the_run(processes):
    (said,) = errors(processes.run(2, jobs.drifting_run, PLAIN))
    assert "no longer hold the same state" in said
    assert "nothing is released" in said


def test_unseeded_ranks_share_a_key_and_start_from_the_weights_of_rank_0(processes):
    one, two = processes.run(2, partial(jobs.fit, PLAIN, seed=None))
    assert_same(one, two, 0.0)
    assert one["scores"] == two["scores"]
    assert not torch.equal(
        one["weights"]["0.weight"], jobs.fit(PLAIN, seed=None)["weights"]["0.weight"]
    )


def test_a_run_resumes_on_another_number_of_ranks(processes, tmp_path):
    """It stops on all ranks when one is asked to, and writes its release once."""
    alone = jobs.run_in(tmp_path / "alone", COIN)
    assert processes.run(3, jobs.run_in, tmp_path / "three", COIN, 6) == [6, 6, 6]
    folder = RunFolder(tmp_path / "three")
    assert not folder.release.exists()
    shutil.copytree(folder.root, tmp_path / "one")
    one = jobs.run_in(tmp_path / "one", COIN)
    found = processes.run(2, jobs.run_in, tmp_path / "three", COIN)
    assert folder.finished
    for resumed in (one, found[0]):
        assert resumed["ledger"] == alone["ledger"]
        for name, value in alone["weights"].items():
            torch.testing.assert_close(resumed["weights"][name], value, rtol=0, atol=1e-9)
    released = load_file(folder.release / "model.safetensors")
    torch.testing.assert_close(dict(released), alone["weights"], rtol=0, atol=1e-9)


def test_fit_writes_one_release(processes, tmp_path):
    found = processes.run(2, partial(jobs.fit, PLAIN, out=tmp_path / "run"))
    assert [one["saved"] for one in found] == [tmp_path / "run" / "release"] * 2
    assert dpsur.verify(tmp_path / "run")[0] == []
    assert_all_same(jobs.fit(PLAIN), found)


COMMAND = [
    *("-m", "dpsur", "train", "--task", "mnist-5k", "--method", "dpsgd", "--device", "cpu"),
    *("--noise-multiplier", "4", "--updates", "40", "--keep-fraction", "0.02", "--seed", "1"),
    *("--batch-size", "20", "--checkpoint-every", "2"),
]


def wait_for(path, started, seconds=90):
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, launch.outcomes(started, 1)
        time.sleep(0.05)


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_rank_that_dies_or_hangs_ends_the_others_with_one_line(tmp_path, how):
    out = tmp_path / "run"
    command = [*COMMAND, "--updates", "4000", "--noise-multiplier", "90", "--rank-timeout", "15"]
    started = launch.start(2, [*command, "--out", str(out)])
    folder = RunFolder(out)
    wait_for(folder.checkpoint, started)
    started[1].send_signal(how)
    began = time.monotonic()
    code, _, said = launch.outcomes(started[:1], 60)[0]
    assert time.monotonic() - began < 60
    started[1].kill()
    started[1].wait()
    assert code == 3
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if "error:" in line]
    assert "rank 0 cannot reach the other ranks" in line
    assert not folder.release.exists()
    assert folder.checkpoint.exists()
    started[1].communicate()


@pytest.mark.slow
def test_ten_kills_at_random_moments_resumed_on_other_numbers_of_ranks(tmp_path):
    """The end is that of the uninterrupted run, and so is the ledger."""
    (plain,) = launch.outcomes(launch.start(1, [*COMMAND, "--out", str(tmp_path / "plain")]))
    assert plain[0] == 0, plain
    folder, chosen, kills = RunFolder(tmp_path / "killed"), random.Random(3), 0
    while not folder.finished:
        size = chosen.choice([1, 2, 3])
        where = [*COMMAND[:3], "--resume"] if folder.config.exists() else [*COMMAND, "--out"]
        started = launch.start(size, [*where, str(folder.root), "--rank-timeout", "30"])
        if kills < 10:
            wait_for(folder.checkpoint, started)
            seen, until = folder.checkpoint.stat().st_mtime_ns, time.monotonic() + 60
            while folder.checkpoint.stat().st_mtime_ns == seen and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(chosen.random() * 0.1)
            started[chosen.randrange(size)].kill()
            kills += 1
        launch.outcomes(started)
    assert kills == 10
    one, other = (
        load_file(RunFolder(tmp_path / name).release / "model.safetensors")
        for name in ("plain", "killed")
    )
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-4)
    assert (tmp_path / "plain" / "release" / "privacy.json").exists()
    ledgers = [jobs.ledger_of(tmp_path / name) for name in ("plain", "killed")]
    assert ledgers[0] == ledgers[1]


@pytest.mark.slow
def test_torchrun_restarts_a_run_from_its_checkpoint(tmp_path):
    """`torchrun --max-restarts` starts the same command again, which resumes."""
    import os
    import subprocess
    import sys

    out, marker = tmp_path / "run", tmp_path / "died"
    script = tmp_path / "script.py"
    script.write_text(jobs.DYING_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", "--standalone", str(script), str(out), str(marker)]
    root = str(Path(__file__).parents[2])  # the script imports jobs of these tests
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    found = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert found.returncode == 0, found.stderr
    assert marker.exists()
    assert RunFolder(out).finished
    weights = load_file(out / "release" / "model.safetensors")
    torch.testing.assert_close(dict(weights), jobs.fit(PLAIN)["weights"], rtol=0, atol=1e-9)


@pytest.mark.slow
def test_the_example_resumes_a_sharded_run_on_one_process(tmp_path):
    """What two ranks have saved in shards is the whole of what one process loads."""
    out = ["--out", str(tmp_path / "run"), "--epochs", "1", "--records", "1024"]
    command = [str(EXAMPLE), *out]
    for size, more in ((2, ["--shard"]), (1, [])):
        for code, said, errors in launch.outcomes(launch.start(size, [*command, *more])):
            assert code == 0, errors
            assert not said or "4 steps, epsilon 4.2" in said


def test_a_private_step_of_a_sharded_model_is_refused_by_name(processes):
    for error in processes.run(2, jobs.sharded_private_step):
        assert "private_step does not take a model that fully_shard has sharded" in str(error)
