"""`python -m reproduction bench-networks`: updates of common networks, as training makes them.

Plain PyTorch and Opacus get a ready batch on the device. Our arms draw Poisson batches from a data
set of eight times that size, gather them, clip, add noise and update: `dpsgd` and `dpsur` in the
loop that `fit` uses, `private-step` in a loop of a few lines around `PrivacyEngine.private_step`.
Every arm has PyTorch's own precision settings: on CUDA convolutions are rounded to TF32 and matrix
products are not. On a GPU arms are measured one after the other, each with the device to itself. On
a CPU they take turns, since its speed drifts.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.mechanism.streams import NOISE
from reproduction.bench import families
from reproduction.bench.basic_arms import (
    CapturedPlainStep,
    Cell,
    CpuContention,
    PlainStep,
    Settings,
    machine,
)
from reproduction.bench.command import NETWORKS_FROM, origin_of
from reproduction.bench.measurement import OK, outcome_of, release, synchronize
from reproduction.bench.networks import (
    COMMON,
    Gpt,
    Network,
    network_named,
    next_word_loss,
    perceptron,
)
from reproduction.bench.peer_steps import ghost_step, hooks_step
from reproduction.bench.training_steps import PrivateLoopStep, dpsgd_training, dpsur_training
from reproduction.rows import read_rows, write_rows

EXPERIMENT = "bench-networks"
ARMS: dict[str, Callable[[Cell], Any]] = {
    "plain": PlainStep,
    "plain-captured": CapturedPlainStep,
    "dpsgd": dpsgd_training,
    "private-step": PrivateLoopStep,
    "dpsur": dpsur_training,
    "opacus-hooks": hooks_step,
    "opacus-ghost": ghost_step,
}
PLAIN, OURS, GATE, OPACUS = "plain", "dpsgd", "dpsur", ("opacus-hooks", "opacus-ghost")
CAPTURED, LOOP = "plain-captured", "private-step"
# Networks with their batch sizes, the most telling first.
CUDA_GRID = (
    ("wrn-16-4", 512),
    ("resnet18-64", 256),
    ("encoder-192x6", 512),
    ("mlp", 4096),
    ("lstm-256", 512),
    ("gpt2", 32),
    ("gpt2-lora", 32),
)
CPU_GRID = (("wrn-16-4", 128), ("encoder-192x6", 128), ("mlp", 4096), ("gpt2", 4))
# Growth: of a perceptron with its width, of a residual network with the batch, of a language model
# of GPT-2's shape (blocks, width, vocabulary) with the length of a sequence.
WIDTHS, WIDTH_BATCH = (192, 1_024, 3_072, 9_792), 1_024
BATCHES, BATCH_NETWORK = (128, 512, 2_048), "wrn-16-4"
LENGTHS, LENGTH_SHAPE, LENGTH_BATCH = (64, 128, 256, 512, 1_024, 2_048), (6, 512, 10_000), 16
# What the size of a point is, by series.
SERIES = {
    "parameters": "parameters (perceptron)",
    "batch": f"batch size ({BATCH_NETWORK})",
    "length": "tokens (GPT-2 shaped, 6 x 512)",
}
ROUNDS, LEAST_SECONDS, MOST_SECONDS, WARM_UP_SECONDS = 5, 0.1, 2.0, 0.2


@dataclass(frozen=True)
class Job:
    """A cell of the table or of a series, and the arms to measure."""

    network: Network
    batch_size: int
    bf16: bool = False
    series: str | None = None
    size: int | None = None  # along the series
    arms: tuple[str, ...] = tuple(ARMS)


def jobs(
    device: torch.device,
    names: list[str] | None,
    *,
    growth: Sequence[str] = tuple(SERIES),
    bf16: bool = False,
) -> Iterator[Job]:
    """What to measure: the table, then series; with an empty list of names these alone."""
    grid: tuple[tuple[str, int], ...] = CUDA_GRID if device.type == "cuda" else CPU_GRID
    if names is not None:
        grid = tuple(_pair(name) for name in names)
    for name, batch_size in grid:
        arms = ("plain", "plain-captured", "dpsgd", "private-step") if bf16 else tuple(ARMS)
        if device.type != "cuda":
            arms = tuple(arm for arm in arms if arm != "plain-captured")
        yield Job(network_named(name), batch_size, bf16=bf16, arms=arms)
    for job in series():
        if job.series in growth:
            yield job


def series() -> Iterator[Job]:
    """Growth with parameters, with the batch and with the length of a sequence."""
    few = (PLAIN, OURS, *OPACUS)
    for width in WIDTHS:
        model = partial(perceptron, width)
        count = parameters_of(model)
        network = replace(network_named("mlp"), name=f"mlp-{width}", parameters=count, build=model)
        yield Job(network, WIDTH_BATCH, series="parameters", size=count, arms=few)
    for batch_size in BATCHES:
        network = network_named(BATCH_NETWORK)
        yield Job(network, batch_size, series="batch", size=batch_size, arms=few)
    words = LENGTH_SHAPE[2]
    for length in LENGTHS:
        language = partial(Gpt, *LENGTH_SHAPE, length=length)
        network = Network(
            f"gpt-{length}",
            f"GPT-2 shaped, {length} tokens",
            parameters_of(language),
            language,
            (length,),
            words,
            words,
            labelled_positions=True,
            loss=next_word_loss,
        )
        yield Job(network, LENGTH_BATCH, series="length", size=length, arms=few)


def parameters_of(build: Callable[[], torch.nn.Module]) -> int:
    """How many parameters a network has, without memory for them."""
    with torch.device("meta"):
        return sum(value.numel() for value in build().parameters())


def _pair(text: str) -> tuple[str, int]:
    name, _, size = text.partition(":")
    if not size.isdigit():
        raise InvalidInputError(
            f"a network is NAME:BATCH, got {text!r}; NAME is one of {', '.join(COMMON)}"
        )
    return name, int(size)


def measure(job: Job, arm: str, device: torch.device) -> dict[str, Any]:
    """Seconds of a step and the memory that it takes, or why there are none."""
    row: dict[str, Any] = {"status": OK, "reason": None, "step_seconds": None}
    release(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    contention, start = CpuContention(), time.perf_counter()
    step: Any = None
    try:
        batch = job.network.batch(job.batch_size, device)
        step = ARMS[arm](Cell(job.network, batch, bf16=job.bf16))
        count = getattr(step, "steps", 1)
        step()
        synchronize(device)
        row["setup_seconds"] = time.perf_counter() - start
        row["step_seconds"], row["step_seconds_quartiles"] = timed(step, count, device)
        row["cores_used_by_others"] = contention.cores()
        if device.type == "cuda":
            # weights, optimizer, one batch and what a step needs; not the data set behind it
            data = before + getattr(step, "data_bytes", 0)
            row["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device) - data
    except Exception as error:  # whatever goes wrong becomes a row
        outcome = outcome_of(error)
        row |= {"status": outcome.status, "reason": outcome.reason}
    del step
    gc.collect()
    release(device)
    return row


def measure_by_turns(job: Job, device: torch.device) -> dict[str, dict[str, Any]]:
    """The same for all arms of a job, a step of each after the other; without memory."""
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Any] = {}
    contention = CpuContention()
    for arm in job.arms:
        rows[arm] = {"status": OK, "reason": None, "step_seconds": None}
        try:
            cell = Cell(job.network, job.network.batch(job.batch_size, device), bf16=job.bf16)
            step = ARMS[arm](cell)
            step()
            steps[arm] = step
        except Exception as error:  # whatever goes wrong becomes a row
            outcome = outcome_of(error)
            rows[arm] |= {"status": outcome.status, "reason": outcome.reason}
    found: dict[str, list[float]] = {arm: [] for arm in steps}
    for _ in range(ROUNDS):
        for arm, step in steps.items():
            seconds, calls = 0.0, 0
            while not calls or seconds < LEAST_SECONDS:
                start = time.perf_counter()
                step()
                seconds += time.perf_counter() - start
                calls += getattr(step, "steps", 1)
            found[arm].append(seconds / calls)
    for arm, times in found.items():
        lower, middle, upper = statistics.quantiles(times, n=4, method="inclusive")
        rows[arm] |= {"step_seconds": middle, "step_seconds_quartiles": [lower, upper]}
        rows[arm]["cores_used_by_others"] = contention.cores()
    return rows


def timed(step: Callable[[], None], count: int, device: torch.device) -> tuple[float, list[float]]:
    """The median over rounds of at least LEAST_SECONDS, and the quartiles."""
    warm, once = 0.0, 0.0
    while not once or warm < WARM_UP_SECONDS:
        start = time.perf_counter()
        step()
        synchronize(device)
        once = max(time.perf_counter() - start, 1e-6)
        warm += once
    calls = max(1, round(LEAST_SECONDS / once))
    found: list[float] = []
    while len(found) < ROUNDS and (len(found) < 2 or sum(found) * count * calls < MOST_SECONDS):
        start = time.perf_counter()
        for _ in range(calls):
            step()
        synchronize(device)
        found.append((time.perf_counter() - start) / (calls * count))
    lower, _, upper = statistics.quantiles(found, n=4, method="inclusive")
    return statistics.median(found), [lower, upper]


def noise_seconds(count: int, device: torch.device) -> float:
    """What drawing the noise of an update takes by itself."""
    from dpsur.mechanism.streams import Streams

    draws = Streams(0, device).at(1)
    times = []
    for _ in range(4):
        synchronize(device)
        start = time.perf_counter()
        draws[NOISE].normal(count)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def rows_of(job: Job, device: torch.device) -> Iterator[dict[str, Any]]:
    """A row per arm."""
    plain: dict[str, Any] = {}
    turns = measure_by_turns(job, device) if device.type == "cpu" else {}
    for arm in job.arms:
        found = turns[arm] if arm in turns else measure(job, arm, device)
        plain = found if arm == PLAIN else plain
        row = {
            "network": job.network.name,
            "parameters": job.network.parameters,
            "batch_size": job.batch_size,
            "precision": "bf16" if job.bf16 else "float32",
            "series": job.series,
            "size": job.size,
            "arm": arm,
            **found,
            "time_over_plain": _ratio(found, plain, "step_seconds"),
            "memory_over_plain": _ratio(found, plain, "peak_memory_bytes"),
        }
        if arm == OURS and found["status"] == OK and job.network.parameters:
            row["noise_seconds"] = noise_seconds(job.network.parameters, device)
        yield row


def _ratio(one: dict[str, Any], other: dict[str, Any], key: str) -> float | None:
    mine, theirs = one.get(key), other.get(key)
    return mine / theirs if mine and theirs else None


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--networks",
        nargs="*",
        metavar="NAME:B",
        help="default: the whole table; without a name: the series alone",
    )
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), help="default: all")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument(
        "--families",
        action="store_true",
        help="other networks of the same families, without the series",
    )
    parser.add_argument("--bf16", action="store_true", help="layers in bfloat16, ours and plain")
    parser.add_argument("--no-growth", action="store_true", help="leave out the series")
    parser.add_argument(
        "--series", nargs="+", choices=list(SERIES), help="series of growth (default: all)"
    )
    parser.add_argument(
        "--series-batch",
        type=int,
        metavar="B",
        help="batch of the series over parameters and length",
    )
    parser.add_argument(
        "--data-path",
        action="store_true",
        help="how long a GPU is busy with records on it, in host memory and read by workers",
    )
    parser.add_argument("--seconds", type=float, metavar="S", help="start nothing after so long")
    parser.add_argument("--out", metavar="FILE.jsonl", help="write rows as they are made")
    parser.add_argument("--rows", metavar="FILE.jsonl", help="measure nothing, show these rows")
    parser.add_argument("--plot", metavar="FILE", help="draw the rows (PNG, SVG, PDF)")
    parser.add_argument("--growth-plot", metavar="FILE", help="draw time and memory of the series")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, print and write; or show rows that are there."""
    if options.rows is not None:
        found = read_rows(Path(options.rows))
        print(markdown(found))
    else:
        found = []
        write_rows(Path(options.out or "/dev/null"), _measured(options, found))
    from reproduction.bench import network_figures  # which imports this module

    if options.plot is not None:
        network_figures.draw(found, Path(options.plot))
    if options.growth_plot is not None:
        network_figures.draw_growth(found, Path(options.growth_plot))
    return 0


def _measured(options: argparse.Namespace, into: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    checks.one_of("device", options.device, ("auto", "cpu", "cuda"))
    kind = options.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    threads = options.threads or torch.get_num_threads()
    settings = Settings(
        networks=NETWORKS_FROM,
        grid=[],
        arms=list(ARMS),
        device=device,
        repetitions=ROUNDS,
        threads=threads,
        tf32=None,
    )
    start, origin = time.perf_counter(), origin_of(settings)
    with machine(settings):
        if options.data_path:
            from reproduction.bench.data_path import data_rows

            name, size = _pair((options.networks or ["wrn-16-4:512"])[0])
            for row in data_rows(network_named(name), size, device):
                whole = {"experiment": EXPERIMENT, **row, **origin}
                into.append(whole)
                print(line(whole), flush=True)
                yield whole
            return
        growth, names = options.series or list(SERIES), options.networks
        if options.families and not names:
            names = [f"{name}:{size}" for name, size in families.GRID]
        growth = [] if options.no_growth or options.bf16 or options.families else growth
        for job in jobs(device, names, growth=growth, bf16=options.bf16):
            if options.seconds is not None and time.perf_counter() - start > options.seconds:
                print(f"no time for {job.network.name}", file=sys.stderr)
                continue
            arms = job.arms if options.arms is None else tuple(options.arms)
            if options.series_batch is not None and job.series not in (None, "batch"):
                job = replace(job, batch_size=options.series_batch)
            for row in rows_of(replace(job, arms=arms), device):
                whole = {"experiment": EXPERIMENT, **row, **origin}
                into.append(whole)
                print(line(whole), flush=True)
                yield whole


def line(row: dict[str, Any]) -> str:
    """What a reader wants to see of a row while it is being measured."""
    head = f"{row['network']:<15}{row['batch_size']:>6} {row['precision']:<8}{row['arm']:<13}"
    if row["status"] != OK:
        return f"{head}{row['status']}: {row['reason']}"
    parts = [f"{1e3 * row['step_seconds']:9.2f} ms"]
    if row.get("peak_memory_bytes"):
        parts.append(f"{row['peak_memory_bytes'] / 2**30:6.2f} GiB")
    if row.get("busy"):
        parts.append(f"busy {row['busy']:.2f}")
    if row["time_over_plain"] is not None:
        parts.append(f"{row['time_over_plain']:.2f} x plain")
    return head + "  ".join(parts)


def table(rows: list[dict[str, Any]]) -> dict[tuple[str, int, str], dict[str, dict[str, Any]]]:
    """Rows of the table, by network, batch size and precision, then by arm."""
    found: dict[tuple[str, int, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["series"] is None:
            key = row["network"], row["batch_size"], row["precision"]
            found.setdefault(key, {})[row["arm"]] = row
    return found


def markdown(rows: list[dict[str, Any]]) -> str:
    """Milliseconds per update and the ratios that matter, without columns that nobody filled."""
    arms_shown = {
        PLAIN: "plain",
        CAPTURED: "plain, captured",
        OPACUS[0]: "Opacus hooks",
        OPACUS[1]: "Opacus ghost",
        OURS: "`dpsgd`",
        LOOP: "private step",
        GATE: "`dpsur`, a trial",
    }
    head = [*arms_shown.values(), "dpsgd / plain", "Opacus / dpsgd", "memory / plain"]
    lines = [["network, batch", *head]]
    for (name, size, precision), arms in table(rows).items():
        ours = arms.get(OURS, {})
        theirs = [
            arms[arm]["step_seconds"] for arm in OPACUS if arm in arms and arms[arm]["status"] == OK
        ]
        gain = "–"
        if theirs and ours.get("step_seconds"):
            gain = f"{min(theirs) / ours['step_seconds']:.2f}"
        label = f"{name}, {size:,}" + (", bf16" if precision == "bf16" else "")
        ratios = [_two(ours.get("time_over_plain")), gain, _two(ours.get("memory_over_plain"))]
        lines.append([label, *(_ms(arms.get(arm)) for arm in arms_shown), *ratios])
    filled = [column for column in zip(*lines, strict=True) if set(column[1:]) != {"–"}]
    shown = [f"| {' | '.join(line)} |" for line in zip(*filled, strict=True)]
    return "\n".join([shown[0], "|---" + "|--:" * (len(filled) - 1) + "|", *shown[1:]])


def _ms(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    if row["status"] != OK:
        return str(row["status"])
    return f"{1e3 * row['step_seconds']:.2f}"


def _two(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
