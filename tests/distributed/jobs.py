"""What the processes of a test do."""

import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import dpsur
from dpsur.config import Pace
from dpsur.distributed import connect
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.mechanism.loop import train
from dpsur.mechanism.streams import Streams
from tests.methods.problems import BUDGET

CPU = torch.device("cpu")


def records(count, seed=0):
    """Two classes in six dimensions."""
    made = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, dtype=torch.float64, generator=made)
    return inputs, (inputs[:, 0] + inputs[:, 1] > 0).long()


def network(dtype=torch.float64):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def make_run(method, plan, count=61, dtype=torch.float64):
    """All trials of a plan; what must not depend on the number of ranks."""
    inputs, targets = records(count)
    problem = Problem(
        method.adapt(network(dtype)), F.cross_entropy, Examples(inputs.to(dtype), targets)
    )
    verdicts = []
    end = train(
        method.bind(problem, plan),
        plan,
        Streams(3, CPU, connect(CPU)),
        on_block=lambda _, found: verdicts.extend(bool(each.accept) for each in found),
    )
    params = {name: value.clone() for name, value in end.state.released_params.items()}
    return {"weights": params, "ledger": end.ledger.to_json(), "accepted": verdicts}


def fit(method, *, count=61, seed=3, settings_by_rank=None, **settings):
    """One run by `dpsur.fit`."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    inputs, targets = records(count, seed=(settings_by_rank or {}).get(("data", rank), 0))
    settings |= (settings_by_rank or {}).get(rank, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dpsur.PrivacyWarning)
        run = dpsur.fit(
            network(),
            (inputs, targets),
            budget=BUDGET,
            method=method,
            test_set=(inputs, targets),
            seed=seed,
            device="cpu",
            pace=Pace(checkpoint_every=5),
            **settings,
        )
    return {
        "weights": dict(run.model.state_dict()),
        "ledger": run.private.ledger.to_json(),
        "accepted": [row["accepted"] for row in run.private.rows if row["kind"] == "trial"],
        "scores": dict(run.scores or {}),
        "statement": dict(run.statement),
        "saved": run.saved,
    }
