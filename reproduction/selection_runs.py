"""Runs of the experiments on selection: data and networks, arms, and how rows are made.

Starting rates and seeds of an arm are trained at once in one process, each on its own CUDA stream:
small networks do not fill a GPU.
"""

import gc
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpsur.config import Intervals, Performance, RunConfig
from dpsur.errors import BudgetError
from dpsur.mechanism.block_tests import METRICS_NORM, class_metrics
from dpsur.mechanism.blocks import RateSearchTraining
from dpsur.mechanism.streams import VAL_NOISE, Streams
from dpsur.methods import Dpsgd, Dpsur
from dpsur.methods.gradient_method import NO_GATE, GradientMethod
from dpsur.privacy.accountants.rdp import epsilon_at, sampled_gaussian_rdp
from dpsur.privacy.budget import Budget
from dpsur.runs.fit import run_together
from dpsur.runs.result import Run
from dpsur.runs.session import Session
from dpsur.runs.tasks import TaskRecords, build_task_session
from reproduction.base import Cell, Experiment, Options, Row
from reproduction.dog import Dog
from reproduction.training import (
    BLOCK,
    DELTA,
    NEVER,
    device_name,
    is_of_memory,
    limit_gpu_share,
    loaded_records,
)

EPSILONS = (1, 3)
CLIP = 0.1  # the library's default
HOLD_OUT_SHARE = 6  # one record of so many is held out where rates are chosen
MOST_TOGETHER = 18
# Raised whenever the rule of the gate block changes: with SGD, with Adam, where a rate is given.
SEARCH, ADAM_SEARCH, GIVEN_SEARCH = 4, 5, 6


@dataclass(frozen=True)
class Case:
    """Data, a network and settings that all arms share.

    `rates` are where the choice of a tuned rate starts, by epsilon.
    """

    name: str
    label: str
    task: str
    records: int
    features: str
    batch_size: int
    updates: int
    seeds: int
    rates: Mapping[int, float]
    network: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tf32: bool = False


PIXELS_10 = {"inputs": 784, "classes": 10}
CASES = {
    case.name: case
    for case in (
        Case("mnist-linear", "MNIST, linear", "mnist", 60_000, "pixels", 1024, 500, 5,
             {1: 4.0, 3: 8.0}, {"name": "linear", **PIXELS_10}),
        Case("mnist-cnn", "MNIST, CNN", "mnist", 60_000, "pixels", 1024, 500, 3,
             {1: 4.0, 3: 4.0}),
        Case("fmnist-mlp", "Fashion-MNIST, MLP", "fmnist", 60_000, "pixels", 2048, 500, 5,
             {1: 8.0, 3: 8.0}, {"name": "mlp", "hidden": 128, **PIXELS_10}),
        Case("fmnist-cnn", "Fashion-MNIST, CNN", "fmnist", 60_000, "pixels", 2048, 500, 3,
             {1: 4.0, 3: 4.0}),
        Case("cifar10-head", "CIFAR-10, linear on encoder", "cifar10", 50_000, "encoder", 2048,
             400, 5, {1: 16.0, 3: 32.0}),
        Case("cifar10-cnn", "CIFAR-10, CNN", "cifar10", 50_000, "pixels", 2048, 500, 3,
             {1: 4.0, 3: 4.0},
             {"name": "small-cnn", "channels": 3, "height": 32, "width": 32, "classes": 10},
             tf32=True),
        Case("imdb-linear", "IMDb, linear", "imdb-words", 25_000, "vectors", 1024, 400, 5,
             {1: 16.0, 3: 16.0}),
        Case("imdb-transformer", "IMDb, Transformer (Adam)", "imdb", 25_000, "tokens", 1024, 400,
             3, {1: 0.02, 3: 0.02}, model="reproduction.selection_runs:transformer",
             options={"optimizer": "adam"}),
    )
}  # fmt: skip


class Transformer(nn.Module):
    """Embedding, one attention block, mean over positions: 323,000 weights."""

    def __init__(self, words: int = 20_000, length: int = 80, width: int = 16) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, 2)
        self.positions: Tensor
        self.register_buffer("positions", torch.arange(length))

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of both classes."""
        found = self.words(ids) + self.places(self.positions.expand(len(ids), -1))
        mixed, _ = self.attention(found, found, found, need_weights=False)
        scores: Tensor = self.output(self.norm(found + mixed).mean(1))
        return scores


def transformer() -> nn.Module:
    """The network of the case imdb-transformer."""
    return Transformer()


# --- arms -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SelectionArm:
    """A method with options of its own."""

    label: str
    method: type[GradientMethod]
    options: Mapping[str, Any]
    takes_rate: bool = True


DECAY, BLOCKS = {"schedule": "linear"}, {"gate": "block", "schedule": "linear"}
SELECTION_ARMS = {
    "constant": SelectionArm("DP-SGD, constant rate", Dpsgd, {"schedule": "constant"}),
    "linear": SelectionArm("DP-SGD, linear decay", Dpsgd, DECAY),
    "algorithm-1": SelectionArm(
        "Algorithm 1, proven",
        Dpsur,
        {**DECAY, "gate": "loss", "accept_threshold": 0.0, "val_batch_size": 256},
    ),
    "block": SelectionArm("gate block, rate given", Dpsgd, BLOCKS),
    "block-free": SelectionArm("gate block", Dpsgd, BLOCKS, takes_rate=False),
    "dog": SelectionArm(
        "DoG",
        Dog,
        {"schedule": "constant", "learning_rate": 1.0, "average_decay": 0.99},
        takes_rate=False,
    ),
    "private-tuning": SelectionArm("private tuning", Dpsgd, DECAY, takes_rate=False),
}


def search_of(case: Case, rate: float | None) -> int:
    """The form of the search that a case is run with."""
    usual = ADAM_SEARCH if case.options.get("optimizer") == "adam" else SEARCH
    return usual if rate is None else GIVEN_SEARCH


def cell_of(
    case: Case,
    arm: str,
    epsilon: int,
    seed: int,
    rate: float | None = None,
    *,
    start: int = 0,
    clip: float = 1,
    hold_out: bool = False,
    **changes: Any,
) -> Cell:
    """What is asked: everything that a result depends on, as plain values.

    `start` is by how many octaves the rate is off the tuned one, `clip` the factor of the norm.
    """
    options = {
        "batch_size": case.batch_size,
        "updates": case.updates,
        "max_grad_norm": CLIP * clip,
        **case.options,
        **SELECTION_ARMS[arm].options,
        **({} if rate is None else {"learning_rate": rate}),
        **changes,
    }
    config = {
        "case": case.name,
        "task": case.task,
        "features": case.features,
        "network": dict(case.network),
        "model": case.model,
        "arm": arm,
        "method": SELECTION_ARMS[arm].method.name,
        "epsilon": epsilon,
        "delta": DELTA,
        "accounting": "proven",
        "options": options,
        "start": start,
        "clip": clip,
        "hold_out": case.records // HOLD_OUT_SHARE if hold_out else 0,
        "tf32": case.tf32,
        **({"search": search_of(case, rate)} if options.get("gate") == "block" else {}),
    }
    return {"config": config, "seed": seed}


# --- making rows ----------------------------------------------------------------------------------


class SelectionRuns(Experiment):
    """An experiment whose cells are runs as `cell_of` describes them."""

    identity = ("config", "seed")
    partial = True
    shared = True

    def make(self, cells: Sequence[Cell], options: Options) -> Iterator[Row]:
        """Run this process's share; starts, seeds and budgets of an arm are trained together.

        Arms come in the order of the grid. Processes begin with different cases, to load few.
        """
        limit_gpu_share(options)
        groups: dict[str, list[Cell]] = {_group(cell): [] for cell in self.cells(options)}
        for cell in cells:
            groups[_group(cell)].append(cell)
        mine = [group for group in options.share(list(groups.values())) if group]
        cases = list(dict.fromkeys(group[0]["config"]["case"] for group in mine))
        first = options.shard[0] * len(cases) // options.shard[1]
        cases = cases[first:] + cases[:first]
        kinds = list(dict.fromkeys(_kind(group[0]) for group in mine))
        for group in sorted(
            mine, key=lambda g: (kinds.index(_kind(g[0])), cases.index(g[0]["config"]["case"]))
        ):
            for start in range(0, len(group), MOST_TOGETHER):
                some = group[start : start + MOST_TOGETHER]
                if options.takes(f"{self.name} {_group(some[0])} {start}"):
                    yield from made_together(some, options.device)


def _kind(cell: Cell) -> tuple[str, str]:
    """The arm, and whether a cell is among its first: at the tuned rate, or far from it."""
    config = cell["config"]
    if config["clip"] != 1 or "clip_norm" in config["options"]:
        return config["arm"], "clip"
    far = config["arm"] == "block" and abs(config["start"]) == 6
    return config["arm"], "first" if far or not config["start"] else "off"


def _group(cell: Cell) -> str:
    config = cell["config"]
    return json.dumps([config["case"], config["hold_out"], *_kind(cell)])


def made_together(cells: Sequence[Cell], device: str | None) -> Iterator[Row]:
    """Train cells at once, half of them at a time where a GPU has no room for all."""
    try:
        if cells[0]["config"]["arm"] == "private-tuning":
            found = [privately_tuned(cell, device) for cell in cells]
        else:
            found = _made(cells, device)
    except RuntimeError as error:
        if len(cells) == 1 or not is_of_memory(error):
            raise
        found = None
    if found is not None:
        yield from found
        return
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    half = len(cells) // 2
    for some in (cells[:half], cells[half:]):
        yield from made_together(some, device)


def _made(cells: Sequence[Cell], device: str | None) -> list[Row]:
    sessions = [_session(cell["config"], cell["seed"], device) for cell in cells]
    started = time.perf_counter()
    outcomes = run_together(sessions)
    seconds = (time.perf_counter() - started) / len(cells)
    return [
        {**cell, **_figures(session, run), "seconds": round(seconds, 2), "together": len(cells)}
        for cell, session, run in zip(cells, sessions, outcomes, strict=True)
        if isinstance(run, Run)
    ]


def _figures(session: Session, run: Run) -> Row:
    assert run.scores is not None
    found = {
        "accuracy": run.scores["accuracy"],
        "loss": run.scores["loss"],
        "updates": run.private.ledger.updates,
        "trials": run.private.ledger.trials,
        "noise_multiplier": session.method.noise_multiplier,  # type: ignore[attr-defined]
        "epsilon": run.epsilon["proven"],
        "device": device_name(session.streams.device),
    }
    metrics = run.statement.get("metrics")
    return found if metrics is None else {**found, "metrics": metrics}


def records_of(config: Mapping[str, Any], device: str | None) -> TaskRecords:
    """The records of a case, on the device, the same for all its runs."""
    return _records(config["task"], config["features"], config["hold_out"], device)


@cache
def _records(task: str, features: str, hold_out: int, device: str | None) -> TaskRecords:
    return loaded_records(task, features, hold_out, device)


def _session(config: Mapping[str, Any], seed: int, device: str | None, **changes: Any) -> Session:
    records = records_of(config, device)
    method = SELECTION_ARMS[config["arm"]].method(**{**config["options"], **changes})
    run = RunConfig(
        task=config["task"],
        method=_with_noise(method, len(records.train), config["epsilon"]),
        budget=Budget(config["epsilon"], config["delta"]),
        accounting=config["accounting"],
        features=config["features"],
        network=config["network"],
        model=config["model"],
        seed=seed,
        device=device or "auto",
        performance=Performance(tf32=config["tf32"], repeatable=False),
        intervals=Intervals(checkpoint_every=BLOCK, evaluate_every=NEVER),
    )
    session = build_task_session(run, records)
    if "variant" in config:  # of the rule, which is no option of the method
        assert isinstance(session.procedure, RateSearchTraining)
        rule = replace(
            session.procedure.rule, length_power=config["power"], head_start=config["head_start"]
        )
        session = replace(session, procedure=replace(session.procedure, rule=rule))
    return session


def _with_noise(method: GradientMethod, size: int, epsilon: float) -> GradientMethod:
    """The method with the noise of its plan, which is found once for all rates and norms."""
    same = replace(method, max_grad_norm=CLIP)
    if (
        method.gate != "block" and method.learning_rate is not None
    ) or method.learning_rate != type(method).learning_rate:
        same = replace(same, learning_rate=1.0)
    settled = _settled(_Same(same), size, epsilon)
    method = replace(method, noise_multiplier=settled.noise_multiplier)
    if method.gate == NO_GATE:
        return method
    return replace(method, val_noise_multiplier=settled.val_noise_multiplier)


@dataclass(frozen=True)
class _Same:
    """A method as a key: equal options are equal keys."""

    method: GradientMethod

    def __hash__(self) -> int:
        return hash(repr(sorted(vars(self.method).items(), key=lambda item: item[0])))


@cache
def _settled(same: _Same, size: int, epsilon: float) -> GradientMethod:
    settled, _ = same.method.resolve(size, Budget(epsilon, DELTA), "proven")
    return settled


# --- private tuning at its price ------------------------------------------------------------------

TUNING_RUNS = 10  # expected
TUNING_OCTAVES = range(-6, 7)
SCORE_NOISE = 50.0  # of the score that runs are compared by, over what one record can change
_ORDERS = range(2, 129)


def tuning_epsilon(
    rate: float, noise: float, updates: int, delta: float = DELTA, expected: int = TUNING_RUNS
) -> float:
    """Epsilon of the best of a random number of runs (Papernot and Steinke 2022, Theorem 2).

    The number of runs is geometric (eta = 0) with mean `expected`. One run is `updates` sampled
    Gaussians and one Gaussian on all records that scores its weights. With its divergence D, of
    order a it costs D(a) + (1 - 1/b) D(b) + log(expected) (1/b + 1/(a - 1)) for any b.
    """

    def one(order: int) -> float:
        score = order / (2 * SCORE_NOISE**2)
        return updates * sampled_gaussian_rdp(rate, noise, order) + score

    known = {order: one(order) for order in _ORDERS}
    chosen = min((1 - 1 / b) * d + math.log(expected) / b for b, d in known.items())
    return min(
        epsilon_at(a, d + chosen + math.log(expected) / (a - 1), delta) for a, d in known.items()
    )


@cache
def tuning_noise(rate: float, updates: int, epsilon: float) -> float:
    """The least noise of the runs at which the best of them fits the budget, to 0.1%."""
    low, high = 0.5, 200.0
    if tuning_epsilon(rate, high, updates) > epsilon:
        raise BudgetError(f"epsilon {epsilon:g} is too small to tune {updates} updates privately")
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (
            (low, middle) if tuning_epsilon(rate, middle, updates) <= epsilon else (middle, high)
        )
    return high


def privately_tuned(cell: Cell, device: str | None) -> Row:
    """Runs at random rates, of which the one with the best noisy score is released."""
    config, seed = cell["config"], cell["seed"]
    case, records = CASES[config["case"]], records_of(config, device)
    rate, updates = (
        config["options"]["batch_size"] / len(records.train),
        config["options"]["updates"],
    )
    noise = tuning_noise(rate, updates, config["epsilon"])
    draws = np.random.default_rng(1_000 + seed)
    count = int(draws.geometric(1 / TUNING_RUNS))
    middle = case.rates[config["epsilon"]]
    rates = [middle * 2.0 ** int(draws.choice(TUNING_OCTAVES)) for _ in range(count)]
    started, found = time.perf_counter(), []
    for start in range(0, count, MOST_TOGETHER):
        sessions = [
            _session(config, 1_000 * (seed + 1) + number, device,
                     learning_rate=rates[number], noise_multiplier=noise)
            for number in range(start, min(count, start + MOST_TOGETHER))
        ]  # fmt: skip
        for session, run in zip(sessions, run_together(sessions), strict=True):
            assert isinstance(run, Run)
            found.append((_noisy_score(session, run), _figures(session, run)))
    best = max(range(count), key=lambda number: found[number][0])
    return {
        **cell,
        **found[best][1],
        "epsilon": tuning_epsilon(rate, noise, updates),
        "runs": count,
        "rate": rates[best],
        "seconds": round(time.perf_counter() - started, 2),
        "together": count,
    }


def _noisy_score(session: Session, run: Run) -> float:
    """The sum of the scores of all records, each in [-1, 1], with noise of its own."""
    train, device = session.problem.train, session.streams.device
    params = {
        name: value.detach().to(device) for name, value in run.model.named_parameters()
        if value.requires_grad
    }  # fmt: skip
    names = session.problem.initial_params()
    params = {name: params[name] for name in names}
    total = 0.0
    for at in range(0, len(train), 4096):
        right, loss = class_metrics(session.problem, params, train.part(slice(at, at + 4096))).sum(
            0
        )
        total += METRICS_NORM * float(right - loss)
    stream = Streams(session.config.seed, device).at(10**6)[VAL_NOISE]
    return total + SCORE_NOISE * float(stream.normal(1)[0])
