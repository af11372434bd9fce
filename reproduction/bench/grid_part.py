"""How long grids of runs take on one GPU: a part of them regenerated, several processes at once.

    python -m reproduction.bench.grid_part GRID_TIME OUT [--part K/N] [--jobs J] [--tasks TASK ...]

Configurations that have rows, each with all of its seeds, are put in a fixed order. Every Nth is
run again by J processes, which take them from both ends of one list, as those of `python -m
reproduction --jobs` do by and large. What all would take follows from what this part took and from
its share of the work, by the seconds that single runs take alone: the rows of `grid_time.py` in
GRID_TIME.
Loading records is timed by itself and counted once: it takes as long for a part as for the whole.
Starting processes, and waiting for the last, are counted as work, which makes the estimate larger.
One row is appended to OUT. It also says how far accuracies are from those of the rows; nothing is
added to the results.
"""

import argparse
import json
import os
import queue
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

from dpsur.runs.session import choose_device
from reproduction.bench.grid_time import KIND, Row, kind_of, made_rows
from reproduction.rows import provenance, read_rows
from reproduction.training import device_name, loaded_records, trained_rows

Times = dict[tuple[Any, ...], Row]
PATIENCE = 5.0  # seconds between two looks at whether all processes are alive


def groups(tasks: Sequence[str]) -> list[list[Row]]:
    """Rows that are seeds of one configuration and were made, not copied, by their kind."""
    found: dict[str, list[Row]] = {}
    for name, row in made_rows(tasks):
        found.setdefault(f"{name} {json.dumps(row['config'])}", []).append(row)
    return sorted(found.values(), key=lambda rows: tuple(map(str, kind_of(rows[0]["config"]))))


def seconds_alone(rows: Sequence[Row], times: Times) -> float:
    """What runs would take one by one."""
    kind = kind_of(rows[0]["config"])
    if kind not in times:
        sys.exit(f"GRID_TIME has no row of {kind}: make it with grid_time.py first")
    known = times[kind]
    # what a run takes beside its trials, some of which are a part of its start
    beside = (known["seconds"] - known["trials"] * known["seconds_a_trial"]) / known["runs"]
    made = sum(row["trials"] for row in rows)
    return float(len(rows) * beside + made * known["seconds_a_trial"])


def in_turn(part: list[list[Row]], times: Times) -> list[list[Row]]:
    """Records with most work first, and on each the longest configuration."""
    work: dict[tuple[Any, ...], float] = {}
    for rows in part:
        records = kind_of(rows[0]["config"])[:2]
        work[records] = work.get(records, 0.0) + seconds_alone(rows, times)

    def place(rows: list[Row]) -> tuple[float, str, float]:
        records = kind_of(rows[0]["config"])[:2]
        return -work[records], str(records), -seconds_alone(rows, times)

    return sorted(part, key=place)


def process(
    number: int, jobs: int, part: Sequence[list[Row]], taken: Sequence[Any], done: Any
) -> None:
    """Run configurations until there are none, and report what each took.

    Every other process begins at the end: large networks fill the GPU, small ones wait for it, so
    that both together take less than one after the other.
    """
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(0.95 / jobs)
    try:
        while (place := _next(number % 2, len(part), taken)) is not None:
            done.put(made_again(part[place]))
    except BaseException as error:  # whoever waits for an answer must not wait for ever
        done.put(f"{type(error).__name__}: {error}")
        raise


def _next(end: int, count: int, taken: Sequence[Any]) -> int | None:
    """The next place from one end, unless all are taken: so many from the front and the back."""
    with taken[0].get_lock():
        if taken[0].value + taken[1].value == count:
            return None
        taken[end].value += 1
        return int(count - taken[1].value if end else taken[0].value - 1)


def made_again(rows: Sequence[Row]) -> Row:
    """Run one configuration with its seeds; the seconds of loading and of the rest."""
    config, seeds = rows[0]["config"], [row["seed"] for row in rows]
    begun = time.perf_counter()
    loaded_records(config["task"], config["features"], config["hold_out"], None)
    loaded = time.perf_counter()
    known = {row["seed"]: row for row in rows}
    moved = [
        100 * (row["accuracy"] - known[seed]["accuracy"])
        for seed, row in trained_rows(config, seeds, None)
    ]
    ended = time.perf_counter()
    return {
        "kind": " ".join(map(str, kind_of(config))),
        "epsilon": config["epsilon"],
        "runs": len(seeds),
        "loading": loaded - begun,
        "seconds": ended - loaded,
        "moved": moved,
    }


def run_concurrently(part: Sequence[list[Row]], jobs: int) -> Iterator[Row]:
    """Make configurations again in several processes, and yield what each was as it ends."""
    context = multiprocessing.get_context("spawn")
    done, taken = context.Queue(), [context.Value("i", 0) for _ in range(2)]
    workers = [
        context.Process(target=process, args=(number, jobs, part, taken, done), daemon=True)
        for number in range(jobs)
    ]
    for worker in workers:
        worker.start()
    for _ in part:
        yield _answer(done, workers)
    for worker in workers:
        worker.join()


def _answer(done: Any, workers: Sequence[Any]) -> Row:
    """What a process says next; none is waited for that has died."""
    while True:
        try:
            one = done.get(timeout=PATIENCE)
        except queue.Empty:
            if any(worker.exitcode for worker in workers):
                sys.exit("a process was killed")
        else:
            if isinstance(one, str):
                sys.exit(f"a process failed: {one}")
            return dict(one)


def main() -> None:
    """Make a part, and append what follows from it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("grid_time", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--part", default="0/10")
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--tasks", nargs="*", default=[])
    given = parser.parse_args()
    first, step = map(int, given.part.split("/"))
    times = {tuple(row["config"][n] for n in KIND): row for row in read_rows(given.grid_time)}
    everything = groups(given.tasks)
    in_turn(everything, times)  # every kind has been timed, or nothing is begun
    part = in_turn(everything[first::step], times)
    begun, found = time.perf_counter(), []
    for number, one in enumerate(run_concurrently(part, given.jobs), start=1):
        found.append(one)
        mean = sum(one["moved"]) / max(1, len(one["moved"]))
        now = time.perf_counter() - begun
        print(
            f"{now:4.0f} s {number}/{len(part)} {one['kind']} epsilon {one['epsilon']}:",
            f"{one['runs']} runs in {one['seconds']:.0f} s, {mean:+.2f} points",
            flush=True,
        )
    row = summary(everything, part, found, times, time.perf_counter() - begun, given.jobs)
    row = {
        "experiment": "grid-part",
        "config": {"part": given.part, "jobs": given.jobs},
        # which lets kernels of several processes run at the same time
        "multi_process_service": "CUDA_MPS_PIPE_DIRECTORY" in os.environ,
        **row,
    }
    with given.out.open("a") as file:
        file.write(json.dumps({**row, **provenance()}) + "\n")
    print(f"{row['minutes_of_all']:.1f} minutes for all, by a share of {row['share']:.3f}")


def summary(
    everything: Sequence[list[Row]],
    part: Sequence[list[Row]],
    found: Sequence[Row],
    times: Times,
    seconds: float,
    jobs: int,
) -> Row:
    """What the whole takes, from what a part of it took."""
    alone, whole = (sum(seconds_alone(r, times) for r in some) for some in (part, everything))
    loading = sum(one["loading"] for one in found) / jobs
    share = alone / whole
    moved = sorted(value for one in found for value in one["moved"])
    return {
        "configurations": len(part),
        "runs": sum(map(len, part)),
        "runs_of_all": sum(map(len, everything)),
        "seconds": round(seconds, 1),
        "seconds_loading": round(loading, 1),
        "seconds_alone": round(alone, 1),
        "seconds_alone_of_all": round(whole, 1),
        "share": share,
        "minutes_of_all": (loading + (seconds - loading) / share) / 60,
        "points_moved": [round(value, 2) for value in moved],
        "device": device_name(choose_device("auto")),
    }


if __name__ == "__main__":
    main()
