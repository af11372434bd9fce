"""What the number of rejected trials reveals to someone who sees nothing else.

Under the `proven` accounting that number is private. It shows in the time a run takes. With an
acceptance probability a, the trials until T updates have a negative binomial law, and a record
moves a: from a to (1 - q_v) a + q_v b, where b is what the test does on batches that hold it.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.signal import fftconvolve
from scipy.stats import nbinom

from dpsur import checks
from dpsur.audits.bounds import Array
from dpsur.errors import InvalidInputError
from dpsur.privacy.events import Test

_REACH = 12.0  # standard deviations of the count that are summed over


@dataclass(frozen=True)
class CountLeak:
    """Epsilon of the count alone, for a record that always sways its batches one way.

    `accept` and `swayed` are the acceptance probabilities without and with it; `advantage` is the
    largest difference of probabilities between the two, over all sets of counts.
    """

    accept: float
    swayed: float
    epsilon: float
    advantage: float


def count_leak(
    test: Test,
    accept: float,
    updates: int,
    delta: float,
    rounded_to: int = 1,
    *,
    delayed: bool = False,
) -> CountLeak:
    """The worse of a record that makes its batches accept most and one that makes them least.

    `rounded_to` rounds the count up to multiples, as a run does that continues with trials whose
    result is dropped until a block is full. `delayed` adds, to every accepted update, a delay of as
    many trials as another search takes at the least acceptance probability: the law of what is
    seen is then that of the sum of both. It is one or the other.
    """
    checks.at_least_one("updates", updates)
    checks.at_least_one("rounded_to", rounded_to)
    if delayed and rounded_to > 1:
        raise InvalidInputError(
            f"a count is delayed or rounded to {rounded_to}, not both: leave out one of them"
        )
    if not test.accept_min <= accept <= test.accept_max or not 0 < accept < 1:
        raise InvalidInputError(
            f"the acceptance probability must lie in [{test.accept_min:.3g}, "
            f"{test.accept_max:.3g}] and below 1, got {accept}"
        )
    rate = test.sample_rate
    leaks = []
    for extreme in (test.accept_min, test.accept_max):
        swayed = min((1 - rate) * accept + rate * extreme, 1 - 1e-12)
        without, with_record = (
            _law(updates, a, min(accept, swayed), rounded_to) for a in (accept, swayed)
        )
        if delayed:
            delay = _law(updates, test.accept_min, test.accept_min, 1)
            without, with_record = (_sum_of(law, delay) for law in (without, with_record))
        epsilon = max(_epsilon(with_record, without, delta), _epsilon(without, with_record, delta))
        advantage = 0.5 * float(np.abs(with_record - without).sum())
        leaks.append(CountLeak(accept, swayed, epsilon, advantage))
    return max(leaks, key=lambda leak: leak.epsilon)


def _law(updates: int, accept: float, least: float, rounded_to: int) -> Array:
    """Probabilities of the numbers of rejections, in blocks."""
    spread = math.sqrt(updates * (1 - least)) / least
    most = math.ceil(updates * (1 - least) / least + _REACH * spread + _REACH / least)
    blocks = math.ceil((most + updates) / rounded_to)
    ends = np.arange(blocks + 1) * rounded_to - updates
    below, above = nbinom.cdf(ends, updates, accept), nbinom.sf(ends, updates, accept)
    # each block from the tail in which it is small, where differences keep their digits
    mass = np.where(below[1:] < 0.5, np.diff(below), -np.diff(above))
    return np.asarray(mass, dtype=np.float64)


def _sum_of(first: Array, second: Array) -> Array:
    """The law of the sum of two independent counts. Its errors are of 1e-16, far below delta."""
    return np.asarray(np.maximum(fftconvolve(first, second), 0.0), dtype=np.float64)


def _epsilon(first: Array, second: Array, delta: float) -> float:
    """The smallest epsilon with sum of (first - e^eps second)+ at most delta."""

    def excess(epsilon: float) -> float:
        return float(np.maximum(first - math.exp(epsilon) * second, 0.0).sum())

    if excess(0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while excess(high) > delta:
        low, high = high, 2 * high
        if high > 700:
            return math.inf
    while high - low > 1e-5:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if excess(middle) > delta else (low, middle)
    return high
