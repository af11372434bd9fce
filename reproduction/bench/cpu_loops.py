"""`python -m reproduction bench-cpu`: small batches on a CPU, beside Opacus.

Every arm reads its batches from a loader of its own, or as `fit` does, at a sample rate of 1: all
see the same records. The arms of a cell take turns in one process, a step of each after the other.
A row holds the median of an arm's steps.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpsur
from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.functional.records import Examples
from dpsur.mechanism.streams import Streams
from reproduction.bench.basic_arms import (
    MAX_GRAD_NORM,
    NOISE_MULTIPLIER,
    PLAIN,
    Cell,
    CpuContention,
    PlainStep,
    Settings,
    Step,
    dpsgd_step,
    machine,
    sgd,
)
from reproduction.bench.command import NETWORKS_FROM, origin_of
from reproduction.bench.measurement import OK, outcome_of
from reproduction.bench.networks import (
    Gpt,
    Network,
    gpt_lora,
    network_named,
    next_word_loss,
)
from reproduction.bench.peer_steps import GHOST, HOOKS, OpacusStep
from reproduction.rows import write_rows

EXPERIMENT = "bench-cpu"
THREADS, SECONDS, LEAST_ROUNDS = 2, 20.0, 3
WORDS, TOKENS = 10_000, 64


def _language_model(name: str, parameters: int, build: Callable[[], nn.Module]) -> Network:
    return Network(
        name,
        name,
        parameters,
        build,
        (TOKENS,),
        WORDS,
        WORDS,
        labelled_positions=True,
        loss=next_word_loss,
    )


NETWORKS: Mapping[str, Network] = {
    "logistic": Network(
        "logistic", "logistic regression", 7_850, partial(nn.Linear, 784, 10), (784,)
    ),
    "mlp": network_named("mlp"),
    "cnn": network_named("pixel-28"),
    "lstm": network_named("lstm-256"),
    "transformer": network_named("transformer"),
    "gpt": _language_model("gpt", 29_188_096, partial(Gpt, 6, 512, WORDS, length=TOKENS)),
    "gpt-lora": _language_model(
        "gpt-lora", 49_152, partial(gpt_lora, 4, 256, WORDS, length=TOKENS)
    ),
}
GRID = (
    *(("logistic", 64), ("mlp", 32), ("mlp", 128), ("mlp", 1024), ("cnn", 64)),
    *(("lstm", 32), ("transformer", 32)),
    *(("gpt", 2), ("gpt", 8), ("gpt-lora", 2), ("gpt-lora", 8)),
)


def _data(cell: Cell) -> TensorDataset:
    return TensorDataset(cell.batch.inputs, cell.batch.targets)


def _batches(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


class _Loaded:
    """A step of another arm, with the batch that a loader yields in the place of its own."""

    def __init__(self, step: Any, loader: Any) -> None:
        self._step, self._batches = step, _batches(loader)

    def __call__(self) -> None:
        vars(self._step)["_batch"] = Examples(*next(self._batches))
        self._step()


def _plain(cell: Cell) -> Step:
    return _Loaded(PlainStep(cell), DataLoader(_data(cell), batch_size=len(cell.batch)))


class _SecretCell(Cell):
    """A cell of a run without a seed, as private training is."""

    def streams(self) -> Streams:
        """Random numbers of a stream cipher."""
        return Streams(None, self.device)


def _fit(cell: Cell) -> Step:
    return dpsgd_step(_SecretCell(cell.network, cell.batch))


def _private(cell: Cell) -> tuple[dpsur.PrivacyEngine, Any, Any, Iterator[Any]]:
    model, engine = cell.model(), dpsur.PrivacyEngine()
    made = engine.make_private(
        module=model,
        optimizer=sgd(model),
        data_loader=DataLoader(_data(cell), batch_size=len(cell.batch)),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=MAX_GRAD_NORM,
        steps=1_000_000,
    )
    return engine, made[0], made[1], _batches(made[2])


def _private_step(cell: Cell) -> Step:
    engine, _, _, batches = _private(cell)
    loss = cell.loss
    step = engine.private_step(lambda model, batch: loss(model(batch[0]), batch[1]))
    return lambda: (step(next(batches)), None)[1]


def _opacus_form(cell: Cell) -> Step:
    _, model, optimizer, batches = _private(cell)

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        torch.autograd.backward(cell.loss(model(inputs), targets))
        optimizer.step()

    return step


def _opacus(cell: Cell, *, mode: str) -> Step:
    step = OpacusStep(cell, mode, poisson_sampling=True)
    return _Loaded(step, step.loader)


THEIRS = ("opacus-hooks", "opacus-ghost")
ARMS: Mapping[str, Callable[[Cell], Step]] = {
    PLAIN: _plain,
    "fit": _fit,
    "private-step": _private_step,
    "opacus-form": _opacus_form,
    "opacus-hooks": partial(_opacus, mode=HOOKS),
    "opacus-ghost": partial(_opacus, mode=GHOST),
}


def measured(name: str, size: int, arms: Sequence[str], seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each arm of a cell."""
    network, device = NETWORKS[name], torch.device("cpu")
    outcomes: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    times: dict[str, list[float]] = {}
    for arm in arms:
        try:
            step = ARMS[arm](Cell(network, network.batch(size, device)))
            for _ in range(2):  # the first ones plan, and reserve memory
                step()
            steps[arm], times[arm], outcomes[arm] = step, [], {"status": OK, "reason": None}
        except Exception as error:  # whatever goes wrong becomes a row
            outcome = outcome_of(error)
            outcomes[arm] = {"status": outcome.status, "reason": outcome.reason}
    contention, begun, rounds = CpuContention(), time.perf_counter(), 0
    while rounds < LEAST_ROUNDS or time.perf_counter() - begun < seconds:
        for arm, step in steps.items():
            start = time.perf_counter()
            step()
            times[arm].append(time.perf_counter() - start)
        rounds += 1
    others = contention.cores()
    for arm, ending in outcomes.items():
        row = {"network": name, "parameters": network.parameters, "batch_size": size, "arm": arm}
        if arm in times:
            lower, middle, upper = statistics.quantiles(times[arm], n=4, method="inclusive")
            row |= {"ms": 1e3 * middle, "ms_quartiles": [1e3 * lower, 1e3 * upper]}
            row |= {"ms_least": 1e3 * min(times[arm]), "rounds": rounds}
        yield {**row, **ending, "cores_used_by_others": others}


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    cells = [f"{name}:{size}" for name, size in GRID]
    parser.add_argument(
        "--cells", nargs="+", default=cells, metavar="NAME:B", help=f"default: {' '.join(cells)}"
    )
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--threads", type=int, default=THREADS, help=f"default: {THREADS}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a cell")
    parser.add_argument("--out", metavar="FILE.jsonl", help="write rows as they are made")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, print and write."""
    checks.at_least_one("--threads", options.threads)
    cells = []
    for text in options.cells:
        name, _, size = text.partition(":")
        checks.one_of("--cells", name, tuple(NETWORKS))
        if not size.isdigit() or not int(size):
            raise InvalidInputError(f"a cell is NAME:BATCH, such as mlp:32, got {text!r}")
        cells.append((name, int(size)))
    write_rows(Path(options.out or os.devnull), _rows(options, cells))
    return 0


def _rows(
    options: argparse.Namespace, cells: Sequence[tuple[str, int]]
) -> Iterator[dict[str, Any]]:
    settings = Settings(
        networks=NETWORKS_FROM,
        grid=[],
        arms=options.arms,
        device=torch.device("cpu"),
        repetitions=LEAST_ROUNDS,
        threads=options.threads,
        tf32=None,
    )
    origin = origin_of(settings)
    with machine(settings):
        for name, size in cells:
            for row in measured(name, size, options.arms, options.seconds):
                print(_line(row), flush=True)
                yield {"experiment": EXPERIMENT, **row, **origin}


def _line(row: Mapping[str, Any]) -> str:
    head = f"{row['network']:<12}{row['batch_size']:>5}  {row['arm']:<14}"
    if row["status"] != OK:
        return f"{head}{row['status']}: {row['reason']}"
    return f"{head}{row['ms']:10.2f} ms, at least {row['ms_least']:.2f}"


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of all cells; the faster arm of Opacus over our private step."""
    found: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["network"], row["batch_size"]), {})[row["arm"]] = row
    lines = [
        "| network, batch | plain, ms | `fit` | private step | Opacus form | Opacus hooks "
        "| Opacus ghost | Opacus / ours |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (name, size), arms in found.items():
        theirs = min((arms[arm]["ms"] for arm in THEIRS if "ms" in arms.get(arm, {})), default=None)
        shown = [_ms(arms.get(arm)) for arm in ARMS]
        own = arms.get("private-step", {}).get("ms")
        shown.append(f"{theirs / own:.2f}" if own and theirs else "–")
        lines.append(f"| {name}, {size:,} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _ms(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "–"
    return f"{row['ms']:.2f}" if row["status"] == OK else str(row["status"])
