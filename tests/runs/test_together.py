"""Runs at once end as they would alone."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpsur.config import Intervals, RunConfig
from dpsur.errors import NothingReleasedError
from dpsur.methods import Dpsgd, Dpsur
from dpsur.privacy.budget import Budget
from dpsur.runs.fit import execute, run_together
from dpsur.runs.session import ActiveRun, Session, build_session
from tests.conftest import blobs, small_model

METHOD = Dpsur(updates=12, noise_multiplier=20.0, batch_size=20, accept_ratio=1.5)


def session(seed, method=METHOD, model=None, data=None, device="cpu"):
    config = RunConfig(
        task=None,
        budget=Budget(3.0, 1e-4),
        method=method,
        seed=seed,
        device=device,
        intervals=Intervals(checkpoint_every=4),
    )
    return build_session(
        config,
        small_model() if model is None else model,
        blobs() if data is None else data,
        loss=F.cross_entropy,
        test_set=blobs(60, seed=2) if data is None else None,
    )


def assert_same(together, alone):
    assert together.private.ledger == alone.private.ledger
    assert together.scores == alone.scores
    for name, value in alone.model.state_dict().items():
        assert torch.equal(value, together.model.state_dict()[name])
    told = [(row["kind"], row.get("accepted")) for row in together.private.rows]
    assert told == [(row["kind"], row.get("accepted")) for row in alone.private.rows]


@pytest.fixture(params=[False, True], ids=["trial-by-trial", "in-blocks"])
def in_blocks(request, monkeypatch):
    if request.param:  # what CUDA does, without the graph
        monkeypatch.setattr(Session, "_may_capture", lambda self: True)
    return request.param


def test_seeds_at_once_are_the_seeds_alone(in_blocks, monkeypatch):
    order, collect = [], ActiveRun.collect

    def noted(run):
        order.append(run._session.config.seed)
        collect(run)

    monkeypatch.setattr(ActiveRun, "collect", noted)
    seeds, method = (0, 1, 2), METHOD
    together = run_together([session(seed, method) for seed in seeds])
    monkeypatch.setattr(ActiveRun, "collect", collect)
    for seed, found in zip(seeds, together, strict=True):
        assert_same(found, execute(session(seed, method)))
    assert not torch.equal(together[0].model[0].weight, together[1].model[0].weight)
    assert order[:3] == [0, 1, 2]  # a block of each in turn


def test_runs_of_different_lengths_and_methods(in_blocks):
    methods = [Dpsgd(updates=3, noise_multiplier=20.0, batch_size=20), METHOD]
    for found, method in zip(
        run_together([session(5, method) for method in methods]), methods, strict=True
    ):
        assert_same(found, execute(session(5, method)))


def test_a_run_without_a_release_does_not_end_the_others(in_blocks):
    hopeless, good = session(0), session(1)
    assert good.plan.updates == 12
    (phase,) = hopeless.plan.phases
    short = replace(hopeless.plan, phases=(replace(phase, cap=3),))
    found = run_together([replace(hopeless, plan=short), good])
    assert isinstance(found[0], NothingReleasedError)
    assert_same(found[1], execute(session(1)))


def test_no_runs_at_once_are_none():
    assert run_together([]) == []


@pytest.mark.gpu
def test_streams_of_one_card_do_not_disturb_each_other():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Flatten(),
        nn.Linear(8 * 36, 32), nn.Tanh(), nn.Linear(32, 3),
    )  # fmt: skip
    data = (torch.randn(3000, 2, 8, 8, device="cuda"), torch.randint(0, 3, (3000,), device="cuda"))
    method = Dpsur(updates=40, noise_multiplier=40.0, batch_size=600, accept_ratio=1.5)
    sessions = [session(seed, method, model, data, "cuda") for seed in range(4)]
    assert len({one.problem.train.inputs.data_ptr() for one in sessions}) == 1
    for seed, found in enumerate(run_together(sessions)):
        assert_same(found, execute(session(seed, method, model, data, "cuda")))
