"""The proven cost of selective release: T accepted updates to (epsilon, delta), with a certificate.

One accepted update has a Rényi divergence that `dpsur.privacy.accountants.selective` bounds from
above (what is charged) and from below (what an adversary attains). Updates compose adaptively, so T
of them cost T times that; docs/privacy.md proves it.
"""

import contextlib
import hashlib
import json
import math
import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from dpsur import checks
from dpsur.environment import cache_folder, write_cache
from dpsur.errors import InvalidInputError
from dpsur.privacy import events
from dpsur.privacy.accountants.rdp import epsilon_at
from dpsur.privacy.accountants.selective.divergence import (
    COARSE,
    FINE,
    VERSION,
    Accuracy,
    Interval,
    divergence,
)
from dpsur.privacy.accountants.selective.pair import Direction
from dpsur.privacy.events import (
    Event,
    Gaussian,
    Menu,
    NoisyChoice,
    NonPrivate,
    SampledGaussian,
    Test,
    Trial,
    mechanisms,
)

DIRECTIONS: tuple[Direction, ...] = ("add", "remove")
# Orders 1.02 to 479; the best one is then refined between its neighbours.
COARSE_ORDERS = tuple(1.0 + 0.02 * 1.55**k for k in range(24))
_GOLDEN = 0.5 * (math.sqrt(5.0) - 1.0)
_ORDER_TOLERANCE = 0.05  # in log(order - 1), around a minimum that is flat
LARGEST_RATIO = 1e100  # of acceptance probabilities: rounding larger ones would overflow


class SelectiveUpdate(NamedTuple):
    """One accepted update, reduced to what its cost depends on.

    A Poisson-sampled Gaussian candidate, released when a test on a fresh Poisson sample accepts it.
    Of the test only the ratio of its largest to its smallest acceptance probability matters.
    """

    sample_rate: float
    noise_multiplier: float
    val_sample_rate: float
    accept_ratio: float

    @staticmethod
    def of(sample_rate: float, noise_multiplier: float, test: Test) -> "SelectiveUpdate":
        """Reduce an update and its test, the ratio rounded up."""
        if test.accept_min <= 0.0:
            raise InvalidInputError(
                f"{test} never accepts the worst candidate, so its cost is unbounded; raise "
                "accept_threshold or val_noise_multiplier"
            )
        ratio = test.accept_max / test.accept_min * (1.0 + 4e-16)
        if test.accept_max == test.accept_min:
            ratio = 1.0
        if not ratio < LARGEST_RATIO:
            raise InvalidInputError(
                f"the acceptance ratio of {test} must be below {LARGEST_RATIO:g}"
            )
        # On a grid, so that tests that are equal but for rounding share their stored results.
        ratio = 1.0 + math.ceil((ratio - 1.0) * 1e12) / 1e12
        return SelectiveUpdate(sample_rate, noise_multiplier, test.sample_rate, ratio)


@dataclass(frozen=True)
class EpsilonBounds:
    """`upper` is the guarantee; `lower` is the same accounting fed with what an adversary attains.

    No better analysis of one update at these orders can fall below `lower`.
    """

    lower: float
    upper: float
    direction: Direction = "add"
    order: float = math.nan


@dataclass(frozen=True)
class Composition:
    """Updates with their counts, and Gaussian events on all records as one precision.

    A Gaussian event of noise multiplier sigma has divergence order / (2 sigma^2), so events add up
    by their precisions 1 / sigma^2.
    """

    updates: tuple[tuple[SelectiveUpdate, int], ...]
    precision: float = 0.0

    def __post_init__(self) -> None:
        for _, count in self.updates:  # a negative one would be a credit
            checks.non_negative("the number of times an event happens", count)

    def divergence(self, order: float, direction: Direction, accuracy: Accuracy) -> Interval:
        rest = order * self.precision / 2
        parts = [(n, _divergence(one, order, direction, accuracy)) for one, n in self.updates if n]
        lower = math.fsum(count * part.lower for count, part in parts) + rest
        upper = math.fsum(count * part.upper for count, part in parts) + rest
        return Interval(lower, upper * (1.0 + 1e-14))


def compose(charges: Sequence[tuple[Event, int]]) -> Composition:
    """Sort events, each repeated a number of times, into a composition."""
    updates: list[tuple[SelectiveUpdate, int]] = []
    precision = 0.0
    for event, count in charges:
        checks.non_negative("the number of times an event happens", count)
        selected = selected_update(event)
        if selected is not None:
            updates.append((selected, count))
            continue
        for part in mechanisms(event):
            times = count
            match part:
                case NonPrivate():
                    precision += math.inf if count else 0.0
                    continue
                case Gaussian(noise_multiplier=sigma):
                    precision += count * events.precision(sigma) if count else 0.0
                    continue
                case NoisyChoice():
                    # A mechanism of range eta satisfies eta^2 / 8 zero-concentrated privacy (Dong
                    # et al. 2020, arXiv:1909.13830; Cesar and Rogers 2021), as a Gaussian of
                    # precision eta^2 / 4 does.
                    precision += count * (part.amplified**2 / 4)
                    continue
                case SampledGaussian():
                    one = part.as_one
                case Menu():
                    one, times = part.worst, count * part.repeats
                case _:
                    raise InvalidInputError(f"unknown privacy event: {part!r}")
            updates.append(
                (SelectiveUpdate(one.sample_rate, one.noise_multiplier, 0.0, 1.0), times)
            )
    return Composition(tuple(updates), precision)


def selected_update(event: Event) -> SelectiveUpdate | None:
    """The accepted update of a trial behind a gate; None of any other event.

    No theorem covers a gate over updates in which a person has several records.
    """
    update = event.update if isinstance(event, Trial) else None
    if (
        not isinstance(event, Trial)
        or event.gate is None
        or not isinstance(update, SampledGaussian)
    ):
        return None
    if update.records > 1:
        raise InvalidInputError(
            "a gate is not covered where records of a person join a batch one by one; sample "
            "by person, or train without a gate",
            code="not-covered",
        )
    return SelectiveUpdate.of(update.sample_rate, update.noise_multiplier, event.gate)


@lru_cache(maxsize=4096)
def event_divergence(event: Event, order: float) -> float:
    """Certified Rényi divergence of one event, the worse direction: what a filter is charged."""
    whole = compose([(event, 1)])
    return max(whole.divergence(order, direction, FINE).upper for direction in DIRECTIONS)


def selective_divergence(update: SelectiveUpdate, order: float, direction: Direction) -> Interval:
    """Certified upper and attained lower Rényi divergence of one accepted update.

    Formal guarantee: for neighbouring data sets and every accepted history, the law of the next
    accepted update satisfies D_order <= upper, with the record against without it for `add`, the
    other way round for `remove`.
    """
    if not 1.0 < order <= 1024.0:
        raise InvalidInputError(f"the order must be in (1, 1024], got {order}")
    value = _divergence(update, order, direction, FINE)
    known(update).flush()
    return value


def composed_epsilon(
    composition: Composition, delta: float, *, attained: bool = True
) -> EpsilonBounds:
    """(epsilon, delta) of a composition of accepted updates and other events.

    Without `attained` the lower bound is any, and the upper one the same in half the time.

    Formal guarantee: (upper, delta)-DP under adding or removing one record, for the sequence of
    accepted updates together with the other events. A pair of neighbours keeps its direction, so
    each direction takes its best order and the worse direction counts. Every order gives a valid
    value, so the search for a good one cannot harm the guarantee.
    """
    worse, other = (_Search(composition, direction, delta, attained) for direction in DIRECTIONS)
    best = worse.best()
    if other.at(best.order).upper > best.upper:
        rival = other.best()
        best = max(best, rival, key=lambda bounds: bounds.upper)
    for update, _ in composition.updates:
        known(update).flush()
    return best


class _Search:
    """The best order for one direction: a coarse grid, then golden section in log(order - 1).

    Both stages take epsilon to fall and then rise with the order. Where it does not, the result is
    still the epsilon of some order, which is all that the guarantee needs.
    """

    def __init__(
        self, composition: Composition, direction: Direction, delta: float, attained: bool
    ) -> None:
        self._composition, self._direction, self._delta = composition, direction, delta
        self._fine = replace(FINE, attained=attained)
        self._rough = replace(COARSE, attained=attained)
        self._seen: dict[float, Interval] = {}

    def at(self, order: float) -> Interval:
        if order not in self._seen:
            self._seen[order] = self._epsilon(order, self._fine)
        return self._seen[order]

    def best(self) -> EpsilonBounds:
        @cache
        def rough(index: int) -> float:
            return self._epsilon(COARSE_ORDERS[index], self._rough).upper

        # ties, as between infinities, go to smaller orders
        last = len(COARSE_ORDERS) - 1
        middle = bisect_left(range(last), True, key=lambda i: rough(i) <= rough(i + 1))
        low = math.log(COARSE_ORDERS[max(middle - 1, 0)] - 1.0)
        high = math.log(COARSE_ORDERS[min(middle + 1, last)] - 1.0)
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        while high - low > _ORDER_TOLERANCE:
            if self._upper(left) <= self._upper(right):
                high, right = right, left
                left = high - _GOLDEN * (high - low)
            else:
                low, left = left, right
                right = low + _GOLDEN * (high - low)
        order, found = min(self._seen.items(), key=lambda item: item[1].upper)
        lower = min(value.lower for value in self._seen.values())
        return EpsilonBounds(lower, found.upper, self._direction, order)

    def _epsilon(self, order: float, accuracy: Accuracy) -> Interval:
        total = self._composition.divergence(order, self._direction, accuracy)
        return Interval(*(epsilon_at(order, value, self._delta) for value in total))

    def _upper(self, log_excess: float) -> float:
        return self.at(1.0 + math.exp(log_excess)).upper


# Files of a few kilobytes each. Beyond this number those that were longest unused go.
MOST_FILES = 1000


class Store:
    """Intervals of one setting by label, in a small file; `folder=None` keeps them in memory only.

    Losing or damaging it costs time, never correctness.
    """

    def __init__(self, setting: tuple[float, ...], folder: Path | None) -> None:
        self._key = [VERSION, *(float(x).hex() for x in setting)]
        name = hashlib.sha256(json.dumps(self._key).encode()).hexdigest()[:32]
        self._path = None if folder is None else folder / f"selective-{name}.json"
        self._known = self._read()
        self._fresh = False

    def get(self, label: str) -> Interval | None:
        return self._known.get(label)

    def put(self, label: str, value: Interval) -> None:
        self._known[label] = value
        self._fresh = True

    def flush(self) -> None:
        """Writes what is new, atomically; a folder that cannot be written is no error."""
        if self._path is None or not self._fresh:
            return
        merged = self._read() | self._known
        values = {k: [v.lower.hex(), v.upper.hex()] for k, v in sorted(merged.items())}
        content = {"key": self._key, "values": values, "digest": _digest(self._key, values)}
        is_new = not self._path.exists()
        write_cache(self._path, json.dumps(content).encode())
        if is_new:
            _drop_oldest(self._path.parent)
        self._fresh = False

    def _read(self) -> dict[str, Interval]:
        if self._path is None:
            return {}
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
            values = data["values"]
            if data["key"] != self._key or data["digest"] != _digest(self._key, values):
                return {}
            with contextlib.suppress(OSError):
                os.utime(self._path)  # in use: the last to be dropped
            known = {
                k: Interval(float.fromhex(lo), float.fromhex(hi)) for k, (lo, hi) in values.items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}
        return {k: v for k, v in known.items() if 0.0 <= v.lower <= v.upper}


def _drop_oldest(folder: Path) -> None:
    ages = []
    for path in folder.glob("selective-*.json"):
        with contextlib.suppress(OSError):  # another process was faster
            ages.append((path.stat().st_mtime, path))
    most = len(ages) if len(ages) <= MOST_FILES else MOST_FILES * 9 // 10
    for _, path in sorted(ages)[: len(ages) - most]:
        with contextlib.suppress(OSError):
            path.unlink()


def _digest(key: list[str], values: object) -> str:
    return hashlib.sha256(json.dumps([key, values], sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=256)
def known(update: SelectiveUpdate) -> Store:
    return Store(tuple(update), cache_folder())


def _divergence(
    update: SelectiveUpdate, order: float, direction: Direction, accuracy: Accuracy
) -> Interval:
    store, mesh = known(update), f"{accuracy.nodes} {accuracy.most_nodes} {accuracy.gap}"
    label = f"{direction} {float(order).hex()} {mesh}"
    value = store.get(label)
    if not accuracy.attained and value is None:  # what has no attained value is kept apart
        label = f"{label} upper"
        value = store.get(label)
    if value is None:
        value = divergence(*update, order, direction, accuracy)
        store.put(label, value)
    return value
