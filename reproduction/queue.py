"""Rows from a list of what is wanted, most important first, by several processes in limited time.

A line of the list is what `python -m reproduction` takes: an experiment and the part of its grid
that is wanted, such as `accuracy --tasks mnist --arms proven --epsilons 1 --seeds 0-4`, perhaps
after the seconds that one of its configurations is expected to take. `#` begins a comment.
"""

import argparse
import json
import multiprocessing
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import SpawnProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dpsur.cli.parser import Parser
from dpsur.errors import InvalidInputError
from reproduction.base import Cell, Options
from reproduction.grid_options import add_part_options, part_of_grid
from reproduction.registry import experiment_named
from reproduction.runner import drop_torn_line, look_up, made_lines, rows_file

DESCRIPTION = """\
Make the rows that a list asks for, in its order, with several processes on one device.

Cells that have a row, among the results or in the folder of new rows, are left out, so that the
command can be run again. A configuration whose expected seconds are more than what is left is not
begun, and what is not done at the limit is given up: rows that were made are whole and are kept.
"""
ALL_DONE, WAIT = -1, 0.2
BEGUN_BEFORE_THE_END = 5.0  # seconds that are left when something is still begun
Wanted = tuple[float, str, Options]


@dataclass(frozen=True)
class Work:
    """Cells of one configuration, and the seconds that they are expected to take."""

    experiment: str
    cells: Sequence[Cell]
    seconds: float

    def describe(self) -> str:
        """One line."""
        config = self.cells[0].get("config", {})
        parts = [str(config[name]) for name in ("task", "arm", "epsilon") if name in config]
        tried = [f"{name}={value}" for name, value in config.get("tried", {}).items()]
        seeds = [f"seed {cell['seed']}" for cell in self.cells if "seed" in cell]
        return " ".join([self.experiment, *parts, *tried, *seeds])


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = DESCRIPTION
    parser.add_argument("list", type=Path, metavar="FILE", help="what is wanted, a part a line")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at once")
    parser.add_argument(
        "--limit", type=float, default=float("inf"), metavar="SECONDS", help="stop after these"
    )
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for the new rows"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dry-run", action="store_true", help="list what would be made and stop")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Make what is missing; 0 also where the limit came first."""
    started = time.monotonic()
    if options.jobs < 1:
        raise InvalidInputError(f"--jobs {options.jobs}: give at least one process")
    if not options.list.is_file():
        raise InvalidInputError(f"there is no list {options.list}; write one, a part a line")
    wanted = read_list(options.list.read_text(encoding="utf-8"))
    works = list(missing_work(wanted, (options.results, options.out)))
    cells = sum(len(work.cells) for work in works)
    print(f"{cells} rows are missing, {len(works)} configurations", flush=True)
    if options.dry_run:
        for work in works:
            print(f"{work.seconds:6.0f} s  {work.describe()}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    for name in {work.experiment for work in works}:
        drop_torn_line(options.out / f"{name}.jsonl")
    _run_all(works, options, started)
    left = list(missing_work(wanted, (options.results, options.out)))
    made = cells - sum(len(work.cells) for work in left)
    print(f"{made} rows made in {time.monotonic() - started:.0f} s; without rows: {len(left)}")
    for work in left:
        print(f"  {work.describe()}")
    return 0


def read_list(text: str) -> list[Wanted]:
    """Expected seconds, experiment and the part of its grid, line by line."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        seconds = float(words.pop(0)) if words[0].replace(".", "", 1).isdecimal() else 0.0
        parser = Parser(prog=f"line {number}")
        add_part_options(parser)
        part = parser.parse_args(words)
        if len(part.names) != 1:
            raise InvalidInputError(f"line {number} names {len(part.names)} experiments: name one")
        experiment_named(part.names[0])
        found.append((seconds, part.names[0], part_of_grid(part)))
    return found


def missing_work(wanted: Sequence[Wanted], folders: Sequence[Path]) -> Iterator[Work]:
    """Configurations that lack rows in every folder, in the order of the list, once each."""
    seen: set[str] = set()
    for seconds, name, part in wanted:
        experiment = experiment_named(name)
        lacking = [
            {experiment.key(cell) for cell in look_up(experiment, path, part).missing}
            for path in (rows_file(experiment, folder) for folder in folders)
        ]
        groups: dict[str, list[Cell]] = {}
        for cell in experiment.cells(part):
            key = experiment.key(cell)
            if all(key in some for some in lacking) and f"{name} {key}" not in seen:
                seen.add(f"{name} {key}")
                groups.setdefault(json.dumps(cell.get("config", key)), []).append(cell)
        yield from (Work(name, cells, seconds) for cells in groups.values())


def _run_all(works: Sequence[Work], options: argparse.Namespace, started: float) -> None:
    """Start processes, replace those that fail, and end all at the limit."""
    spawn = multiprocessing.get_context("spawn")
    following = spawn.Value("i", 0)
    end = started + options.limit
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.jobs)))
    with TemporaryDirectory() as claims:
        asked = Options(device=options.device, shard=(0, options.jobs), results=options.results)

        def start() -> SpawnProcess:
            given = (works, following, asked, Path(claims), options.out, end)
            process = spawn.Process(target=_worker, args=given, daemon=True)
            process.start()
            return process

        processes = [start() for _ in range(min(options.jobs, len(works)))]
        try:
            while any(process.is_alive() for process in processes) and time.monotonic() < end:
                time.sleep(WAIT)
                for place, process in enumerate(processes):
                    if process.exitcode and following.value < len(works):
                        processes[place] = start()  # a failed GPU is of no use to its process
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _worker(
    works: Sequence[Work],
    following: Any,
    asked: Options,
    claims: Path,
    out: Path,
    end: float,
) -> None:
    """Make one configuration after the other until none is left that ends in time."""
    while True:
        with following.get_lock():
            number = following.value
            following.value += 1
        if number >= len(works):
            return
        work, left = works[number], end - time.monotonic()
        if left < max(work.seconds, BEGUN_BEFORE_THE_END):
            print(f"not begun, {left:.0f} s left: {work.describe()}", flush=True)
            continue
        own = claims / str(number)  # what processes of one grid claim; here each has its own
        own.mkdir()
        begun = time.monotonic()
        try:
            experiment = experiment_named(work.experiment)
            for line in made_lines(experiment, work.cells, replace(asked, claims=own)):
                with (out / f"{work.experiment}.jsonl").open("a", encoding="utf-8") as file:
                    file.write(line)
        except Exception:
            traceback.print_exc()
            print(f"failed: {work.describe()}", file=sys.stderr, flush=True)
            sys.exit(1)
        print(f"{time.monotonic() - begun:6.1f} s  {work.describe()}", flush=True)
