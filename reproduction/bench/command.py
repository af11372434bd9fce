"""`python -m reproduction bench`: speed and memory of a step over a grid of networks."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.functional.process_settings import device_name
from reproduction.bench.arms import ARMS
from reproduction.bench.basic_arms import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    MOMENTUM,
    NOISE_MULTIPLIER,
    Settings,
    arm_named,
)
from reproduction.bench.measurement import line, rows
from reproduction.bench.networks import NETWORKS, network_named
from reproduction.bench.report import markdown
from reproduction.bench.training_steps import VAL_BATCH_SIZE
from reproduction.rows import provenance, read_rows, write_rows

EXPERIMENT = "bench"
NETWORKS_FROM = "reproduction.bench.networks:network_named"
CPU_BATCHES = (256, 512, 1024)
CUDA_BATCHES = (256, 512, 1024, 2048, 4096, 8192, 16384)
REPETITIONS = 20
QUICK_NETWORKS, QUICK_BATCHES, QUICK_REPETITIONS = ("pixel-28", "scattering-28"), (256,), 5
TOLERATED_CONTENTION = 0.1
PICTURES = (".png", ".svg", ".pdf")


def _listed(items: dict[str, Any]) -> str:
    return "\n".join(f"  {name:<17}{item.summary}" for name, item in items.items())


DESCRIPTION = f"""\
Measure one training step: time, peak memory, samples per second. All arms get the same batch,
thread count and precision, and take turns; compare the ratios of one run, not times across runs.

  python -m reproduction bench --quick                              about a minute on a CPU
  python -m reproduction bench --threads 2 --out cpu.jsonl          the whole grid of a CPU
  python -m reproduction bench --networks scattering-28:1024:4096 pixel-28:1024 --arms plain dpsur
  python -m reproduction bench --rows cpu.jsonl --plot cpu.pdf      draw what was measured before

networks:
{_listed(NETWORKS)}

arms:
{_listed(ARMS)}
"""


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "--networks",
        nargs="+",
        metavar="NAME[:B...]",
        help="networks, each with batch sizes of its own if given (default: all but cnn-*)",
    )
    parser.add_argument(
        "--batch-sizes",
        nargs="+",
        type=int,
        metavar="B",
        help="batch sizes (default: 256 to 1024 on a CPU, 256 to 16384 on a GPU)",
    )
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="arms (default: all)")
    parser.add_argument(
        "--repetitions", type=int, metavar="R", help=f"rounds of all arms (default: {REPETITIONS})"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument("--tf32", action="store_true", help="let all arms use TF32 on a GPU")
    parser.add_argument(
        "--memory-limit",
        type=float,
        metavar="GB",
        help="what a step may take of the device (default: all that is free)",
    )
    parser.add_argument("--out", metavar="FILE.jsonl", help="write a row per cell and arm")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw growth with batch and parameters (PNG, SVG, PDF)"
    )
    parser.add_argument("--rows", metavar="FILE.jsonl", help="measure nothing, read these rows")
    parser.add_argument(
        "--table", action="store_true", help="with --rows: print our ratios as a Markdown table"
    )
    parser.add_argument(
        "--kernels", type=int, metavar="K", help="profile instead: the K costliest operations"
    )
    parser.add_argument("--quick", action="store_true", help="two networks, one batch size")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, print, write and draw."""
    _check_files(options)
    if options.kernels is not None:
        checks.at_least_one("kernels", options.kernels)
        from reproduction.bench.step_profile import kernel_lines

        for text in kernel_lines(settings_from(options), options.kernels):
            print(text, flush=True)
        return 0
    if options.rows is not None:
        found = _read(Path(options.rows))
        text = markdown(found) if options.table else "\n".join(map(line, found))
        print(text, flush=True)
    else:
        found = []
        measured = _collected(measured_rows(settings_from(options), _say), found)
        write_rows(Path(options.out or os.devnull), measured)
    if options.plot is not None:
        from reproduction.bench.report import draw

        draw(found, Path(options.plot))
    return 0


def measured_rows(settings: Settings, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Measure; every row says how it was made."""
    origin = origin_of(settings)
    for row in rows(settings, say):
        yield {"experiment": EXPERIMENT, **row, **origin}


def settings_from(options: argparse.Namespace) -> Settings:
    """Check every option before the first measurement."""
    device = _device(options.device)
    names: Sequence[str] = [name for name, network in NETWORKS.items() if not network.series]
    sizes: Sequence[int] = CUDA_BATCHES if device.type == "cuda" else CPU_BATCHES
    repetitions = REPETITIONS
    if options.quick:
        names, sizes, repetitions = QUICK_NETWORKS, QUICK_BATCHES, QUICK_REPETITIONS
    if options.repetitions is not None:
        checks.at_least_one("repetitions", options.repetitions)
    if options.threads is not None:
        checks.at_least_one("threads", options.threads)
    if (limit := options.memory_limit) is not None:
        checks.positive("memory_limit", limit)
    arms = options.arms or list(ARMS)
    for arm in arms:
        arm_named(arm)
    return Settings(
        networks=NETWORKS_FROM,
        grid=[
            pair
            for name in options.networks or names
            for pair in _pairs(name, options.batch_sizes or sizes)
        ],
        arms=list(dict.fromkeys(arms)),
        device=device,
        repetitions=options.repetitions or repetitions,
        threads=options.threads or torch.get_num_threads(),
        tf32=options.tf32,
        memory_limit=None if limit is None else int(limit * 1e9),
    )


def _pairs(text: str, sizes: Sequence[int]) -> list[tuple[str, int]]:
    """A network with its batch sizes, ascending: what was slow or too large is then known."""
    name, *own = text.split(":")
    network_named(name)
    try:
        chosen = [int(size) for size in own] if own else list(sizes)
    except ValueError:
        raise InvalidInputError(
            f"batch sizes of a network are whole numbers after a colon, got {text!r}"
        ) from None
    for size in chosen:
        checks.at_least_one("batch size", size)
    return [(name, size) for size in sorted(set(chosen))]


def _device(name: str) -> torch.device:
    checks.one_of("device", name, ("auto", "cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError("device cuda is not available here; use --device cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _check_files(options: argparse.Namespace) -> None:
    """Refuse at once what would fail after minutes of measuring."""
    if options.plot is not None and Path(options.plot).suffix.lower() not in PICTURES:
        raise InvalidInputError(f"cannot draw to {options.plot}: name a .png, .svg or .pdf file")
    for path in (options.out, options.plot):
        if path is not None and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            raise InvalidInputError(f"cannot write to {path}: its folder does not exist")
    if options.table and options.rows is None:
        raise InvalidInputError("--table shows rows of a file: name it with --rows FILE.jsonl")
    if options.rows is not None and options.out is not None:
        raise InvalidInputError("--rows measures nothing, so there is nothing to write to --out")


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return read_rows(path)
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"cannot read rows from {path}: {error}") from error


def _collected(
    measured: Iterator[dict[str, Any]], into: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    warned = None
    for row in measured:
        cell = row["network"], row["batch_size"]
        cores = row["cores_used_by_others"] or 0.0
        if row["device"] == "cpu" and cores > TOLERATED_CONTENTION and cell != warned:
            _say(f"not to be trusted: other processes kept {cores:.1f} cores busy meanwhile")
            warned = cell
        into.append(row)
        print(line(row), flush=True)
        yield row


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def origin_of(settings: Settings) -> dict[str, Any]:
    """What all rows of a run have in common."""
    made = provenance()
    made["versions"] = {**made["versions"], "opacus": _version("opacus")}
    return {
        "config": {
            "threads": settings.threads,
            "tf32": settings.tf32,
            "memory_limit": settings.memory_limit,
            "dtype": "float32",
            "learning_rate": LEARNING_RATE,
            "momentum": MOMENTUM,
            "max_grad_norm": MAX_GRAD_NORM,
            "noise_multiplier": NOISE_MULTIPLIER,
            "val_batch_size": VAL_BATCH_SIZE,
        },
        "device": settings.device.type,
        "device_name": device_name(settings.device),
        **made,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
