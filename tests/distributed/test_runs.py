"""A run of several processes is the run of one."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

import dpsur
from dpsur.methods import METHODS
from reproduction import methods
from tests.distributed import jobs
from tests.methods.problems import NOISE, OPTIONS, STEPS, settled

COUNT = 61
NOISE = {**NOISE, "batch_size": 9}
KINDS = {
    "dpsgd": (dpsur.Dpsgd(**NOISE, updates=20), "proven"),
    "dpsgd with adam and averaging": (
        dpsur.Dpsgd(**NOISE, updates=20, optimizer="adam", average_decay=0.9),
        "proven",
    ),
    "dpsgd-ts": (methods.DpsgdTs(**NOISE, updates=20), "proven"),
    "dpsur with a coin": (
        dpsur.Dpsur(**NOISE, val_batch_size=7, gate="coin", accept_ratio=1.5, updates=15),
        "proven",
    ),
    "dpsur with noisy losses": (
        dpsur.Dpsur(**NOISE, val_batch_size=7, gate="loss", val_noise_multiplier=6.0, trials=20),
        "every-trial",
    ),
    "dpsur keeping momentum": (
        dpsur.Dpsur(
            **NOISE,
            val_batch_size=7,
            gate="loss",
            val_noise_multiplier=6.0,
            trials=20,
            on_reject="keep-momentum",
        ),
        "every-trial",
    ),
    "blocks tested on all records": (
        dpsur.Dpsur(
            **NOISE, gate="block", blocks=3, block_updates=3, updates=8, val_noise_multiplier=9.0
        ),
        "proven",
    ),
    "blocks tested on samples": (
        dpsur.Dpsur(
            **NOISE,
            gate="block",
            blocks=3,
            block_updates=3,
            updates=8,
            val_batch_size=5,
            val_noise_multiplier=9.0,
        ),
        "proven",
    ),
    "dpis": (METHODS["dpis"](**{**OPTIONS["dpis"], "batch_size": 9, "updates": 16}), "proven"),
    "dpagd": (METHODS["dpagd"](batch_size=9, updates=30, step_sizes=3, raise_by=0.05), "proven"),
    "nonprivate": (dpsur.Nonprivate(**{**STEPS, "batch_size": 9}, updates=20), "proven"),
}


def assert_same(one, other, tolerance=1e-9):
    assert one["ledger"] == other["ledger"]
    assert one["accepted"] == other["accepted"]
    for name, value in one["weights"].items():
        torch.testing.assert_close(other["weights"][name], value, rtol=0, atol=tolerance)


def assert_all_same(alone, found, tolerance=1e-9):
    for one in found:
        assert isinstance(one, dict), one
        assert_same(alone, one, tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_ranks_makes_the_same_run(processes, kind):
    method, plan = settled(*KINDS[kind][:1], COUNT, KINDS[kind][1])
    alone = jobs.make_run(method, plan)
    assert len(alone["accepted"]) >= 15
    for size in (2, 3, 4) if kind in ("dpsgd", "dpsur with a coin") else (3,):
        assert_all_same(alone, processes.run(size, jobs.make_run, method, plan))


def test_gates_accept_and_reject():
    """What is compared above is not one verdict repeated."""
    for kind in ("dpsur with a coin", "dpsur with noisy losses"):
        method, plan = settled(*KINDS[kind][:1], COUNT, KINDS[kind][1])
        assert {True, False} == set(jobs.make_run(method, plan)["accepted"])


@pytest.mark.parametrize("kind", ["dpsgd", "dpsur with a coin", "dpis", "dpagd"])
def test_fewer_records_than_ranks_times_the_batch_and_empty_batches(processes, kind):
    """Of 5 records at rate 0.2 a third of the batches are empty; 4 ranks mostly have no row."""
    method, accounting = KINDS[kind]
    changes = {"batch_size": 1}
    if hasattr(method, "val_batch_size"):
        changes["val_batch_size"] = None if method.val_batch_size is None else 1
    method, plan = settled(replace(method, **changes), 5, accounting)
    alone = jobs.make_run(method, plan, 5)
    for size in (2, 4):
        assert_all_same(alone, processes.run(size, jobs.make_run, method, plan, 5))


def test_float32_differs_by_rounding(processes):
    method, plan = settled(*KINDS["dpsur with a coin"][:1], COUNT, "proven")
    alone = jobs.make_run(method, plan, COUNT, torch.float32)
    found = processes.run(3, jobs.make_run, method, plan, COUNT, torch.float32)
    assert_all_same(alone, found, 1e-5)


@pytest.mark.parametrize("count", [61, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"wrap": True, "most": 2},
        {"optimizer": "adam"},
        {"shard": True},
        {"shard": True, "most": 2, "optimizer": "adam"},
        {"gate": "loss", "most": 2},
        {"gate": "loss", "shard": True, "optimizer": "adam"},
        {"gate": "block", "wrap": True, "most": 2, "steps": 5},
        pytest.param(
            {"gate": "block", "shard": True, "optimizer": "adam", "steps": 5},
            marks=pytest.mark.slow,
        ),
        {"gate": "losses", "shard": True, "steps": 5},
    ],
)
def test_a_custom_loop_is_the_same_on_any_number_of_ranks(processes, count, changes):
    """Also in microbatches, of which the ranks have different numbers, and inside DDP."""
    alone = jobs.engine(count, **changes)
    if changes.get("gate") == "loss" and count > 5:
        assert {True, False} == set(alone["accepted"])
    for size in (2, 3) if changes.get("shard") else (4,):
        found = processes.run(size, partial(jobs.engine, count, **changes))
        assert_all_same(alone, found)


def test_records_of_persons_are_drawn_for_sharded_models(processes):
    """At most two of each person's three records, whoever else is drawn."""
    job = partial(
        jobs.engine,
        60,
        shard=True,
        steps=4,
        groups=[row // 3 for row in range(60)],
        records_per_person=2,
        sampling="record",
        records=50,
    )
    assert_all_same(job(shard=False), processes.run(2, job))


@pytest.mark.parametrize("gate", [None, "block"])
def test_persons_are_the_same_on_any_number_of_ranks(processes, gate):
    """Whoever has many records: all of them are on one rank, and clipped once."""
    assert_all_same(jobs.persons(gate), processes.run(3, jobs.persons, gate))


def test_a_distributed_sampler_gives_the_batch_size_of_each_rank(processes):
    """3 records of each of 3 ranks: the rate is that of batches of 9 in one process."""
    found = processes.run(3, partial(jobs.engine, 60, sampler=True, steps=3))
    alone = jobs.engine(60, steps=3)
    assert all(one["rate"] == pytest.approx(alone["rate"], rel=0.01) for one in found)


def test_a_sharded_decoder_is_the_decoder_of_one_process(processes):
    """Of the shape of GPT-2; each rank holds its part of weights, gradients and moments."""
    alone = jobs.decoder(False)
    for size in (2, 3):
        found = processes.run(size, jobs.decoder, True)
        assert_all_same(alone, found)
        assert max(one["bytes"] for one in found) < 1.2 * alone["bytes"] / size


def test_what_is_split_otherwise_is_refused_by_name(processes):
    for found in processes.run(2, jobs.tensor_parallel):
        assert isinstance(found, dpsur.UnsupportedModelError), found
        assert "tensor parallelism is not supported" in str(found)
    for found in processes.run(2, jobs.fit_sharded):
        assert isinstance(found, dpsur.UnsupportedModelError), found
        assert "PrivacyEngine" in str(found)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dpsgd", "dpsur with a coin", "dpis", "dpagd"])
def test_two_processes_on_one_gpu(processes, kind):
    """With gloo, since NCCL wants a GPU for each; batches are padded on CUDA."""
    method, plan = settled(*KINDS[kind][:1], COUNT, KINDS[kind][1])
    device = torch.device("cuda", 0)
    arguments = (method, plan, COUNT, torch.float64, device)
    alone = jobs.make_run(*arguments)
    assert_all_same(alone, processes.run(2, jobs.make_run, *arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("shard", [False, True])
def test_a_decoder_on_a_gpu_is_that_of_the_cpu(tmp_path, shard):
    """Sharded by FSDP2 over NCCL, with the one rank that one GPU allows."""
    alone = jobs.decoder(False)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    try:
        assert_same(alone, jobs.decoder(shard, device=device))
    finally:
        dist.destroy_process_group()
