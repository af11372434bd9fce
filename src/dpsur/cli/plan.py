"""`dpsur plan`: what a run would cost and roughly give, before any record is read."""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from math import prod
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from dpsur import checks
from dpsur.cli.parser import shown, text
from dpsur.config import data_facts, uses_gpu
from dpsur.environment import CACHE_VARIABLE
from dpsur.errors import InvalidInputError
from dpsur.features import TABLE, features_named
from dpsur.features.table import TableLayout
from dpsur.functional.records import Examples
from dpsur.methods import Dpsgd
from dpsur.presets import AUTO, DataFacts, Preset, explain_auto, preset_named
from dpsur.privacy.accounting import DEFAULT_ACCOUNTING
from dpsur.privacy.budget import Budget
from dpsur.privacy.conversion import PersonSampling, samplings_of_persons
from dpsur.privacy.events import Event
from dpsur.privacy.statement import PERSON, RECORD
from dpsur.runs.input_features import InputFeatures
from dpsur.runs.planning import (
    TIME_ROOM,
    Prospect,
    Simulation,
    bytes_of_a_run,
    lost_on_public_data,
    prospect,
    seconds_of_a_run,
    with_records_needed,
)
from dpsur.status import status
from dpsur.tasks.base import WORD_ROWS, Task, image_shape
from dpsur.tasks.schema import Category, Number, Schema, Text

DESCRIPTION = """\
Say what a run would cost and roughly give, before any record is read.

  dpsur plan --records 20000 --schema people.json                 a table
  dpsur plan --records 20000 --width 15 --classes 2               a table of 15 numbers
  dpsur plan --records 2000 --image-size 64x64 --classes 3        images
  dpsur plan --records 5000 --texts --classes 2 --epsilon 1,3     texts
  dpsur plan --records 5000 --persons 600 --schema people.json    persons with several records

Everything follows from public facts; nothing is spent. For a table the loss of accuracy is
simulated: the same training on synthetic tables with the same columns, which say much or nearly
everything about the target; where they say nothing, there is nothing to lose. For images and texts
it is what privacy cost on public data sets, with room on both sides. Seconds come from short runs
on made-up records on this machine. With --persons it also says how to draw them, and how many
records of a person to use: sampling, records_per_person. What is given is not chosen.
"""
EPSILONS = "0.5,1,2,4,8"
MOST_EPSILONS = 20
# Words of a made-up text.
WORDS_OF_A_TEXT = 200
# Bounds that are compared for persons.
RECORDS_PER_PERSON = (1, 4, 16)
# Columns of a table of numbers alone.
MOST_COLUMNS = 10_000


def set_up(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("--records", type=int, required=True, metavar="N", help="training records")
    parser.add_argument("--persons", type=int, metavar="P", help="whom the records belong to")
    parser.add_argument(
        "--records-per-person",
        type=int,
        nargs="+",
        metavar="K",
        help=f"bounds to compare (default: {' '.join(map(str, RECORDS_PER_PERSON))})",
    )
    parser.add_argument(
        "--sampling", choices=(PERSON, RECORD), help="how persons are drawn (default: chosen)"
    )
    parser.add_argument("--classes", type=int, metavar="K", help="default: 2, or the schema's")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--schema", type=text, metavar="FILE", help="the columns of a table")
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
        "--no-simulation",
        action="store_true",
        help="train nothing to find out: no accuracy of a table, and no seconds",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    schema = _schema(options)
    task = described_task(options, schema)
    epsilons = _epsilons(options.epsilon)
    budgets = [Budget(epsilon, options.delta) for epsilon in epsilons]
    device = "cuda" if uses_gpu(options.device) else "cpu"
    # settings for the largest; for the others only the learning rate may differ
    unit = RECORD if options.persons is None else PERSON
    facts, preset = _chosen(task, options.device, budgets[-1], unit)
    method = Dpsgd(**preset.options)
    features = preset.features or task.default_features
    normalisation = preset.normalisation
    kinds: list[PersonSampling] = []
    if options.persons is not None:
        setup = InputFeatures(features, normalisation, budgets[-1], table=task.table).charges
        kinds = _samplings(options, method, setup, budgets[-1])
        if kinds[0].sampling == RECORD:
            joining = kinds[0].records_per_person
            task = replace(task, records=min(options.records, joining * options.persons))
            facts, preset = _chosen(task, options.device, budgets[-1], RECORD)
            method = Dpsgd(**preset.options, records_joining=joining)
    units, drawn = options.persons or options.records, task.records or 1
    simulation = None
    if schema is not None and not options.no_simulation:
        texts = any(isinstance(column, Text) for column in schema.columns.values())
        simulation = None if texts or schema.kind != "classes" else Simulation.of(units, schema)
    found: list[Prospect] = []
    with status("choosing the noise for each epsilon"):
        for budget in budgets:
            setup = InputFeatures(features, normalisation, budget, table=task.table).charges
            found.append(prospect(method, drawn, budget, DEFAULT_ACCOUNTING, setup))
    seconds = None
    if simulation is not None:
        lasted = []
        for number, budget in enumerate(budgets):
            with status(f"training on synthetic tables, epsilon {number + 1} of {len(found)}"):
                most, took = simulation.lost(budget, device)
            found[number] = replace(found[number], lost=(0.0, most))
            lasted.append(took)
        seconds = min(lasted) / TIME_ROOM, max(lasted) * TIME_ROOM
    elif schema is None:
        assert task.classes is not None
        ranges = [lost_on_public_data(units, task.classes, e) for e in epsilons]
        found = [replace(row, lost=lost) for row, lost in zip(found, ranges, strict=True)]
        if not options.no_simulation:
            with status("timing short runs on made-up records"):
                seconds = _timed(options, task, device)
    found = with_records_needed(found, units)
    # the numbers of what a record becomes, beside the record itself
    assert task.shape is not None
    shape = features_named(features).output_shape(task.shape)
    if task.table is not None and features == TABLE:
        shape = (task.table.features,)
    inputs = 0 if shape == task.shape else prod(task.shape)
    about = {
        "records": options.records,
        "delta": options.delta,
        "seconds": seconds,
        "memory_bytes": bytes_of_a_run(4 * options.records * (prod(shape) + inputs)),
    }
    if options.json:
        if kinds:
            about |= {"persons": options.persons, "samplings": [asdict(one) for one in kinds]}
        print(json.dumps({**about, "epsilons": [asdict(one) for one in found]}))
        return 0
    explained = explain_auto(
        facts, features, normalisation, asdict(method), (epsilons[-1], options.delta)
    )
    print(f"{explained[0].partition(', epsilon')[0]}, delta {options.delta:g}")
    print("\n".join(explained[1:]))
    if kinds:
        best = kinds[0]
        print(f"\nways to protect persons at epsilon {epsilons[-1]:g}, best first:")
        print("sampling  records per person  batch size  noise multiplier  noise of a mean / C")
        for one in kinds:
            print(
                f"{one.sampling:<8}  {one.records_per_person:>18}  {one.batch_size:>10.1f}  "
                f"{one.noise_multiplier:>16.3f}  {one.noise:>19.4f}"
            )
        public = ", and a public --records" if best.sampling == RECORD else ""
        per_person = f"--records-per-person {best.records_per_person}"
        print(f"take --sampling {best.sampling} {per_person}{public}")
    _print_table(found, unit)
    _print_notes(
        about, unit, table=schema is not None, known=found[0].lost is not None, device=device
    )
    return 0


def _chosen(task: Task, device: str, budget: Budget, unit: str) -> tuple[DataFacts, Preset]:
    facts = data_facts(task, {"device": device, "budget": budget, "unit": unit})
    return facts, preset_named(AUTO, Dpsgd.name, "", budget.epsilon, facts)


def _samplings(
    options: argparse.Namespace, method: Dpsgd, setup: tuple[Event, ...], budget: Budget
) -> list[PersonSampling]:
    """Ways to draw persons at the rate and for the updates of a method, best first."""
    most = options.records_per_person or RECORDS_PER_PERSON
    for name, value in (("persons", options.persons), ("records_per_person", min(most))):
        checks.at_least_one(name, value)
    if options.persons > options.records:
        raise InvalidInputError(
            f"{options.persons} persons have at least as many records, got {options.records}"
        )
    if options.sampling == RECORD and min(most) == 1:
        raise InvalidInputError("with one record of a person both ways to draw are the same")
    _, plan = method.resolve(options.persons, budget, DEFAULT_ACCOUNTING, setup)
    with status("comparing ways to draw persons"):
        found = samplings_of_persons(
            *(budget, options.persons, options.records, most),
            updates=plan.length,
            rate=plan.update.sample_rate,
            setup=setup,
        )
    return [one for one in found if options.sampling in (None, one.sampling)]


def _schema(options: argparse.Namespace) -> Schema | None:
    """The columns of a table: as declared, or this many numbers."""
    if options.schema is not None:
        if options.classes is not None:
            raise InvalidInputError("the classes are those of --schema; leave out --classes")
        return Schema.load(options.schema)
    for name, least in (("classes", 2), ("width", 1)):
        value = getattr(options, name)
        if value is not None and not least <= value <= 10**9:
            raise InvalidInputError(
                f"{name} must be a whole number of at least {least}, got {value}"
            )
    if options.width is None:
        return None
    if options.width > MOST_COLUMNS:
        raise InvalidInputError(
            f"width must be at most {MOST_COLUMNS}, got {options.width}; declare wide categories "
            "and texts in a schema: --schema FILE"
        )
    columns = {f"x{place}": Number(-1, 1) for place in range(options.width)}
    return Schema(columns, {"y": Category([*range(options.classes or 2)])})


def described_task(options: argparse.Namespace, schema: Schema | None) -> Task:
    if not 1 <= options.records <= 10**9:
        raise InvalidInputError(
            f"records must be a whole number of at least 1, got {options.records}"
        )
    from dpsur.features.table import WORDS_DIMENSION
    from dpsur.tasks.npz import image_networks

    classes = options.classes or 2
    shape: tuple[int, ...] = (WORDS_DIMENSION,)
    layout: TableLayout | None = None
    kind = WORD_ROWS if options.texts else None
    if options.image_size is not None:
        shape = image_shape(options.image_size)
    if schema is not None:
        shape, classes = (schema.width,), schema.outputs
        if schema.is_text:
            kind = WORD_ROWS
        else:
            layout, kind = schema.layout, TABLE

    def load(_: Any) -> tuple[Examples, Examples | None]:
        raise AssertionError("a plan reads no records")

    return Task(
        name="",
        networks=image_networks(shape, classes),
        load=load,
        records=options.persons or options.records,
        shape=shape,
        classes=classes,
        kind=kind,
        target=None if schema is None or layout is None else (schema.kind, schema.outputs),
        table=layout,
    )


def _epsilons(given: str) -> list[float]:
    try:
        found = sorted({float(part) for part in given.split(",")})
    except ValueError:
        raise InvalidInputError(
            f"epsilon must be numbers separated by commas, such as 1,3, got {shown(given)}"
        ) from None
    if len(found) > MOST_EPSILONS or not all(0 < one < 1e3 for one in found):
        raise InvalidInputError(
            f"epsilon must be at most {MOST_EPSILONS} numbers above 0 and below 1000, got "
            f"{shown(given)}"
        )
    return found


def _timed(options: argparse.Namespace, task: Task, device: str) -> tuple[float, float]:
    assert task.shape is not None
    assert task.classes is not None
    shape, draws = task.shape, np.random.default_rng(0)

    def made(count: int) -> Any:
        if options.texts:
            drawn = draws.zipf(1.3, (count, WORDS_OF_A_TEXT))
            return [" ".join(f"w{word % 50_000}" for word in row) for row in drawn.tolist()]
        return torch.from_numpy(draws.random((count, *shape), np.float32))

    with _own_cache(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of seeds, and of small numbers of records
        return seconds_of_a_run(options.records, made, task.classes, device)


@contextmanager
def _own_cache() -> Iterator[None]:
    """Features of made-up images are kept nowhere, and found nowhere."""
    before = os.environ.get(CACHE_VARIABLE)
    with TemporaryDirectory() as folder:
        os.environ[CACHE_VARIABLE] = folder
        try:
            yield
        finally:
            del os.environ[CACHE_VARIABLE]
            if before is not None:
                os.environ[CACHE_VARIABLE] = before


def _print_table(found: list[Prospect], unit: str) -> None:
    known = found[0].lost is not None
    print()
    head = f"{'epsilon':>8}  {'an attacker is right':>20}"
    head += f"  {'accuracy lost, points':>21}  {f'{unit}s for 1 point':>19}" if known else ""
    print(f"{head}  run")
    for row in found:
        share = "not known" if row.right_guesses is None else f"at most {row.right_guesses:.0%}"
        line = f"{row.epsilon:>8g}  {share:>20}"
        if row.lost is not None:
            range_ = f"{100 * row.lost[0]:.1f} to {100 * row.lost[1]:.1f}"
            line += f"  {range_:>21}  {row.records_for_a_point or '':>19}"
        print(f"{line}  {row.run}")
    print()


def _print_notes(
    about: dict[str, Any], unit: str, *, table: bool, known: bool, device: str
) -> None:
    print(f"an attacker is right: about whether a given {unit} was used, at even odds beforehand")
    if known and table:
        print(
            "accuracy lost: against a linear model without privacy, at most what two synthetic "
            "tables with these columns lost; a guide, no promise"
        )
    elif known:
        print(
            "accuracy lost: against the same model without privacy, what it cost on four public "
            "data sets, with room on both sides; a guide, no promise"
        )
    else:
        print("accuracy is not simulated (--no-simulation, or a target or columns of another kind)")
    if known:
        print(f"{unit}s for 1 point: with so many, at most a point is lost by the same figures")
    least, most = (value / 1e9 for value in about["memory_bytes"])
    costs = f"{least:.1f} to {most:.1f} GB of memory"
    if about["seconds"] is not None:
        low, high = about["seconds"]
        kind = "seconds" if device == "cuda" else "processor seconds"
        shown = (f"{s:.1f}" if s < 10 else f"{s:,.0f}" for s in (low, high))
        costs = f"{' to '.join(shown)} {kind} on this machine, {costs}"
    print(f"a run takes {costs}")
    print("nothing was spent; dpsur train --dry-run says the same of your data", file=sys.stderr)
