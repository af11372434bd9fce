"""What a run would cost and roughly give, before any private record is read.

    prospect(method, records, budget, "proven", setup)      # noise, length, limit on attacks
    Simulation.of(records, schema).lost(budget, "cpu")      # accuracy that privacy costs a table
    lost_on_public_data(records, epsilon)                   # the same of images and texts
    run_costs(records, shape, features, "cpu")              # their seconds and bytes

Noise and the limit on attacks follow from public facts. What privacy costs in accuracy is simulated
for tables: the same training on synthetic tables with the same columns. For images and texts it is
what privacy cost on public data sets at the same product of records and epsilon, with room on both
sides. How often the ranges held is on the page docs/tables/planning.md.
"""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import ndtr
from torch import Tensor

from dpsur.errors import InvalidInputError, PrivacyWarning
from dpsur.methods import Method
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event
from dpsur.runs.fit import fit
from dpsur.runs.result import guess_bound, tradeoff
from dpsur.status import silenced
from dpsur.tasks.schema import Category, Number, Schema

# How often the best guess is right on the synthetic tables: their columns say much, or nearly
# everything, about the class. Where columns say nothing there is nothing to lose.
DIFFICULTIES = (0.85, 0.95)
TEST_RECORDS = 4000
# A simulation of more numbers than these takes many minutes.
MOST_NUMBERS = 10_000_000
# Accuracy that privacy cost on public data, by records times epsilon: the linear models of `auto`
# against the same without privacy (results/planning.jsonl).
PRODUCTS = (500, 1000, 2000, 4000, 8000, 16_000, 32_000, 64_000, 128_000)
PUBLIC_DATA: Mapping[str, Sequence[float]] = {
    "mnist": (0.78, 0.42, 0.12, 0.041, 0.022, 0.014, 0.0094, 0.0068, 0.0048),
    "fmnist": (0.72, 0.41, 0.17, 0.083, 0.059, 0.04, 0.025, 0.022, 0.015),
    "cifar10": (0.57, 0.55, 0.48, 0.27, 0.14, 0.1, 0.059),
    "imdb": (0.21, 0.17, 0.12, 0.071, 0.045, 0.021, 0.01),
}
ONE_POINT = 0.01
# Records of the short runs that the time of a run is told from, and how far off that may be.
TRIED, TIME_ROOM = (100, 500), 2.0
# Bytes that a process needs before its records, and the copies of rows that a run holds at most.
PROCESS_BYTES, MOST_COPIES = 330e6, 3


@dataclass(frozen=True)
class Prospect:
    """What is to be expected at one epsilon.

    `run` describes updates and noise, `right_guesses` is the largest share of right guesses about
    membership at even odds (None where it is not known), `lost` the least and the most accuracy
    that privacy is expected to cost, as shares of the records (None where that is not known), and
    `records_for_a_point` how many are needed for it to cost at most a point.
    """

    epsilon: float
    run: str
    right_guesses: float | None
    lost: tuple[float, float] | None = None
    records_for_a_point: str | None = None


def prospect(
    method: Method, records: int, budget: Budget, accounting: str, setup: tuple[Event, ...]
) -> Prospect:
    _, plan = method.resolve(records, budget, accounting, setup)
    curve = tradeoff(plan)
    share = None if curve is None else guess_bound(curve)
    return Prospect(budget.epsilon, plan.describe(), share)


def with_records_needed(found: Sequence[Prospect], records: int) -> list[Prospect]:
    """Add the records at which privacy costs at most a point, by the upper ends of the ranges.

    What privacy costs depends on the product of records and epsilon, nearly: half the epsilon
    takes twice the records. So the other rows of the table say what other numbers of records give.
    """

    def rounded(value: float) -> int:
        unit: int = 10 ** max(0, int(math.log10(max(value, 1))) - 1)
        return round(value / unit) * unit

    known = [(records * row.epsilon, row.lost[1]) for row in found if row.lost is not None]
    enough = [product for product, lost in sorted(known) if lost <= ONE_POINT]
    result = []
    for row in found:
        text = None
        if known and not enough:
            text = f"over {rounded(max(known)[0] / row.epsilon):,}"
        elif known:
            first = enough[0] == min(known)[0]
            text = f"{'at most ' if first else ''}{rounded(enough[0] / row.epsilon):,}"
        result.append(replace(row, records_for_a_point=text))
    return result


def lost_on_public_data(
    records: int, classes: int, epsilon: float, without: Sequence[str] = ()
) -> tuple[float, float]:
    """The least and the most accuracy that privacy is expected to cost, of images or texts.

    A user's data may be harder or easier than the public ones, by as much as one of these is than
    all the others. `without` leaves some out, so that a plan for them can be checked.
    """
    known = {name: losses for name, losses in PUBLIC_DATA.items() if name not in without}
    found = [_between(losses, records * epsilon) for losses in known.values()]
    room = 1.0  # the factor by which one data set is outside of the range of the others
    for name, own in known.items():
        others = [losses for other, losses in known.items() if other != name]
        for one, *rest in zip(own, *others, strict=False) if others else ():
            room = max(room, min(rest) / one, one / max(rest))
    return min(found) / room, min(max(found) * room, 1 - 1 / classes)


def _between(losses: Sequence[float], product: float) -> float:
    """A straight line between neighbours, in logarithms; beyond them the last one continues."""
    last = len(losses) - 1
    number = min(max(1, sum(place < product for place in PRODUCTS[:last])), last)
    low, high = PRODUCTS[number - 1], PRODUCTS[number]
    share = math.log(product / low) / math.log(high / low)
    return float(losses[number - 1] * (losses[number] / losses[number - 1]) ** share)


@dataclass(frozen=True)
class Simulation:
    """Synthetic tables with the columns of a schema, and the accuracy without privacy on each."""

    tables: Sequence[Mapping[str, Any]]
    references: Sequence[float]
    schema: Schema

    @classmethod
    def of(cls, records: int, schema: Schema, seed: int = 0) -> "Simulation":
        if records * schema.width > MOST_NUMBERS:
            raise InvalidInputError(
                f"{records} records of {schema.width} numbers are too many to simulate here; give "
                f"--records of at most {MOST_NUMBERS // schema.width}, or --no-simulation"
            )
        made = [made_up(records + TEST_RECORDS, schema, right, seed) for right in DIFFICULTIES]
        references = [_reference(rows, labels) for _, rows, labels in made]
        return cls([table for table, _, _ in made], references, schema)

    def lost(self, budget: Budget, device: str, seed: int = 0) -> tuple[float, float]:
        """The most accuracy that privacy costs on one of them, and the seconds of a run."""
        found, begun = [], clock(device)
        for table, reference in zip(self.tables, self.references, strict=True):
            train, test = (
                {name: values[part] for name, values in table.items()}
                for part in (slice(TEST_RECORDS, None), slice(TEST_RECORDS))
            )
            with silenced(), warnings.catch_warnings():
                warnings.simplefilter("ignore", PrivacyWarning)  # of seeds: they are synthetic
                run = fit(
                    *("auto", train),
                    schema=self.schema,
                    test_set=test,
                    budget=budget,
                    device=device,
                    seed=seed,
                )
            assert run.scores is not None
            found.append(reference - run.scores["accuracy"])
        seconds = (clock(device) - begun) / len(self.tables)
        return max(0.0, *found), seconds


def made_up(
    records: int, schema: Schema, right: float, seed: int
) -> tuple[Mapping[str, Any], Tensor, Tensor]:
    """A table, its columns as numbers, and the places of its classes.

    Half of a column's variance is shared with others, as in real tables, values of a category are
    the rarer the later they are listed, and some columns matter more than others. The best guess
    is right as often as `right` says, or half way from chance to certainty where chance is higher.
    """
    draws = np.random.default_rng(seed)
    columns, outputs = schema.columns, schema.outputs
    shared = draws.normal(size=(records, 3)) / math.sqrt(3)
    importance = 1 / (1.0 + draws.permutation(len(columns)))
    table: dict[str, Any] = {}
    parts, scores = [], np.zeros((records, outputs))
    for (name, column), weight in zip(columns.items(), importance, strict=True):
        signs = draws.choice([-1.0, 1.0], size=3)
        hidden = math.sqrt(0.5) * (shared @ signs + draws.normal(size=records))
        quantile = ndtr(hidden)
        if isinstance(column, Category):
            shares = 1 / (1.0 + np.arange(len(column.values)))
            bounds = (shares / shares.sum()).cumsum()
            places = np.minimum(np.searchsorted(bounds, quantile), len(shares) - 1)
            table[name] = np.array(column.values, dtype=object)[places]
            parts.append(np.eye(len(shares))[places])
        else:
            assert isinstance(column, Number)
            table[name] = column.low + (column.high - column.low) * quantile
            parts.append(hidden[:, None])
        scores += weight * parts[-1] @ draws.normal(size=(parts[-1].shape[1], outputs))
    scores = (scores - scores.mean(0)) / scores.std(0)
    # probabilities of the classes, of which the likeliest is right as often as wanted
    odds, low, high = torch.from_numpy(scores), 0.0, 200.0
    for _ in range(40):
        scale = (low + high) / 2
        best = F.softmax(scale * odds, 1).amax(1).mean()
        low, high = (scale, high) if best < max(right, 0.5 + 0.5 / outputs) else (low, scale)
    chances = F.softmax(high * odds, 1)
    drawn = torch.multinomial(chances, 1, generator=torch.Generator().manual_seed(seed)).flatten()
    ((target, wanted),) = schema.target.items()
    assert isinstance(wanted, Category)
    table[target] = np.array(wanted.values, dtype=object)[drawn.numpy()]
    return table, torch.from_numpy(np.concatenate(parts, 1)).float(), drawn


def _reference(rows: Tensor, labels: Tensor) -> float:
    """The accuracy of logistic regression without privacy, on the records for the test."""
    layer = torch.nn.Linear(rows.shape[1], int(labels.max()) + 1)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=100)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(layer(rows[TEST_RECORDS:]), labels[TEST_RECORDS:])
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        right = layer(rows[:TEST_RECORDS]).argmax(1) == labels[:TEST_RECORDS]
    return float(right.double().mean())


def clock(device: str) -> float:
    """Seconds: of the processor, which other programs do not change, or of the clock on a GPU."""
    return time.process_time() if device == "cpu" else time.perf_counter()


def seconds_of_a_run(
    records: int, made: Callable[[int], Any], classes: int, device: str
) -> tuple[float, float]:
    """The least and the most seconds of a run, from short runs on made-up records.

    Features and batches grow with the number of records, and so does the time.
    """
    sizes = [min(records, size) for size in TRIED]
    taken = []
    for size in sizes:
        labels = torch.arange(size) % classes
        begun = clock(device)
        with silenced():
            fit(
                *("auto", (made(size), labels)),
                classes=classes,
                budget=Budget(1.0, 1e-5),
                device=device,
                seed=0,
            )
        taken.append(clock(device) - begun)
    each = max(0.0, taken[1] - taken[0]) / max(1, sizes[1] - sizes[0])
    expected = taken[1] + each * (records - sizes[1])
    return expected / TIME_ROOM, expected * TIME_ROOM


def bytes_of_a_run(row_bytes: int) -> tuple[float, float]:
    """The least and the most memory of a run's process, from the bytes of all rows."""
    return PROCESS_BYTES + row_bytes, 1.5 * PROCESS_BYTES + MOST_COPIES * row_bytes
