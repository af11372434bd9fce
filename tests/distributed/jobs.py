"""What the processes of a test do."""

import json
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import dpsur
from dpsur.config import Intervals, RunConfig
from dpsur.distributed import Ranks, Reduction, connect
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.mechanism import gaussian
from dpsur.mechanism.gaussian import Batch
from dpsur.mechanism.streams import Streams
from dpsur.runs.files import RunFolder
from dpsur.runs.fit import execute
from dpsur.runs.session import build_session
from reproduction.loops import train
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


def make_run(method, plan, count=61, dtype=torch.float64, device=CPU):
    """All trials of a plan; what must not depend on the number of ranks."""
    inputs, targets = records(count)
    problem = Problem(
        method.adapt(network(dtype)).to(device),
        F.cross_entropy,
        Examples(inputs.to(dtype), targets).to(device),
    )
    verdicts = []
    end = train(
        method.build(problem, plan),
        plan,
        Streams(3, device, connect(device)),
        on_block=lambda _, found: verdicts.extend(bool(each.accept) for each in found),
    )
    params = {name: value.cpu() for name, value in end.state.released_params.items()}
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
            intervals=Intervals(checkpoint_every=5),
            **settings,
        )
    return outcome(run) | {"scores": dict(run.scores or {}), "saved": run.saved}


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def engine(
    size,
    *,
    wrap=False,
    shard=False,
    gate=None,
    sampler=False,
    most=None,
    steps=20,
    optimizer="sgd",
    **groups,
):
    """A custom loop with `PrivacyEngine`: weights, epsilon and the sizes of the rank's batches."""
    ranks = connect(CPU)
    inputs, targets = records(size)
    model = network()
    if ranks.rank:
        with torch.no_grad():  # an unseeded script starts with other weights on every rank
            model[0].weight.add_(1.0)
    data = torch.utils.data.TensorDataset(inputs, targets)
    own = DistributedSampler(data, ranks.size, ranks.rank) if sampler else None
    loader = DataLoader(data, batch_size=9 // (ranks.size if sampler else 1), sampler=own)
    module = DistributedDataParallel(model) if wrap and ranks.size > 1 else model
    if shard and ranks.size > 1:
        model = network()
        fully_shard(model[0])
        fully_shard(model[2])
        module = fully_shard(model)
    kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.AdamW
    optim = kind(module.parameters(), lr=0.1)
    privacy = dpsur.PrivacyEngine()
    gates = {
        "loss": dpsur.LossGate(
            _test_loss, min(7, size), accept_threshold=0.0, show_verdicts=True, loss_clip=0.5
        ),
        "block": dpsur.BlockGate(blocks=3, block_updates=2, val_noise_multiplier=2.0),
        "losses": dpsur.BlockGate(
            losses=_losses, blocks=3, block_updates=2, val_noise_multiplier=2.0
        ),
    }
    module, optim, loader = privacy.make_private(
        module=module,
        optimizer=optim,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=None if gate in ("block", "losses") else 0.5,
        steps=steps,
        max_physical_batch_size=most,
        gate=gates.get(gate),
        criterion=torch.nn.CrossEntropyLoss(),
        seed=7,
        **groups,
    )
    made = 0
    planned = steps
    if gate in ("block", "losses"):  # tests are steps as well
        planned = privacy.accountant.plan.updates + len(privacy.accountant.plan.blocks)
    while made < planned:
        for x, y in loader:
            optim.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optim.step()
            made = privacy.accountant.steps
            if made == planned:
                break
    weights = {name: whole(value.detach()).clone() for name, value in model.named_parameters()}
    return {
        "weights": weights,
        "ledger": privacy.accountant.to_json(),
        "accepted": list(privacy.verdicts) or _rates(privacy.metrics),
        "rate": loader.sample_rate,
    }


def persons(gate=None):
    """Private steps of persons with up to five records each."""
    inputs, targets = records(60)
    model, privacy = network(), dpsur.PrivacyEngine()
    gates = {"block": dpsur.BlockGate(blocks=3, block_updates=2, val_noise_multiplier=2.0)}
    model, _, loader = privacy.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=6),
        noise_multiplier=1.0,
        max_grad_norm=None if gate else 0.5,
        criterion=torch.nn.CrossEntropyLoss(),
        groups=[int((2 * row) ** 0.5) for row in range(60)],
        records_per_person=5,
        gate=gates.get(gate),
        steps=5,
        seed=7,
    )
    step = privacy.private_step(_test_loss)
    while not privacy.finished():
        for batch in loader:
            step(batch)
    return {
        "weights": {name: value.detach().clone() for name, value in model.named_parameters()},
        "ledger": privacy.accountant.to_json(),
        "accepted": _rates(privacy.metrics),
    }


def _rates(metrics):
    return [row["learning_rate"] and f"{row['learning_rate']:.9g}" for row in metrics]


def _losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def _test_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def pure_noise(wrong=None):
    """Gradients of empty batches, in units of their noise."""
    inputs, targets = records(50)
    problem = Problem(network(), F.cross_entropy, Examples(inputs, targets))
    streams = Streams(3, CPU, connect(CPU))
    params = problem.initial_params()
    empty = Batch(problem.train, rows=torch.zeros(0, dtype=torch.int64), ranks=streams.ranks)
    found = []
    add = gaussian.add_noise
    if wrong == "noise of each rank":

        def add_each(total, noise, stream):
            own = Streams(90 + stream.ranks.rank, CPU, stream.ranks).at(int(stream.step))
            reduction = Reduction(stream.ranks)
            for name, value in add(total, noise, own["noise"]).items():
                reduction.add(name, value)
            return reduction.result()

        gaussian.add_noise = add_each
    try:
        for step in range(1, 201):
            noise = streams.at(step)["noise"]
            gradient = gaussian.dp_mean_gradient(problem, params, empty, 0.1, 2.0, 0.5, noise)
            vector = torch.cat([value.reshape(-1) for value in gradient.values()]) * 5.0 / (2 * 0.5)
            found.append(vector / streams.ranks.size if wrong == "divided by ranks" else vector)
    finally:
        gaussian.add_noise = add
    return torch.cat(found)


def make_wrong_run(wrong, method, plan):
    result, total = Reduction.result, Ranks.sum
    if wrong == "averaged":
        Reduction.result = lambda self: {
            name: value / self._ranks.size for name, value in result(self).items()
        }
    else:
        Ranks.sum = lambda self, values: values
    try:
        return make_run(method, plan)
    finally:
        Reduction.result, Ranks.sum = result, total


def session_of(method, count=61):
    inputs, targets = records(count)
    config = RunConfig(
        task=None,
        method=method,
        budget=BUDGET,
        seed=3,
        device="cpu",
        intervals=Intervals(checkpoint_every=4),
    )
    return build_session(config, network(), (inputs, targets), loss=F.cross_entropy)


def run_in(folder, method, stop_at=None):
    """A run with checkpoints, which rank 1 may ask to stop after some trials; resumed if it can."""
    session, folder = session_of(method), RunFolder(folder)
    resume, calls = folder.checkpoint.exists(), []

    def stop_requested():
        calls.append(None)
        return session.ranks.rank == 1 and len(calls) == stop_at

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dpsur.PrivacyWarning)
        try:
            run = execute(session, folder=folder, resume=resume, stop_requested=stop_requested)
        except dpsur.InterruptedRunError:
            return len(calls)
    return outcome(run)


def outcome(run):
    return {
        "weights": dict(run.model.state_dict()),
        "ledger": run.private.ledger.to_json(),
        "accepted": [row["accepted"] for row in run.private.rows if row["kind"] == "trial"],
    }


def drifting_run(method):
    """A run in which the state of one rank changes by one bit."""
    session = session_of(method)
    ranks, proposer, calls = session.ranks, type(session.procedure.proposer), []
    step = proposer.update_in_place

    def update_in_place(self, state, *rest):
        found = step(self, state, *rest)
        calls.append(None)
        if ranks.rank == 1 and len(calls) == 3:
            next(iter(state.params.values())).view(torch.int64).view(-1)[0] ^= 1
        return found

    proposer.update_in_place = update_in_place
    try:
        session.run()
    finally:
        proposer.update_in_place = step


def ledger_of(folder):
    content = RunFolder(folder).checkpoint.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return json.loads(header["__metadata__"]["dpsur"])["ledger"]


DYING_SCRIPT = """
import os, signal, sys
from pathlib import Path
import dpsur
from tests.distributed import jobs
from tests.distributed.test_runs import NOISE

out, marker = sys.argv[1], Path(sys.argv[2])

class Dies:
    def started(self, plan, progress): pass
    def evaluated(self, *_): pass
    def trials(self, progress, verdicts):
        if progress.ledger.trials == 8 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

jobs.fit(dpsur.Dpsgd(**NOISE, updates=12), out=out, observers=[Dies()])
"""


class Block(nn.Module):
    """A block of a decoder: causal attention and two linear layers."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        rows, length, width = x.shape
        parts = self.attention(self.before(x)).view(rows, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(F.gelu(self.widen(self.between(x))))


class Decoder(nn.Module):
    """A model of the shape of GPT-2."""

    def __init__(self, words=50, width=32, blocks=2, heads=4, length=12):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.words(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x)).transpose(1, 2)


def decoder(shard, steps=4, count=24, words=50, length=12, device=CPU, **sizes):
    """Train a decoder: its weights, and the bytes of weights, gradients and moments per rank."""
    ranks = connect(device)
    torch.manual_seed(0)
    model = Decoder(words=words, length=length, **sizes).double().to(device)
    tokens = torch.randint(words, (count, length + 1))
    data = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
    if shard:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    privacy = dpsur.PrivacyEngine()
    module, optim, loader = privacy.make_private(
        module=model,
        optimizer=optim,
        data_loader=DataLoader(data, batch_size=6),
        noise_multiplier=0.5,
        max_grad_norm=1.0,
        steps=steps,
        seed=5,
    )
    for x, y in loader:
        optim.zero_grad()
        F.cross_entropy(module(x.to(device)), y.to(device)).backward()
        optim.step()
    held = 0
    for value in model.parameters():
        for each in (value, value.grad, *optim.state[value].values()):
            local = each.to_local() if isinstance(each, DTensor) else each
            held += local.nbytes
    weights = {name: whole(value.detach()).cpu() for name, value in model.named_parameters()}
    ledger = privacy.accountant.to_json()
    return {"weights": weights, "ledger": ledger, "accepted": [], "bytes": held, "rank": ranks.rank}


def tensor_parallel():
    """A module that is split as tensor parallelism splits it."""
    ranks = connect(CPU)
    model = network()
    mesh = init_device_mesh("cpu", (ranks.size,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(torch.utils.data.TensorDataset(*records(20)), batch_size=4)
    dpsur.PrivacyEngine().make_private(
        module=model, optimizer=optim, data_loader=data, noise_multiplier=1.0, max_grad_norm=1.0
    )


def fit_sharded():
    dpsur.fit(fully_shard(network()), records(20), budget=BUDGET, method=dpsur.Dpsgd(updates=1))


def sharded_private_step() -> None:
    """A private step of a model that FSDP2 has sharded."""
    module = fully_shard(network())
    optim = torch.optim.SGD(module.parameters(), lr=0.1)
    privacy = dpsur.PrivacyEngine()
    module, optim, loader = privacy.make_private(
        module=module,
        optimizer=optim,
        data_loader=DataLoader(torch.utils.data.TensorDataset(*records(20)), batch_size=10),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        seed=7,
    )
    step = privacy.private_step(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    for batch in loader:
        step(batch)
