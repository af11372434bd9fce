"""The options that name an experiment and a part of its grid."""

import argparse

from dpsur.cli.parser import shown, whole_number
from reproduction.base import Options

MOST_SEEDS = 10_000
LIMITS = {"tasks": str, "arms": str, "epsilons": float}


def add_part_options(parser: argparse.ArgumentParser) -> None:
    """Experiments by name, seeds, and limits of a grid."""
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="experiments to make, in this order, or: all (listed below)",
    )
    parser.add_argument(
        "--seeds",
        type=_seeds,
        metavar="LIST",
        help="seeds of repeated runs, such as 0-4 or 1,3 (default: the experiment's own)",
    )
    for limit, kind in LIMITS.items():
        parser.add_argument(
            f"--{limit}",
            nargs="+",
            default=(),
            type=kind,
            metavar=limit[:-1].upper(),
            help=f"limit a grid of runs to these {limit}",
        )


def part_of_grid(options: argparse.Namespace) -> Options:
    """The part that these options ask for."""
    return Options(
        seeds=options.seeds,
        tasks=tuple(options.tasks),
        arms=tuple(options.arms),
        epsilons=tuple(options.epsilons),
    )


def _seeds(value: str) -> tuple[int, ...]:
    """Read a list of seeds and ranges of seeds."""
    found: list[int] = []
    try:
        for part in value.split(","):
            first, _, last = part.partition("-")
            start, stop = whole_number(first), whole_number(last or first) + 1
            if stop - start > MOST_SEEDS - len(found):
                raise argparse.ArgumentTypeError(
                    f"{shown(value)} names more than {MOST_SEEDS} seeds"
                )
            found += range(start, stop)
    except ValueError:
        found = []
    if not found:
        raise argparse.ArgumentTypeError(
            f"{shown(value)} is not a list of seeds such as 0-4 or 1,3"
        )
    return tuple(dict.fromkeys(found))
