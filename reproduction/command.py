"""The command `python -m reproduction`: the paper's tables and figures."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from dpsur.cli import run_command
from dpsur.cli.parser import Parser, shown, whole_number
from dpsur.errors import DpsurError, InvalidInputError
from reproduction.base import Experiment, Options
from reproduction.grid_options import LIMITS, add_part_options, part_of_grid
from reproduction.index_page import index_page
from reproduction.registry import EXPERIMENTS, experiment_named
from reproduction.runner import Filled, fill, look_up, render, rows_file

DESCRIPTION = """\
Make the rows of experiments and render their tables and figures.

A row is a line of results/NAME.jsonl. Rows that are there are kept and only missing
ones are made, so that an interrupted experiment resumes where it stopped; delete lines
to have them made anew. Tables go to tables/ in the folder --out, figures to figures/.
"""
PROGRAM = "reproduction"
ROOT = Path(__file__).parent.parent
THREADS = "OMP_NUM_THREADS"
WHOLE = (0, 1)  # the one part of a grid that is not shared
MOST_JOBS = 1_000
EXAMPLES = """\
  python -m reproduction acceptance gate-density truncation trajectory     under a minute
  python -m reproduction all --render-only                                 draw from rows
  python -m reproduction accuracy ablation --jobs 4                        four at once on one GPU
  python -m reproduction bench --help                                      speed and memory
  python -m reproduction bench-networks --help                             common networks
  python -m reproduction bench-loops --help                                your own loop
  python -m reproduction bench-cpu --help                                  small batches on a CPU
  python -m reproduction encoder --help                                    train the encoder
  python -m reproduction queue --help                                      a list, in limited time
  python -m reproduction data fetch mnist                                  a public data set
"""

# Commands beside the experiments, and the modules that set them up.
COMMANDS = {
    "bench": "reproduction.bench.command",
    "bench-networks": "reproduction.bench.network_grid",
    "bench-loops": "reproduction.bench.loops",
    "bench-cpu": "reproduction.bench.cpu_loops",
    "encoder": "reproduction.encoder",
    "data": "reproduction.datasets.command",
    "queue": "reproduction.queue",
}


class ReproductionParser(Parser):
    """A parser whose errors are headed by the name of this package."""

    program = PROGRAM


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, as `dpsur` does: 2 for bad input."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given and given[0] in COMMANDS:
        return run_command(_parser_of(given[0]), PROGRAM, given[1:])
    return run_command(_parser, PROGRAM, given)


def _parser_of(name: str) -> Callable[[Sequence[str]], Parser]:
    def parser_for(given: Sequence[str]) -> Parser:
        del given
        parser = ReproductionParser(prog=f"python -m {PROGRAM} {name}")
        import_module(COMMANDS[name]).set_up(parser)
        return parser

    return parser_for


def _parser(given: Sequence[str]) -> Parser:
    del given
    parser = ReproductionParser(prog=f"python -m {PROGRAM}")
    set_up(parser)
    return parser


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = DESCRIPTION
    parser.epilog = f"experiments:\n{_listing()}\n\nexamples:\n{EXAMPLES}"
    add_part_options(parser)
    parser.add_argument("--list", action="store_true", help="list the experiments and stop")
    parser.add_argument(
        "--results", default="results", metavar="DIR", help="folder of the rows (default: results)"
    )
    parser.add_argument(
        "--out",
        default="docs",
        metavar="DIR",
        help="folder of tables and figures (default: docs)",
    )
    parser.add_argument(
        "--render-only", action="store_true", help="render from the rows that are there"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        help="where to train, if the experiment trains (default: the experiment's own)",
    )
    parser.add_argument("--rows-only", action="store_true", help="make rows, and render nothing")
    parser.add_argument(
        "--jobs",
        type=_count,
        default=1,
        metavar="N",
        help="make a grid of runs with N processes at once; small networks do not fill a GPU",
    )
    parser.add_argument(
        "--shard",
        type=_shard,
        default=WHOLE,
        metavar="K/N",
        help="make part K, from 0 to N - 1, of a grid of runs, so that N processes share it, on "
        "several machines too; on a GPU each takes an Nth of the memory",
    )
    parser.add_argument(
        "--claims", type=Path, help=argparse.SUPPRESS
    )  # between processes of --jobs
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Make and render."""
    if options.list:
        print(_listing())
        return 0
    if not options.names:
        raise InvalidInputError("name an experiment, or all (see: python -m reproduction --list)")
    if options.jobs > 1 and options.shard != WHOLE:
        raise InvalidInputError("--jobs makes all parts of a grid, --shard one: give one of them")
    if options.rows_only and options.render_only:
        raise InvalidInputError("--rows-only renders nothing and --render-only makes no row")
    names = EXPERIMENTS if "all" in options.names else dict.fromkeys(options.names)
    experiments = [experiment_named(name) for name in names]  # all names before any work
    if options.claims is not None and options.shard[0] % 2:
        experiments.reverse()  # as with records: what is small beside what is large
    known = {experiment.name: _rows_of(experiment, options) for experiment in experiments}
    shared = [experiment.name for experiment in experiments if experiment.shared]
    if options.jobs > 1 and shared and not options.render_only:
        run_parts(_part_of(shared, options), options.jobs)
    done: dict[str, tuple[Filled, list[Path]]] = {}
    for experiment in experiments:
        if "all" in options.names and options.render_only and _has_no_rows(experiment, options):
            print(f"{experiment.name}: no rows yet")
            continue
        done[experiment.name] = _reproduce(experiment, options, known[experiment.name])
    if "all" in options.names and not options.rows_only:
        _write_index(done, Path(options.out))
    return 0


def _write_index(done: Mapping[str, tuple[Filled, list[Path]]], out: Path) -> None:
    """The page that lists everything, and where it is."""
    page = index_page(
        {name: text for name, (_, text) in EXPERIMENTS.items()},
        {name: filled.rows for name, (filled, _) in done.items()},
        {name: len(filled.missing) for name, (filled, _) in done.items()},
        {name: written for name, (_, written) in done.items()},
    )
    (place,) = page.write(out)
    print(f"everything, and how to regenerate it: {place}")


def _rows_of(experiment: Experiment, options: argparse.Namespace) -> int:
    """How many rows there are of what is asked for."""
    path = rows_file(experiment, Path(options.results))
    return len(look_up(experiment, path, _asked(options)).rows)


def _has_no_rows(experiment: Experiment, options: argparse.Namespace) -> bool:
    filled = look_up(experiment, rows_file(experiment, Path(options.results)), Options())
    return bool(filled.missing) and not filled.rows


def _asked(options: argparse.Namespace) -> Options:
    return replace(
        part_of_grid(options),
        device=options.device,
        shard=options.shard,
        results=Path(options.results),
        claims=options.claims,
    )


def _reproduce(
    experiment: Experiment, options: argparse.Namespace, known: int
) -> tuple[Filled, list[Path]]:
    started = time.monotonic()
    results, out, asked = Path(options.results), Path(options.out), _asked(options)

    def report(count: int, total: int) -> None:
        seconds = time.monotonic() - started
        print(f"{experiment.name}: row {count} of {total}, {seconds:.0f} s", file=sys.stderr)

    if not options.render_only and not (options.jobs > 1 and experiment.shared):
        fill(experiment, results, asked, report)
    filled = look_up(experiment, rows_file(experiment, results), asked)
    written = [] if options.rows_only else render(experiment, filled, out)
    made = len(filled.rows) - known
    if options.claims is not None:
        return filled, written  # the process that started this one reports for all
    missing = f", {len(filled.missing)} cells without one" if filled.missing else ""
    print(f"{experiment.name}: {len(filled.rows)} rows, {made} of them new{missing}")
    for path in written:
        print(f"  {path}")
    return filled, written


def _part_of(names: Sequence[str], options: argparse.Namespace) -> list[str]:
    """The command that makes rows of these experiments, less the part that is a process's own."""
    given = [*names, "--rows-only", "--results", options.results]
    if options.seeds is not None:
        given += ["--seeds", ",".join(map(str, options.seeds))]
    if options.device is not None:
        given += ["--device", options.device]
    for limit in LIMITS:
        chosen = getattr(options, limit)
        given += [f"--{limit}", *map(str, chosen)] if chosen else []
    return given


def run_parts(arguments: Sequence[str], jobs: int) -> None:
    """Run this command with `ARGUMENTS --shard K/JOBS --claims DIR` for every K, and wait for all.

    In the folder they note what they have begun, so that the fastest process takes more. Whatever
    ends this process ends the others: none is left behind.
    """
    command = [sys.executable, "-m", PROGRAM, *arguments]
    parts: list[subprocess.Popen[bytes]] = []
    with TemporaryDirectory() as claims:
        try:
            for part in range(jobs):
                own = ["--claims", claims, "--shard", f"{part}/{jobs}"]
                parts.append(subprocess.Popen([*command, *own], env=_shared(os.environ, jobs)))
            failed = [part for part, process in enumerate(parts) if process.wait()]
        finally:
            for process in parts:
                process.terminate()
                process.wait()
    if failed:
        raise DpsurError(
            f"{len(failed)} of {jobs} processes failed, for reasons printed above; rows that were "
            "made are kept: run the command again to continue"
        )


def _shared(environment: Mapping[str, str], jobs: int) -> dict[str, str]:
    """The same environment, with a share of the cores: threads of one process wait for others.

    This package is found from any folder.
    """
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    searched = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return {THREADS: threads, **environment, "PYTHONPATH": os.pathsep.join(searched)}


def _listing() -> str:
    width = max(map(len, EXPERIMENTS))
    return "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in EXPERIMENTS.items())


def _count(value: str) -> int:
    """Read a number of processes."""
    if not value.isdecimal() or not 1 <= whole_number(value) <= MOST_JOBS:
        raise argparse.ArgumentTypeError(
            f"{shown(value)} is not a whole number from 1 to {MOST_JOBS}"
        )
    return int(value)


def _shard(value: str) -> tuple[int, int]:
    """Read `K/N`, with 0 <= K < N."""
    first, _, second = value.partition("/")
    if not (first.isdecimal() and second.isdecimal()) or not (
        whole_number(first) < whole_number(second) <= MOST_JOBS
    ):
        raise argparse.ArgumentTypeError(
            f"{shown(value)} is not a part K/N with K from 0 to N - 1 and N up to {MOST_JOBS}"
        )
    return int(first), int(second)
