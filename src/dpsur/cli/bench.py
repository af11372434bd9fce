"""`dpsur bench`: time and memory of a training step of your model, private and plain."""

import argparse
import json
import sys

import torch

from dpsur import checks
from dpsur.bench.arms import ARMS, Cell, Settings, arm_named
from dpsur.bench.measurement import line, rows
from dpsur.bench.user_model import FORM, NETWORKS, model_named
from dpsur.errors import InvalidInputError
from dpsur.functional.problem import Problem
from dpsur.per_example import engine_report
from dpsur.runs.build_session import choose_device

REPETITIONS = 20
LARGEST_LIMIT = 1e9  # gigabytes
TOLERATED_CONTENTION = 0.1  # cores that other processes may use
DESCRIPTION = f"""\
Measure one training step of your model: time, peak memory, samples per second. All arms get the
same batch, thread count and precision, and take turns; compare the ratios of one run, not times
across runs. The model comes from {FORM}.
The loss is cross-entropy.

  dpsur bench --model mymodule:make --batch-size 256
  dpsur bench --model mymodule:make --batch-size 256 1024

arms:
""" + "\n".join(f"  {name:<17}{arm.summary}" for name, arm in ARMS.items())


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODULE:FUNCTION",
        help=f"what to measure: {FORM}",
    )
    parser.add_argument(
        "--batch-size", nargs="+", type=int, required=True, metavar="N", help="one size or several"
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        metavar="ARM",
        help="default: all that the device can run",
    )
    parser.add_argument(
        "--repetitions",
        type=int,
        default=REPETITIONS,
        metavar="R",
        help=f"rounds of all arms (default: {REPETITIONS})",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto (default: auto)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument(
        "--tf32",
        action=argparse.BooleanOptionalAction,
        help="let all arms use TF32 on a GPU, or none (default: as PyTorch is set)",
    )
    parser.add_argument(
        "--memory-limit",
        type=float,
        metavar="GB",
        help="memory that a step may use (default: all that is free)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per arm")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    warned = None
    settings = settings_from(options)
    _say(_engine(options.model, settings))
    for row in rows(settings, _say):
        cores = row["cores_used_by_others"] or 0.0
        if cores > TOLERATED_CONTENTION and row["batch_size"] != warned:
            _say(f"unreliable: other processes used {cores:.1f} cores during the measurement")
            warned = row["batch_size"]
        print(json.dumps(row) if options.json else line(row), flush=True)
    return 0


def settings_from(options: argparse.Namespace) -> Settings:
    """Check every option before the first measurement."""
    checks.at_least_one("repetitions", options.repetitions)
    if options.threads is not None:
        checks.at_least_one("threads", options.threads)
    if (limit := options.memory_limit) is not None:
        checks.positive("memory_limit", limit)
        if limit > LARGEST_LIMIT:
            most = f"{LARGEST_LIMIT:g} GB"
            raise InvalidInputError(f"memory_limit must be at most {most}, got {limit:g}")
    for size in options.batch_size:
        checks.at_least_one("batch size", size)
    device = choose_device(options.device)
    for arm in options.arms or ():
        arm_named(arm)
    usual = [name for name, arm in ARMS.items() if device.type == "cuda" or not arm.needs_cuda]
    model_named(options.model).batch(1, torch.device("cpu"))
    return Settings(
        networks=NETWORKS,
        grid=[(options.model, size) for size in sorted(set(options.batch_size))],
        arms=list(dict.fromkeys(options.arms or usual)),
        device=device,
        repetitions=options.repetitions,
        threads=options.threads or torch.get_num_threads(),
        tf32=options.tf32,
        memory_limit=None if limit is None else int(limit * 1e9),
    )


def _engine(name: str, settings: Settings) -> str:
    """How our arms find gradients of the model."""
    described = settings.network(name)
    batch = described.batch(settings.grid[0][1], settings.device)
    cell = Cell(described, batch)
    try:
        return str(engine_report(Problem(cell.model(), cell.loss, batch)))
    except Exception as error:  # a model that we refuse is still measured without us
        return f"no gradient engine: {str(error).splitlines()[0]}"


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
