"""Memory of `fit` on a file that does not fit in memory, and speed of reading batches.

    python -m reproduction.bench.large_data --out results/large_data.jsonl   # minutes
    python -m reproduction.bench.large_data --write                          # docs/data.md

The file is sparse: it reads as zeros and takes no room on disk. Anonymous memory (RssAnon of
/proc/self/status) is what the process has allocated; pages of the file are not part of it, since
the system drops them when it needs memory. Reading is compared with a plain
`torch.utils.data.DataLoader` on the same records, batches and workers.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import dpsur
from dpsur.functional.records import HostExamples
from dpsur.runs.data import as_examples
from reproduction.rows import ROOT, provenance, read_rows, write_rows

ROWS, PAGE = ROOT / "results" / "large_data.jsonl", ROOT / "docs" / "data.md"
START, END = "<!-- large data: python -m reproduction.bench.large_data -->", "<!-- end -->"
WIDTH = 5_000
BATCH, BATCHES = 256, 40
METHOD = dpsur.Dpsur(updates=5, noise_multiplier=20.0, accept_ratio=1.5, batch_size=BATCH)
BUDGET = dpsur.Budget(8.0, 1e-7)


def memory_row(gigabytes: float, width: int = WIDTH) -> dict[str, Any]:
    """Anonymous memory of a run on a sparse file, in a process of its own."""
    count = int(gigabytes * 1e9 / (4 * width)) + 1
    with tempfile.TemporaryDirectory() as folder:
        for name, size in (("x", count * width * 4), ("y", count * 8)):
            with (Path(folder) / name).open("wb") as file:
                file.truncate(size)
        here = [sys.executable, "-W", "ignore", "-m", "reproduction.bench.large_data"]
        command = [*here, "--measure", folder, str(count), str(width)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _measure(folder: str, count: int, width: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    x = np.memmap(f"{folder}/x", np.float32, "r", shape=(count, width))
    y = np.memmap(f"{folder}/y", np.int64, "r", shape=(count,))
    few = (np.zeros((2 * BATCH, width), np.float32), np.zeros(2 * BATCH, np.int64))
    model, watch = torch.nn.Linear(width, 2), _Watch()
    # what the library itself takes, and one run of it
    dpsur.fit(model, few, budget=BUDGET, method=METHOD, observers=[watch])
    before, start = watch.peak, time.perf_counter()
    watch.peak = 0
    run = dpsur.fit(model, (x, y), budget=BUDGET, method=METHOD, observers=[watch])
    return {
        "kind": "memory",
        "file_bytes": x.nbytes,
        "records": run.statement["dataset_size"],
        "small_run_bytes": before,
        "peak_bytes": watch.peak,
        "trials": run.private.ledger.trials,
        "seconds": round(time.perf_counter() - start, 1),
    }


def anonymous_memory() -> int:
    """What this process has allocated, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class _Watch:
    """An observer that notes the largest memory."""

    peak = 0

    def started(self, plan: Any, progress: Any) -> None:  # noqa: ARG002
        """After all records were checked."""
        self.peak = max(self.peak, anonymous_memory())

    def trials(self, progress: Any, verdicts: Any) -> None:  # noqa: ARG002
        """After every trial."""
        self.peak = max(self.peak, anonymous_memory())

    def evaluated(self, progress: Any, scores: Any, epsilon: float) -> None:
        """Nothing."""


class Images(Dataset[tuple[Tensor, int]]):
    """Bytes of images that are scaled and standardised one by one, as a decoder would."""

    def __init__(self, count: int) -> None:
        self._bytes = np.random.default_rng(0).integers(0, 256, (count, 3, 64, 64), np.uint8)

    def __len__(self) -> int:
        return len(self._bytes)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        image = torch.from_numpy(self._bytes[row]).float().div_(255)
        return (image - image.mean((1, 2), keepdim=True)) / 0.25, row % 10


def loader_row(workers: int, count: int = 5_000, batches: int = BATCHES) -> dict[str, Any]:
    """Records a second of our reader and of a DataLoader, on the same batches."""
    data, rate = Images(count), BATCH / count
    generator = torch.Generator().manual_seed(0)
    drawn = [
        (torch.rand(count, generator=generator) < rate).nonzero()[:, 0] for _ in range(batches + 1)
    ]
    examples = as_examples(data, "train_set", workers=workers)
    assert isinstance(examples, HostExamples)
    ours, theirs = [], []
    for _ in range(3):  # in turn, since others use the machine too
        ours.append(_our_seconds(examples, drawn))
        theirs.append(_their_seconds(data, drawn, workers))
    records = sum(map(len, drawn[1:]))
    return {
        "kind": "loader",
        "workers": workers,
        "records_per_second": round(records / min(ours)),
        "dataloader_records_per_second": round(records / min(theirs)),
        "ratio": round(min(theirs) / min(ours), 3),
    }


def _our_seconds(examples: HostExamples, drawn: list[Tensor]) -> float:
    start = 0.0
    for number, rows in enumerate(drawn):
        following = drawn[min(number + 1, len(drawn) - 1)]
        batch = examples.fetch(rows, following, "bench").part(slice(None))
        assert len(batch) == len(rows)
        if not number:  # the first one waits for the workers to start
            start = time.perf_counter()
    return time.perf_counter() - start


def _their_seconds(data: Images, drawn: list[Tensor], workers: int) -> float:
    loader = DataLoader(data, batch_sampler=[rows.tolist() for rows in drawn], num_workers=workers)
    start = 0.0
    for number, (inputs, _) in enumerate(loader):
        assert len(inputs) == len(drawn[number])
        if not number:
            start = time.perf_counter()
    return time.perf_counter() - start


def page_part(rows: list[dict[str, Any]]) -> str:
    """What docs/data.md says about memory and speed."""
    (memory,) = (row for row in rows if row["kind"] == "memory")
    before, peak = memory["small_run_bytes"] / 1e6, memory["peak_bytes"] / 1e6
    lines = [
        f"On a sparse file of {memory['file_bytes'] / 1e9:.0f} GB ({memory['records']:,} records) "
        f"anonymous memory of the process peaked at {peak:.0f} MB, after {before:.0f} MB in a run "
        "on 512 records held in memory.",
        "",
        "| workers | records a second | `DataLoader` on the same batches | ratio |",
        "|---|---|---|---|",
    ]
    for row in rows:
        if row["kind"] == "loader":
            ours, theirs = row["records_per_second"], row["dataloader_records_per_second"]
            lines.append(f"| {row['workers']} | {ours:,} | {theirs:,} | {row['ratio']:.2f} |")
    return "\n".join(lines)


def rendered(page: str, rows: list[dict[str, Any]]) -> str:
    """The page with the figures of these rows."""
    before, _, rest = page.partition(f"{START}\n")
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{page_part(rows)}\n{END}{after}"


def main() -> None:
    """Measure and write rows, or the page from rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", action="store_true", help="write docs/data.md from stored rows")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        folder, count, width = options.measure
        print(json.dumps(_measure(folder, int(count), int(width))))
        return
    if options.write:
        text = rendered(PAGE.read_text(encoding="utf-8"), read_rows(ROWS))
        PAGE.write_text(text, encoding="utf-8")
        return
    rows = [memory_row(options.gigabytes)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows += [loader_row(workers) for workers in options.workers]
    rows = [{**row, "device": "cpu", **provenance()} for row in rows]
    for row in rows:
        print(json.dumps(row))
    if options.out is not None:
        write_rows(options.out, rows)


if __name__ == "__main__":
    main()
