"""What several ranks gain, measured and modelled, and what amplification gives at scale.

    python -m reproduction.scaling --measure        1, 2 and 4 processes on this machine (gloo)
    python -m reproduction.scaling --privacy        noise as records and batches grow
    python -m reproduction.scaling --accuracy       what a network then reaches (a GPU, minutes)
    python -m reproduction.scaling --write          docs/tables/scaling.md, from the rows

Rows go to results/scaling.jsonl. The model is a sum of parts, each with a measured constant; what
cannot be measured here (links between GPUs) is assumed and marked so.
"""

import argparse
import math
import multiprocessing
import os
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dpsur import Budget, Dpsgd, PrivacyWarning, fit
from dpsur.distributed import Ranks, Reduction, connect
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.functional.tree import Params
from dpsur.mechanism import gaussian
from dpsur.mechanism.gaussian import exact_batch
from dpsur.mechanism.streams import BATCH, NOISE, VAL_BATCH, Streams
from dpsur.mechanism.trial import mean_losses
from dpsur.networks import pixel_cnn
from dpsur.per_example import ClippedSum, clipped_sum
from dpsur.privacy.planning import calibrate
from reproduction.rows import ROOT, provenance, read_rows, write_rows
from reproduction.tasks.mnist import load_fashion

ROWS, PAGE = ROOT / "results" / "scaling.jsonl", ROOT / "docs" / "tables" / "scaling.md"
BENCH_GPU = ROOT / "results" / "bench_gpu.jsonl"
CPU = torch.device("cpu")
RECORDS, BATCH_SIZE, TEST_SIZE, REPETITIONS = 60_000, 512, 256, 7
SIZES = (1, 2, 4)
PARTS = ("sampling", "clipped sums", "reduction", "noise", "test")
Row = dict[str, Any]


# --- measured: one trial, part by part ------------------------------------------------------------


def measure(repetitions: int) -> list[Row]:
    """A row per number of processes: median seconds of each part of a trial."""
    rows = []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            context = multiprocessing.get_context("spawn")
            results: Any = context.Queue()
            store = str(Path(folder) / "store")
            processes = [
                context.Process(target=_worker, args=(rank, size, store, repetitions, results))
                for rank in range(size)
            ]
            for process in processes:
                process.start()
            found = results.get()
            for process in processes:
                process.join()
        rows.append({"kind": "trial", "processes": size, **found, **_origin()})
        print(rows[-1], flush=True)
    return rows


def _origin() -> Row:
    load = os.getloadavg()[0]
    return {"cores": os.cpu_count(), "load_average": round(load, 1), **provenance()}


def _worker(rank: int, size: int, store: str, repetitions: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=300),
    )
    ranks = connect(CPU)
    seconds, worked = _trial_seconds(ranks, repetitions)
    latency, rate = _links(ranks, repetitions)
    weights = sum(value.numel() for value in pixel_cnn().parameters())
    if rank == 0:
        settings = {"records": RECORDS, "batch": BATCH_SIZE, "test_batch": TEST_SIZE}
        links = {"latency_seconds": latency, "seconds_per_byte": rate}
        times = {"seconds": seconds, "cpu_seconds": worked}
        results.put({**times, "weights": weights, **settings, **links})
    dist.destroy_process_group()


def _trial_seconds(ranks: Ranks, repetitions: int) -> tuple[dict[str, float], dict[str, float]]:
    """Medians of each part: seconds, and seconds of work of the rank that worked longest."""
    torch.manual_seed(0)
    records = Examples(torch.rand(RECORDS, 1, 28, 28), torch.randint(10, (RECORDS,)))
    problem = Problem(pixel_cnn(), F.cross_entropy, records)
    streams, params = Streams(1, CPU, ranks), problem.initial_params()
    clock = _Clock(ranks)
    for step in range(repetitions + 1):
        clock.counts = step > 0  # the first one chooses an engine
        draws = streams.at(step + 1)
        rate = BATCH_SIZE / RECORDS
        batch = clock.time("sampling", exact_batch, records, rate, draws[BATCH])
        own = clock.time(
            "clipped sums", clipped_sum, problem, params, batch.data, 0.1, rows=batch.rows
        )
        total = clock.time("reduction", _reduced, ranks, own.params)
        noisy = clock.time("noise", gaussian.add_noise, ClippedSum(total, 0.1), 1.0, draws[NOISE])
        test = exact_batch(records, TEST_SIZE / RECORDS, draws[VAL_BATCH])
        clock.time("test", mean_losses, problem, noisy, params, test)
    seconds = {part: statistics.median(found) for part, found in clock.times.items()}
    return seconds, {part: statistics.median(found) for part, found in clock.worked.items()}


class _Clock:
    """Times parts of a trial, each on all ranks together: it is as slow as the slowest."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self.counts = ranks, True
        self.times: dict[str, list[float]] = {part: [] for part in PARTS}
        self.worked: dict[str, list[float]] = {part: [] for part in PARTS}

    def time(self, part: str, action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._ranks.wait_for_all()
        began, worked = time.perf_counter(), time.process_time()
        found = action(*args, **kwargs)
        taken = [time.perf_counter() - began, time.process_time() - worked]
        every = torch.stack(self._ranks.gather(torch.tensor(taken, dtype=torch.float64)))
        longest, hardest = every.amax(0).tolist()
        if self.counts:
            self.times[part].append(longest)
            self.worked[part].append(hardest)
        return found


def _reduced(ranks: Ranks, params: Params) -> Params:
    reduction = Reduction(ranks)
    for name, value in params.items():
        reduction.add(name, value)
    return reduction.result()


def _links(ranks: Ranks, repetitions: int) -> tuple[float, float]:
    """Seconds of a sum of nothing, and seconds per byte, from vectors of two lengths."""
    if ranks.size == 1:
        return 0.0, 0.0

    def seconds(numbers: int) -> float:
        found = []
        for _ in range(repetitions):
            ranks.wait_for_all()
            began = time.perf_counter()
            _reduced(ranks, {"vector": torch.ones(numbers)})
            found.append(time.perf_counter() - began)
        return statistics.median(found)

    few, many = 1_000, 4_000_000
    short, long = seconds(few), seconds(many)
    rate = (long - short) / (4 * (many - few))
    return max(0.0, short - 4 * few * rate), rate


# --- privacy: what records and batches buy --------------------------------------------------------

EPSILON, EPOCHS = 1.0, 30


def privacy() -> list[Row]:
    """Noise in the mean gradient as records and batches grow, at one epsilon."""
    rows = []
    for factor in (1, 4, 16, 64):
        records = RECORDS * factor
        for name, batch in (("batch grows with the records", 1024 * factor), ("same batch", 1024)):
            rows.append(_noise_row(f"records: {name}", records, batch))
    for batch in (256, 1024, 4096, 16_384, 60_000):
        rows.append(_noise_row("batch at given records", RECORDS, batch))
    return rows


def _noise_row(question: str, records: int, batch: int) -> Row:
    updates = math.ceil(EPOCHS * records / batch)
    delta = 0.1 / records
    noise = calibrate(epsilon=EPSILON, delta=delta, sample_rate=batch / records, updates=updates)
    row = {
        "kind": "noise",
        "question": question,
        "records": records,
        "batch": batch,
        "updates": updates,
        "epsilon": EPSILON,
        "delta": delta,
        "noise_multiplier": noise,
        # standard deviation of a coordinate of the mean gradient, in units of the clip norm
        "noise_of_mean": noise / batch,
        # of what all updates together add to a weight, if their learning rates add up to 1
        "noise_of_run": noise / batch / math.sqrt(updates),
        **provenance(),
    }
    print({k: row[k] for k in ("question", "records", "batch", "noise_multiplier")}, flush=True)
    return row


# --- accuracy as records and batches grow ---------------------------------------------------------

HELD_OUT, SEEDS = 5_000, (0, 1, 2)
SHARES, SMALLEST_BATCH = (8, 4, 2, 1), 128
RATES = (0.5, 1.0, 2.0, 4.0)
ACCURACY_EPOCHS = 10  # of the largest part with the smallest batch these are 4,297 updates


def accuracy(device: str, rows: list[Row]) -> None:
    """The paper's network on parts of Fashion-MNIST: the best of some rates by held-out records.

    Each row is written when it is done. Existing rows are skipped.
    """
    made = {(row["question"], row["records"]) for row in rows if row["kind"] == "accuracy"}
    train, test = load_fashion()
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    inputs, labels = train.inputs[order], train.targets[order]
    held_out = (inputs[:HELD_OUT], labels[:HELD_OUT])
    for share in SHARES:
        count = (len(order) - HELD_OUT) // share
        records = (inputs[HELD_OUT:][:count], labels[HELD_OUT:][:count])
        grown = SMALLEST_BATCH * max(SHARES) // share
        for name, batch in (
            ("batch grows with the records", grown),
            ("same batch", SMALLEST_BATCH),
        ):
            if (name, count) in made:
                continue
            reached = partial(_reached, records, batch, device)
            tried = {rate: reached(held_out, rate, len(SEEDS)) for rate in RATES}
            best = max(tried, key=lambda rate: tried[rate])
            found = [reached((test.inputs, test.targets), best, seed) for seed in SEEDS]
            row = {
                "kind": "accuracy",
                "question": name,
                "network": "pixel-cnn",
                "records": count,
                "batch": batch,
                "updates": math.ceil(ACCURACY_EPOCHS * count / batch),
                "epsilon": EPSILON,
                "delta": 0.1 / count,
                "learning_rate": best,
                "held_out_accuracy": {str(rate): value for rate, value in tried.items()},
                "seeds": list(SEEDS),
                "test_accuracy": found,
                "device": device,
                **provenance(),
            }
            rows.append(row)
            write_rows(ROWS, rows)
            print({k: row[k] for k in ("question", "records", "test_accuracy")}, flush=True)


def _reached(records: Any, batch: int, device: str, scored: Any, rate: float, seed: int) -> float:
    count = len(records[1])
    method = Dpsgd(
        learning_rate=rate, batch_size=batch, updates=math.ceil(ACCURACY_EPOCHS * count / batch)
    )
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)  # of a seed
        run = fit(
            pixel_cnn(),
            records,
            budget=Budget(EPSILON, 0.1 / count),
            method=method,
            test_set=scored,
            seed=seed,
            device=device,
        )
    assert run.scores is not None
    return float(run.scores["accuracy"])


# --- modelled: 8 to 1,024 GPUs --------------------------------------------------------------------

# Assumed of the links, not measured: NCCL all-reduce inside a machine of 8 GPUs, and between
# machines with one 400 Gbit/s adapter per GPU, at the rates that their vendors state.
LATENCY, INSIDE, BETWEEN = 25e-6, 300e9, 40e9
# Assumed too: what a trial takes to launch without a CUDA graph, and a record of a test.
LAUNCHES, TEST_COST = 2e-3, 1 / 3
MACHINE = 8
GPUS = (1, 8, 64, 256, 1024)


def modelled(network: str, batch: int, test: int) -> list[Row]:
    """Seconds of a trial on so many GPUs: a sum of parts."""
    measured = [
        row
        for row in read_rows(BENCH_GPU)
        if row["network"] == network and row["arm"] == "dpsur-captured" and row["status"] == "ok"
    ]
    row = max(measured, key=lambda found: found["batch_size"])
    per_example = 1 / row["samples_per_second"]  # gradient, test and noise of one GPU
    rows = []
    for count in GPUS:
        link = INSIDE if count <= MACHINE else BETWEEN
        bytes_moved = 2 * (count - 1) / count * 4 * row["parameters"]
        reduce = 0.0 if count == 1 else 2 * LATENCY * math.log2(count) + bytes_moved / link
        gate = 0.0 if count == 1 else LATENCY * math.log2(count)
        compute = math.ceil(batch / count) * per_example
        rows.append(
            {
                "gpus": count,
                "compute": compute,
                "reduce": reduce,
                "gate": gate + math.ceil(test / count) * per_example * TEST_COST,
                "launches": 0.0 if count == 1 else LAUNCHES,
            }
        )
    return rows


# --- the page -------------------------------------------------------------------------------------


def tables() -> dict[str, str]:
    """The tables of the page, by name."""
    rows = read_rows(ROWS)
    trials = [row for row in rows if row["kind"] == "trial"]
    noise = [row for row in rows if row["kind"] == "noise"]
    return {
        "measured": _measured_table(trials),
        "links": _links_table(trials),
        "records": _noise_table([row for row in noise if row["question"].startswith("records:")]),
        "accuracy": _accuracy_table([row for row in rows if row["kind"] == "accuracy"]),
        "model": _model_table(65_536, 1024),
    }


def _table(head: list[str], lines: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"


def _measured_table(rows: list[Row]) -> str:
    alone = sum(rows[0]["cpu_seconds"].values())
    clock = sum(rows[0]["seconds"].values())
    lines = []
    for row in rows:
        worked = row["cpu_seconds"]
        total = sum(worked.values())
        cells = [str(row["processes"]), *(_milliseconds(worked[part]) for part in PARTS)]
        elapsed = sum(row["seconds"].values())
        cells += [_milliseconds(total), f"{alone / total:.2f}", f"{clock / elapsed:.2f}"]
        lines.append([*cells, f"{alone / _predicted(rows[0], row):.2f}", str(row["load_average"])])
    head = ["processes", *(f"{part}, ms" for part in PARTS), "all, ms", "gain"]
    head += ["by the clock", "predicted"]
    return _table([*head, "load average"], lines)


def _predicted(one: Row, row: Row) -> float:
    """The work of a rank by the model: shared parts are divided, the others are not."""
    parts, size = one["cpu_seconds"], row["processes"]
    shared = (parts["clipped sums"] + parts["test"]) / size
    return float(shared + parts["sampling"] + parts["noise"] + row["cpu_seconds"]["reduction"])


def _links_table(rows: list[Row]) -> str:
    lines = [
        [
            str(row["processes"]),
            f"{1e3 * row['latency_seconds']:.3g}",
            f"{1e-9 / row['seconds_per_byte']:.3g}" if row["seconds_per_byte"] > 0 else "",
        ]
        for row in rows
        if row["processes"] > 1
    ]
    return _table(["processes", "latency, ms", "gigabytes per second"], lines)


def _noise_table(rows: list[Row]) -> str:
    lines = [
        [
            row["question"].partition(": ")[2],
            f"{row['records']:,}",
            f"{row['batch']:,}",
            f"{row['updates']:,}",
            f"{row['noise_multiplier']:.3f}",
            f"{1e5 * row['noise_of_mean']:.3g}",
            f"{1e5 * row['noise_of_run']:.3g}",
        ]
        for row in rows
    ]
    head = ["", "records", "batch", "updates", "noise multiplier", "noise of a mean gradient, 1e-5"]
    return _table([*head, "of a run, 1e-5"], lines)


def _accuracy_table(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        found = [100 * value for value in row["test_accuracy"]]
        accuracy = f"{statistics.mean(found):.1f} ± {statistics.stdev(found):.1f}"
        counts = [f"{row[name]:,}" for name in ("records", "batch", "updates")]
        lines.append([row["question"], *counts, f"{row['learning_rate']:g}", accuracy])
    return _table(["", "records", "batch", "updates", "rate", "test accuracy, %"], lines)


def _model_table(batch: int, test: int) -> str:
    lines = []
    for name in ("pixel-28", "pixel-cifar"):
        rows = modelled(name, batch, test)
        parts = ("compute", "reduce", "gate", "launches")
        first = sum(rows[0][part] for part in parts)
        for row in rows:
            total = sum(row[part] for part in parts)
            efficiency = first / total / row["gpus"]
            cells = [f"{1e3 * row[part]:.3g}" for part in ("compute", "reduce", "gate")]
            lines.append(
                [name, str(row["gpus"]), *cells, f"{1e3 * total:.3g}", f"{efficiency:.0%}"]
            )
    head = ["network", "GPUs", "compute, ms", "reduce, ms", "gate, ms", "trial, ms", "efficiency"]
    return _table(head, lines)


def rendered(page: str) -> str:
    """The page with its tables rendered from the rows."""
    for name, text in tables().items():
        block = re.compile(rf"(<!-- table: {name} -->\n)(.*?)(<!-- end -->)", re.DOTALL)
        found = block.search(page)
        assert found is not None, name
        page = f"{page[: found.start(2)]}{text}\n{page[found.end(2) :]}"
    return page


def main() -> None:
    """Measure, compute, or render."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--privacy", action="store_true")
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    options = parser.parse_args()
    rows = read_rows(ROWS) if ROWS.exists() else []
    if options.measure:
        rows = [row for row in rows if row["kind"] != "trial"] + measure(options.repetitions)
    if options.privacy:
        rows = [row for row in rows if row["kind"] != "noise"] + privacy()
    if options.measure or options.privacy:
        write_rows(ROWS, rows)
    if options.accuracy:
        accuracy(options.device, rows)
    if options.write:
        PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
