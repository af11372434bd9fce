"""A schema that is learned from private records: ranges and values by noisy histograms.

Every record adds at most two ones for each column: one to the count of its value, as text, and, if
that is a number, one to a bin of a public grid. All counts together are one Gaussian mechanism of
sensitivity sqrt(2 m) for m columns. Values are not declared, so that a value which only one record
has would be given away by being listed at all: only values whose noisy counts are above a threshold
are, and the count of such a value is above it with a chance of at most the delta of the event.

Formal guarantee: the schema is a `ThresholdedGaussian`, under adding or removing one record, and
what follows from it is post-processing. `Schema.learned` holds the event, and every run with the
schema is charged for it. The number of records and the names of the columns count as public.
"""

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final

import torch

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.mechanism import gaussian
from dpsur.mechanism.streams import FEATURES, SETUP, Stream, Streams
from dpsur.per_example import ClippedSum
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.events import ThresholdedGaussian
from dpsur.privacy.search import least_noise
from dpsur.tasks.schema import (
    MOST_VALUES,
    Category,
    Column,
    Learned,
    Number,
    Schema,
    column_names,
    name_of,
    numbers_of,
)
from dpsur.tasks.tables import LONGEST_NAME, header, read_columns

# The grid of numbers: zero, and half octaves of both signs.
LOWEST, HIGHEST, PER_OCTAVE = -20, 50, 2
_SIZES: Final = (HIGHEST - LOWEST) * PER_OCTAVE
# Shares of delta: for the threshold, and for the noise of the counts where `epsilon` is stated.
THRESHOLD_SHARE, NOISE_SHARE = 0.1, 0.5
# A bin of numbers counts as empty below this many standard deviations of its noise.
EMPTY_BELOW = 4.0
# Share of the numbers that a range leaves out at either end.
TAIL = 0.005
# Numbers with at most this many values, which nearly all records have, are codes of categories.
MOST_CODES, CODED = 20, 0.9


def learn_schema(
    table: Any,
    target: str | Sequence[str],
    epsilon: float,
    delta: float = 1e-5,
    *,
    seed: int | None = None,
) -> Schema:
    """Learn the columns of a table from its private records, at a cost in epsilon.

    Args:
        table: a data frame, a mapping of columns, or the path of a CSV or Parquet file.
        target: the column to predict, or several of two values each.
        epsilon: what the schema alone costs at `delta`. Runs with it are charged for it within
            their own budget, together with everything else: leave most of that to the training.
        delta: that of the runs. A tenth of it covers values that a single record has.
        seed: for rehearsals on public records; noise from a known seed protects nothing.
    """
    checks.positive("epsilon", epsilon)
    checks.probability("delta", delta)
    targets = [target] if isinstance(target, str) else list(target)
    if isinstance(table, (str, os.PathLike)):
        path = Path(table).expanduser()
        names = header(path)
        columns: Mapping[str, Any] = read_columns(path, names)
    else:
        names = column_names(table)
        columns = {name: table[name] for name in names}
    for name in targets:
        if name not in names:
            raise InvalidInputError(
                f"the table has no column {name!r}; it has {', '.join(names[:20])}",
                code="no-column",
            )
    event = _event(epsilon, delta)
    stream = Streams(seed, torch.device("cpu")).at(SETUP)[FEATURES]
    found = {name: _learned(columns[name], event, len(names), stream) for name in names}
    wanted: dict[str, Number | Category] = {}
    for name in targets:
        column = found[name]
        if column is None or (isinstance(column, Category) and len(column.values) < 2):
            raise InvalidInputError(
                f"target {name!r}: too few of its values have enough records to be told from "
                f"noise at epsilon {epsilon:g}; raise it, or declare the target in a schema",
                code="schema-not-learned",
            )
        wanted[name] = column
    inputs: dict[str, Column] = {
        n: c for n, c in found.items() if c is not None and n not in targets
    }
    if not inputs:
        raise InvalidInputError(
            f"no column could be learned at epsilon {epsilon:g} from so few records; raise it, or "
            "declare the columns in a schema",
            code="schema-not-learned",
        )
    learned = Learned(event.noise_multiplier, event.delta, len(names), epsilon, delta)
    return Schema(inputs, wanted, learned=learned)


def _event(epsilon: float, delta: float) -> ThresholdedGaussian:
    """The mechanism that costs this epsilon, if it is alone, at a part of delta."""
    accounting, threshold = accounting_named("every-trial"), THRESHOLD_SHARE * delta

    def cost(noise: float) -> float:
        charges = [(ThresholdedGaussian(noise, threshold), 1)]
        return accounting.epsilon(charges, NOISE_SHARE * delta)

    noise = least_noise(cost, epsilon)
    if noise is None:
        raise InvalidInputError(
            f"no noise gives epsilon {epsilon:g} at delta {delta:g}; raise one of them"
        )
    return ThresholdedGaussian(noise, threshold)


def threshold(event: ThresholdedGaussian, columns: int) -> float:
    """What a noisy count must exceed: one record in all columns does so with a chance of delta."""
    deviation = event.noise_multiplier * math.sqrt(2 * columns)
    return 1 + deviation * NormalDist().inv_cdf(1 - event.delta / columns)


def _learned(
    values: Iterable[Any], event: ThresholdedGaussian, columns: int, stream: Stream
) -> Number | Category | None:
    """One column; None where nothing of it can be told from noise."""
    names = [name_of(value) for value in values]
    usable = [name for name in names if name is not None and len(name) <= LONGEST_NAME]
    counts = Counter(usable)
    deviation = event.noise_multiplier * math.sqrt(2 * columns)
    noisy = _noisy(list(counts.values()), event, columns, stream)
    least = threshold(event, columns)
    kept = {name: count for name, count in zip(counts, noisy, strict=True) if count > least}
    bins = _noisy(_bins(usable), event, columns, stream)
    full = [place for place, count in enumerate(bins) if count > EMPTY_BELOW * deviation]
    numbers, listed = sum(bins[place] for place in full), sum(kept.values())
    words = sum(count for name, count in kept.items() if math.isnan(numbers_of([name])[0]))
    coded = len(kept) <= MOST_CODES and listed >= CODED * numbers
    if numbers > words and not (kept and coded):
        return _range(bins, full, numbers)
    if not kept:
        return None
    most = sorted(kept, key=lambda name: kept[name], reverse=True)[:MOST_VALUES]
    return Category(sorted(most, key=_order))


def _order(name: str) -> tuple[bool, float, str]:
    number = numbers_of([name])[0]
    return math.isnan(number), 0.0 if math.isnan(number) else float(number), name


def _noisy(
    counts: Sequence[float], event: ThresholdedGaussian, columns: int, stream: Stream
) -> list[float]:
    """Counts with the noise of the event, which all counts of all columns are one release of."""
    if not counts:
        return []
    values = torch.tensor(counts, dtype=torch.float64)
    total = ClippedSum({"counts": values}, math.sqrt(2 * columns))
    return list(map(float, gaussian.add_noise(total, event.noise_multiplier, stream)["counts"]))


def _bins(names: Sequence[str]) -> list[float]:
    """How many numbers are in each bin of the grid, from the lowest number to the highest."""
    found = [0.0] * (2 * _SIZES + 1)
    for value in numbers_of(names):
        if math.isfinite(value):
            found[_place(float(value))] += 1
    return found


def _place(value: float) -> int:
    if value == 0:
        return _SIZES
    size = math.floor(PER_OCTAVE * (math.log2(abs(value)) - LOWEST))
    size = min(max(size, 0), _SIZES - 1)
    return _SIZES + 1 + size if value > 0 else _SIZES - 1 - size


def _edges(place: int) -> tuple[float, float]:
    """The least and the largest number of a bin."""
    if place == _SIZES:
        return 0.0, 0.0
    size = place - _SIZES - 1 if place > _SIZES else _SIZES - 1 - place
    low, high = (2.0 ** (LOWEST + (size + more) / PER_OCTAVE) for more in (0, 1))
    return (low, high) if place > _SIZES else (-high, -low)


def _range(bins: Sequence[float], full: Sequence[int], total: float) -> Number | None:
    """From the bin below which nearly no number is to the one above which nearly none is."""
    below, low, high = 0.0, None, None
    for place in full:
        if low is None and below + bins[place] > TAIL * total:
            low = _edges(place)[0]
        if below < (1 - TAIL) * total:
            high = _edges(place)[1]
        below += bins[place]
    if low is None or high is None or not low < high:
        return None
    return Number(_rounded(low, math.floor), _rounded(high, math.ceil))


def _rounded(value: float, towards: Any) -> float:
    """To two digits, so that a range is wider and never narrower."""
    if value == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - 1)
    return float(f"{towards(value / unit) * unit:.2g}")
