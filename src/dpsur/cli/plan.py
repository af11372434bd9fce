"""`dpsur plan`: what a run would cost and roughly give, before any record is read."""

import argparse
import json
import sys
import warnings
from dataclasses import asdict, replace
from math import prod
from typing import Any

from dpsur.config import data_facts
from dpsur.errors import InvalidInputError, PrivacyWarning
from dpsur.features import TABLE, TableLayout, features_named
from dpsur.features.table import MOST_NUMBERS
from dpsur.functional.records import Examples
from dpsur.methods import Dpsgd
from dpsur.options import shorten
from dpsur.presets import AUTO, explain_auto, preset_named
from dpsur.presets.auto import ENCODER_SECONDS, UNIT_ROWS
from dpsur.privacy.accounting import DEFAULT_ACCOUNTING
from dpsur.privacy.budget import Budget
from dpsur.runs.input_features import InputFeatures
from dpsur.runs.planning import Prospect, Simulation, prospect
from dpsur.status import status
from dpsur.tasks.base import WORD_ROWS, Task
from dpsur.tasks.declared import image_shape

DESCRIPTION = """\
Say what a run would cost, and for a table roughly what it would give, before any record is read.

  dpsur plan --records 20000 --width 15 --classes 2               a table of 15 numbers
  dpsur plan --records 2000 --image-size 64x64 --classes 3        images
  dpsur plan --records 5000 --texts --classes 2 --epsilon 1,3     texts

Everything follows from public facts; nothing is spent. For a table the loss of accuracy is
simulated: the same training on synthetic tables of the same shape, from easy to hard. The width of
a table is what its schema makes of a record: 1 for a number, one more than its values for a
category.
"""
EPSILONS = "0.5,1,2,4,8"
MOST_EPSILONS = 20


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = DESCRIPTION
    parser.add_argument("--records", type=int, required=True, metavar="N", help="training records")
    parser.add_argument("--classes", type=int, default=2, metavar="K", help="default: 2")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--width", type=int, metavar="D", help="numbers of a record of a table")
    kind.add_argument("--image-size", metavar="[Cx]HxW", help="size of images")
    kind.add_argument("--texts", action="store_true", help="records are texts")
    parser.add_argument(
        "--epsilon",
        default=EPSILONS,
        metavar="E,...",
        help=f"values to compare (default: {EPSILONS})",
    )
    parser.add_argument("--delta", type=float, default=1e-5, help="default: 1e-5")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto (default: auto)")
    parser.add_argument(
        "--no-simulation", action="store_true", help="leave out the simulation of a table"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print a line for every epsilon."""
    task = described_task(options)
    epsilons = _epsilons(options.epsilon)
    budgets = [Budget(epsilon, options.delta) for epsilon in epsilons]
    # settings for the largest; for the others only the learning rate may differ
    facts = data_facts(task, {"device": options.device, "budget": budgets[-1]})
    preset = preset_named(AUTO, Dpsgd.name, "", epsilons[-1], facts)
    method = Dpsgd(**preset.options)
    features = preset.features or task.default_features
    normalisation = preset.normalisation
    simulation = None
    if options.width is not None and not options.no_simulation:
        simulation = Simulation.of(options.records, options.width, options.classes)
    found: list[Prospect] = []
    with status("choosing the noise for each epsilon"):
        for budget in budgets:
            setup = InputFeatures.within(features, normalisation, budget, table=task.table).setup
            found.append(prospect(method, options.records, budget, DEFAULT_ACCOUNTING, setup))
    seconds = None
    if simulation is not None:
        found, seconds = _simulated(simulation, budgets, found, options.device)
    about = {
        "records": options.records,
        "delta": options.delta,
        "memory_bytes": _memory(task, features),
        "feature_minutes": _feature_minutes(options.records, features, gpu=facts.gpu),
        "seconds": seconds,
    }
    if options.json:
        print(json.dumps({**about, "epsilons": [asdict(one) for one in found]}))
        return 0
    explained = explain_auto(
        facts, features, normalisation, asdict(method), (epsilons[-1], options.delta)
    )
    print(f"{explained[0].partition(', epsilon')[0]}, delta {options.delta:g}")
    print("\n".join(explained[1:]))
    _print_table(found)
    _print_notes(options, about, simulated=seconds is not None)
    return 0


def described_task(options: argparse.Namespace) -> Task:
    """A task without records, of the shape that was given."""
    for name in ("records", "classes", "width"):
        value = getattr(options, name)
        least = 2 if name == "classes" else 1
        if value is not None and not least <= value <= 10**9:
            raise InvalidInputError(
                f"{name} must be a whole number of at least {least}, got {value}"
            )
    from dpsur.features.words import WORDS_DIMENSION
    from dpsur.tasks.npz import image_networks

    shape: tuple[int, ...] = (options.width,) if options.width else (WORDS_DIMENSION,)
    if options.image_size is not None:
        shape = image_shape(options.image_size)
    layout, kind = None, WORD_ROWS if options.texts else None
    if options.width is not None:  # as in the simulation, a table of numbers
        few = options.width <= MOST_NUMBERS
        layout = TableLayout(options.width, options.width, tuple(range(options.width * few)))
        kind = TABLE

    def load(_: Any) -> tuple[Examples, Examples | None]:
        raise AssertionError("a plan reads no records")

    return Task(
        name="",
        summary="",
        networks=image_networks(shape, options.classes),
        load=load,
        records=options.records,
        shape=shape,
        classes=options.classes,
        kind=kind,
        target=None if layout is None else ("classes", options.classes),
        table=layout,
    )


def _epsilons(given: str) -> list[float]:
    try:
        found = sorted({float(part) for part in given.split(",")})
    except ValueError:
        raise InvalidInputError(
            f"epsilon must be numbers separated by commas, such as 1,3, got {shorten(given)}"
        ) from None
    if len(found) > MOST_EPSILONS or not all(0 < one < 1e3 for one in found):
        raise InvalidInputError(
            f"epsilon must be at most {MOST_EPSILONS} numbers above 0 and below 1000, got "
            f"{shorten(given)}"
        )
    return found


def _simulated(
    simulation: Simulation, budgets: list[Budget], found: list[Prospect], device: str
) -> tuple[list[Prospect], float]:
    rows, taken = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)  # of seeds: the tables are synthetic
        for number, (row, budget) in enumerate(zip(found, budgets, strict=True), 1):
            with status(f"training on synthetic tables, epsilon {number} of {len(found)}"):
                least, most, seconds = simulation.lost(budget, device)
            rows.append(replace(row, lost=(least, most)))
            taken.append(seconds)
    return rows, max(taken)


def _memory(task: Task, features: str) -> int:
    assert task.shape is not None
    shape = features_named(features).output_shape(task.shape)
    if task.table is not None and features == TABLE:
        shape = (task.table.features,)
    return 4 * (task.records or 0) * prod(shape)


def _feature_minutes(records: int, features: str, *, gpu: bool) -> int:
    slow = features in UNIT_ROWS and features != "whitened-scattering" and not gpu
    return max(1, round(records * ENCODER_SECONDS / 60)) if slow else 0


def _print_table(found: list[Prospect]) -> None:
    lost = found[0].lost is not None
    print()
    head = f"{'epsilon':>8}  {'an attacker is right':>20}"
    print(head + (f"  {'accuracy lost, points':>21}" if lost else "") + "  run")
    for row in found:
        share = "not known" if row.right_guesses is None else f"at most {row.right_guesses:.0%}"
        range_ = (
            ""
            if row.lost is None
            else f"  {f'{_points(row.lost[0])} to {_points(row.lost[1])}':>21}"
        )
        print(f"{row.epsilon:>8g}  {share:>20}{range_}  {row.run}")
    print()


def _points(share: float) -> str:
    return f"{100 * share:.1f}"


def _print_notes(options: argparse.Namespace, about: dict[str, Any], *, simulated: bool) -> None:
    print("an attacker is right: about whether a given record was used, at even odds beforehand")
    if simulated:
        print(
            "accuracy lost: against a linear model without privacy, on three synthetic tables of "
            "this shape, from easy to hard; a guide, no promise"
        )
    elif options.width is None:
        print("accuracy is not simulated for images and texts; the page Accuracy has public data")
    print("the same accuracy at half the epsilon takes about twice the records")
    minutes = (
        f"{about['feature_minutes']} core-minutes for features, "
        if about["feature_minutes"]
        else ""
    )
    seconds = f"about {about['seconds']:.0f} s for a run here, " if about["seconds"] else ""
    print(f"{minutes}{seconds}{about['memory_bytes'] / 1e6:,.0f} MB for the records in memory")
    print("nothing was spent; dpsur train --dry-run says the same of your data", file=sys.stderr)
