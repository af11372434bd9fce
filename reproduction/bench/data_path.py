"""How busy a GPU is with records on it, in memory of the host, and read by workers."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Dataset

from dpsur.functional.records import Examples, HostExamples, StreamedExamples
from dpsur.runs.data import as_examples
from reproduction.bench.basic_arms import Cell
from reproduction.bench.measurement import OK, outcome_of, release, synchronize
from reproduction.bench.network_grid import OURS, timed
from reproduction.bench.networks import Network
from reproduction.bench.training_steps import RECORDS_PER_BATCH, dpsgd_training

WORKERS = 4  # that read records
SERIES = "data"
PLACES = {"device": "on the device", "memory": "in memory", "workers": "from workers"}


class _Records(Dataset[tuple[Tensor, Tensor]]):
    """Records that workers read one by one."""

    def __init__(self, records: Examples) -> None:
        self._inputs, self._targets = records.inputs, records.targets

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self._inputs[row], self._targets[row]


def data_rows(network: Network, batch_size: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """DP-SGD with the records in three places: time, and how much of it the device is busy."""
    host = torch.device("cpu")
    for place in PLACES:
        release(device)
        records = network.batch(RECORDS_PER_BATCH * batch_size, host)
        if place == "device":
            placed = records.to(device)
        elif place == "memory":
            placed = HostExamples(records.inputs, records.targets, device)
        else:
            read = as_examples(_Records(records), "train_set", workers=WORKERS)
            assert isinstance(read, StreamedExamples)
            placed = read.to(device)
        row: dict[str, Any] = {"status": OK, "reason": None, "step_seconds": None}
        try:
            step = dpsgd_training(Cell(network, network.batch(batch_size, device)), placed)
            row["step_seconds"], row["step_seconds_quartiles"] = timed(step, step.steps, device)
            if device.type == "cuda":
                row["busy_seconds"] = busy_seconds(step, device) / step.steps
                row["busy"] = min(1.0, row["busy_seconds"] / row["step_seconds"])
        except Exception as error:  # whatever goes wrong becomes a row
            outcome = outcome_of(error)
            row |= {"status": outcome.status, "reason": outcome.reason}
        yield {
            "network": network.name,
            "parameters": network.parameters,
            "batch_size": batch_size,
            "precision": "float32",
            "series": SERIES,
            "size": None,
            "arm": f"{OURS}, {place}",
            **row,
            "time_over_plain": None,
        }


def busy_seconds(step: Callable[[], None], device: torch.device) -> float:
    """How long kernels and copies run in a call, those at the same time counted once."""
    step()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        synchronize(device)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in found.events()
        if str(event.device_type).endswith("CUDA")
    )
    total, until = 0.0, 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return 1e-6 * total


def markdown(rows: list[dict[str, Any]]) -> str:
    """Where records are, time and the part of it that the device is busy, as a Markdown table."""
    lines = ["| network, batch | records | ms per update | device busy |", "|---|---|---|---|"]
    for row in rows:
        if row["series"] == SERIES and row["status"] == OK:
            label = f"{row['network']}, {row['batch_size']:,}"
            place = PLACES[row["arm"].split(", ")[1]]
            busy = f"{100 * row['busy']:.0f}%"
            lines.append(f"| {label} | {place} | {1e3 * row['step_seconds']:.2f} | {busy} |")
    return "\n".join(lines)
