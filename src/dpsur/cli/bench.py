"""`dpsur explain` and `dpsur bench`: how a model is trained privately, and what a step costs."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpsur import checks
from dpsur.cli.run_options import add_method_options, add_run_options, config_of
from dpsur.engine.privacy_engine import PrivacyEngine
from dpsur.errors import InvalidInputError
from dpsur.mechanism.streams import INIT, SETUP, Streams
from dpsur.options import DATA, MODEL
from dpsur.per_example import engine_report
from dpsur.runs.session import choose_device
from dpsur.runs.tasks import imported, sample_problem

EXPLAIN = """\
Print how per-example gradients of a model are computed, and why no faster engine is used.

  dpsur explain --task mnist-5k
  dpsur explain --task npz:data.npz --model mymodule:make

engines, fastest first: one-pass computes norms and clipped sums from one backward pass, by rules of
the layers; one-by-one calls the model once per example, and names the module that is the cause.
Both give the same results. The engine is chosen with synthetic inputs of the task's shape: no
record is used.
"""
FORM = "a function of the batch size that returns (model, inputs, labels)"
BENCH = f"""\
Time one training step of your model, plain and private, on the same batch and in turn. The model
comes from {FORM}. The loss is cross-entropy. On a GPU
the peak memory is shown too. The repository's `python -m reproduction bench` compares with peers.

  dpsur bench --model mymodule:make --batch-size 256 1024
"""
REPETITIONS = 20
WARM_UP = 5  # the first steps compile kernels and, on a GPU, capture them
SEED = 0


def set_up_explain(parser: argparse.ArgumentParser) -> None:
    parser.description = EXPLAIN
    parser.usage = "dpsur explain [--task TASK] [--model MODULE:FUNCTION] [options]"
    add_run_options(parser, [DATA, MODEL])
    parser.add_argument("--device", help="cpu, cuda or auto (default: auto)")
    parser.add_argument(
        "--bf16", action="store_true", default=None, help="as with `dpsur train --bf16`"
    )
    add_method_options(parser)


def run_explain(options: argparse.Namespace) -> int:
    problem = sample_problem(config_of(options))
    print(f"model: {type(problem.model).__name__}")
    print(engine_report(problem))
    return 0


def set_up(parser: argparse.ArgumentParser) -> None:
    parser.description = BENCH
    parser.add_argument("--model", required=True, metavar="MODULE:FUNCTION", help=FORM)
    parser.add_argument(
        "--batch-size", nargs="+", type=int, required=True, metavar="N", help="one size or several"
    )
    parser.add_argument(
        "--repetitions", type=int, default=REPETITIONS, metavar="R", help="timed steps of each kind"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto (default: auto)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")


def run(options: argparse.Namespace) -> int:
    checks.at_least_one("repetitions", options.repetitions)
    for size in options.batch_size:
        checks.at_least_one("batch size", size)
    device = choose_device(options.device)
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    make = imported(options.model)
    made(options.model, make, 1)
    for size in sorted(set(options.batch_size)):
        for row in rows(options.model, make, size, device, options.repetitions):
            memory = row["peak_memory_bytes"]
            parts = [
                f"{row['model']}  batch {row['batch_size']:<6} {row['step']:<8}",
                f"{1e3 * row['seconds']:9.2f} ms",
                f"{row['time_over_plain']:6.2f} x plain",
                *([] if memory is None else [f"{memory / 2**20:8.0f} MiB"]),
            ]
            print(json.dumps(row) if options.json else "  ".join(parts), flush=True)
    return 0


def made(name: str, make: Callable[[int], Any], size: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A model and a batch: the same weights every time."""
    with Streams(SEED, torch.device("cpu")).at(SETUP).global_randomness(INIT):
        result = make(size)
    match result:
        case (nn.Module() as model, Tensor() as inputs, Tensor() as labels):
            pass
        case _:
            raise InvalidInputError(f"--model {name} must be {FORM}")
    if not len(inputs) == len(labels) == size:
        raise InvalidInputError(
            f"--model {name} was asked for a batch of {size} and made {len(inputs)} inputs and "
            f"{len(labels)} labels"
        )
    return model, inputs, labels


def rows(
    name: str, make: Callable[[int], Any], size: int, device: torch.device, repetitions: int
) -> Iterator[dict[str, Any]]:
    """Time both kinds of step in turn, so that whatever drifts meanwhile drifts for both."""
    steps = {
        "plain": plain_step(*made(name, make, size), device),
        "private": private_step(*made(name, make, size), device),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    peaks = dict.fromkeys(steps, 0)
    for repetition in range(WARM_UP + repetitions):
        for kind, step in steps.items():
            took, peak = timed(step, device)
            if repetition >= WARM_UP:
                seconds[kind].append(took)
                peaks[kind] = max(peaks[kind], peak)
    plain = statistics.median(seconds["plain"])
    for kind, values in seconds.items():
        median = statistics.median(values)
        yield {
            "model": name,
            "batch_size": size,
            "step": kind,
            "seconds": median,
            "time_over_plain": median / plain,
            "peak_memory_bytes": peaks[kind] or None,
        }


def plain_step(
    model: nn.Module, inputs: Tensor, labels: Tensor, device: torch.device
) -> Callable[[], object]:
    model, inputs, labels = model.to(device).train(), inputs.to(device), labels.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(F.cross_entropy(model(inputs).float(), labels))
        optimizer.step()

    return step


def private_step(
    model: nn.Module, inputs: Tensor, labels: Tensor, device: torch.device
) -> Callable[[], object]:
    """A private step on all records as one batch: drawing and gathering them are part of it."""
    model = model.to(device).train()
    engine = PrivacyEngine()
    data = TensorDataset(inputs.to(device), labels.to(device))
    model, _, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        data_loader=DataLoader(data, batch_size=len(data)),
        noise_multiplier=1.0,
        max_grad_norm=0.1,
    )

    @engine.private_step
    def update(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).float(), batch[1])

    def step() -> None:
        for batch in loader:
            update(batch)

    return step


def timed(step: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """Seconds of a step and, on a GPU, the most memory in use meanwhile."""
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start, 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    step()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start, torch.cuda.max_memory_allocated(device)
