"""The probabilities of the noise, exactly, and the lemmas of docs/privacy.md in numbers."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from dpsur.mechanism import noise_table
from dpsur.mechanism import streams as random_numbers
from dpsur.mechanism.noise_table import (
    BITS,
    CENTRE,
    COLUMNS,
    DEVIATION,
    DISTANCE,
    FACTOR,
    LIMIT_BITS,
    REST_BITS,
    SMALL_DEVIATION,
)
from dpsur.mechanism.streams import Key
from tests.conftest import stream

WHOLE = 1 << BITS + LIMIT_BITS + REST_BITS
VARIANCE = SMALL_DEVIATION**2
# The exponent of the theta function that both lemmas need, and what is left of it.
TAU_SQUARED = Fraction(VARIANCE, 1 + FACTOR**2)
KAPPA = 2.01 * math.exp(-2 * math.pi**2 * float(TAU_SQUARED))


def drawn_weights(table):
    """What each value weighs among all words that the sampler may be given, by its own rule."""
    room, found = 1 << LIMIT_BITS + REST_BITS, [0] * COLUMNS
    for column, (entry, rest) in enumerate(zip(*(part.tolist() for part in table), strict=True)):
        limit = (entry >> BITS) << REST_BITS | rest[0] << 64 | rest[1]
        found[column] += limit
        found[entry & COLUMNS - 1] += room - limit
    return found


def test_every_value_has_exactly_its_weight():
    assert drawn_weights(noise_table.table()) == noise_table.weights()


def test_the_weights_are_those_of_a_discrete_gaussian():
    """The ratio of neighbours is e^(-(2k+1)/2s^2), from brackets by rational numbers."""
    weights = noise_table.weights()
    assert sum(weights) == WHOLE
    assert weights[0] == 0
    assert weights[1:] == weights[:0:-1]

    def exponential(number):  # e^-x for 0 <= x, between two partial sums of its series
        halved = number / 2**10
        terms, term = [Fraction(1)], Fraction(1)
        for index in range(1, 24):
            term *= -halved / index
            terms.append(terms[-1] + term)
        low, high = sorted((terms[-1], terms[-2]))
        return low**1024, high**1024

    def short(number):  # to 400 bits, so that powers stay small
        return Fraction(round(number * 2**400), 2**400)

    total = Fraction(0)
    for value in (1, 2, 100, 1266, 5000, 16383):
        low, high = (short(end) for end in exponential(Fraction(value**2, 2 * VARIANCE)))
        ratio = Fraction(weights[CENTRE + value], weights[CENTRE])
        slack = Fraction(2, weights[CENTRE]) + Fraction(1, 10**35)  # whole weights; the tail
        assert low - slack <= ratio <= high + slack
        total += ratio
    beyond = stats.norm.sf((CENTRE - 0.5) / SMALL_DEVIATION) * 2
    each = beyond + COLUMNS / float(WHOLE)
    assert 2 * each < DISTANCE


def test_the_constants_of_the_lemmas():
    assert float(TAU_SQUARED) > 4
    assert KAPPA < 1e-34
    # numbers of a run of 2^28 weights and 2^20 steps: a factor of the density for both lemmas
    assert 4 * KAPPA * 2.0**48 < 1e-18
    deviation = SMALL_DEVIATION * math.sqrt(1 + FACTOR**2)
    assert deviation**2 - DEVIATION**2 > 4 * (1 + 1e-3)


def two_parts(factor, small):
    """`factor` times a discrete Gaussian of a deviation plus another one."""
    one = np.exp(-(np.arange(-30 * small, 30 * small + 1) ** 2) / (2 * small**2))
    spread = np.zeros(factor * (len(one) - 1) + 1)
    spread[::factor] = one
    both = np.convolve(spread, one)
    k = np.arange(len(both)) - len(both) // 2
    return k, both / both.sum()


def test_two_coarse_gaussians_make_a_fine_one():
    """Where the lemma's tau is 2, as here, nothing is left that a float64 could show."""
    small, apart = 8, []
    for factor in (4, 8):  # tau^2 is 64 / 17 = 3.8, and in the control 64 / 65 = 1
        k, found = two_parts(factor, small)
        expected = np.exp(-(k**2) / (2 * small**2 * (1 + factor**2)))
        inside = np.abs(k) < 200
        apart.append(np.abs((found * expected.sum())[inside] / expected[inside] - 1).max())
    assert apart[0] < 1e-12 < 1e-9 < apart[1]


@pytest.mark.parametrize("shift", [0.0, 0.3, 0.5, 7.25])
def test_a_continuous_gaussian_rounded_at_random_is_a_discrete_one(shift):
    """So a discrete Gaussian protects as much as the continuous one that it is made from."""
    deviation, tau = 6.0, 2.0
    y = np.linspace(-80, 80, 32_001)
    k = np.arange(-70, 71)
    kernel = np.exp(-((k - y[:, None]) ** 2) / (2 * tau**2))
    kernel /= kernel.sum(1, keepdims=True)
    density = np.exp(-((y - shift) ** 2) / (2 * deviation**2))
    found = density @ kernel
    found /= found.sum()
    expected = np.exp(-((k - shift) ** 2) / (2 * (deviation**2 + tau**2)))
    expected /= expected.sum()
    inside = np.abs(k) < 40
    np.testing.assert_allclose(found[inside], expected[inside], rtol=1e-11)


def hockey_stick(one, other, epsilon):
    return float(np.maximum(one - math.exp(epsilon) * other, 0).sum())


@pytest.mark.parametrize("rate", [1.0, 0.3, 0.01])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
def test_the_loss_of_discrete_noise_is_that_of_the_charged_gaussian(rate, sigma):
    """Under sampling, in both directions, within one step's rounding: never above."""
    from dpsur.privacy.accountants.pld import hockey_stick as charged
    from dpsur.privacy.events import SampledGaussian

    steps = 400.0  # to a standard deviation; fewer than there are, so that a difference would show
    k = np.arange(-int(12 * steps), int(12 * steps + steps / sigma) + 1)
    without = np.exp(-(k**2) / (2 * steps**2))
    shifted = np.exp(-((k - math.floor(steps / sigma)) ** 2) / (2 * steps**2))
    without, shifted = without / without.sum(), shifted / shifted.sum()
    joined = (1 - rate) * without + rate * shifted
    continuous = SampledGaussian(rate, sigma * math.sqrt(1 - 4 / steps**2))
    for epsilon in (0.0, 0.1, 0.5, 1.0, 2.0):
        for pair, direction in (((joined, without), "add"), ((without, joined), "remove")):
            bound = charged(continuous, np.array([epsilon]), direction)[0]
            assert hockey_stick(*pair, epsilon) <= bound * (1 + 1e-9) + 1e-13
            near = charged(SampledGaussian(rate, sigma), np.array([epsilon]), direction)[0]
            assert hockey_stick(*pair, epsilon) >= near * (1 - 0.02) - 1e-9


def test_draws_have_the_probabilities_of_the_table():
    """Each of the two parts of a word's noise, and draws whose further bits decide."""
    key, count = Key(bytes(range(16))), 2**20
    words = random_numbers._words(key, 5, (3, 0, 0), count // 4)
    found = random_numbers._noise(key, 5, (3, 0, 0), words)
    low = (found.astype(np.int64) + FACTOR * CENTRE) % FACTOR  # of the second part, but for it
    assert len(np.unique(low)) == FACTOR
    statistic = stats.kstest(found / (DEVIATION), "norm")
    assert statistic.pvalue > 1e-6
    entries, _ = noise_table.table()
    halves = words.view(np.uint32)
    ties = (halves & 2**LIMIT_BITS - 1) == entries[halves >> LIMIT_BITS] >> BITS
    assert 1 <= ties.sum() <= 40  # sixteen are expected


def test_further_bits_decide_as_often_as_they_should(monkeypatch):
    """With limits whose first bits are all zero or met, half of the further bits are below."""
    entries, rest = (part.copy() for part in noise_table.table())
    columns = np.arange(COLUMNS, dtype=np.uint32)
    entries[:] = 5 << BITS | CENTRE  # the alias is the value 0
    rest[:, 0], rest[:, 1] = 2**62, 0  # a quarter stays
    monkeypatch.setattr(random_numbers, "table", lambda: noise_table.Table(entries, rest))
    key, count = Key(bytes(range(16))), 4000
    halves = np.empty(2 * count, dtype=np.uint32)
    halves[:] = columns[CENTRE + 1] << LIMIT_BITS | 5  # a tie in both halves, of the value 1
    found = random_numbers._noise(key, 1, (3, 0, 0), halves.view(np.uint64))
    kinds = {0: 9 / 16, 1: 3 / 16, FACTOR: 3 / 16, FACTOR + 1: 1 / 16}
    assert set(np.unique(found)) == set(kinds)
    expected = [count * share for share in kinds.values()]
    seen = [int((found == kind).sum()) for kind in kinds]
    assert stats.chisquare(seen, expected).pvalue > 1e-6


def test_the_largest_noise_is_far_out():
    most = (CENTRE - 1) * (FACTOR + 1)
    assert most / DEVIATION > 12.9
    assert abs(stream().normal(1000)).max() < 6
