import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from dpsur.errors import InvalidInputError
from dpsur.mechanism import gaussian
from dpsur.mechanism import gaussian as sampling
from dpsur.mechanism.gaussian import exact_batch, padded_batch, padded_size, poisson_sample
from dpsur.mechanism.noise_table import DEVIATION
from dpsur.mechanism.streams import BATCH
from dpsur.per_example import ClippedSum
from tests.conftest import blobs, stream
from tests.mutants import Mutant, law_tests
from tests.statistics import STANDARD_ERRORS, assert_frequency, assert_normal
from tests.statistics import assert_standard_deviation as assert_scale


def batches(sample, size=50, rate=0.2, count=4000):
    drawn = stream(1, BATCH)
    mask = torch.zeros(count, size)
    for row in mask:
        row[sample(size, rate, drawn)] = 1
    return mask


def check_poisson(mask, rate=0.2):
    """Every record joins independently with the stated probability."""
    count, size = mask.shape
    assert_frequency(int(mask.sum()), mask.numel(), rate)
    joined = stats.binomtest  # exact interval for each record
    for record in mask.sum(0):
        assert joined(int(record), count, rate).pvalue > 1e-6 / size
    sizes = mask.sum(1)
    expected = size * rate * (1 - rate)
    # the variance of the batch size is what fixed-size batches get wrong
    error = expected * math.sqrt(2 / (count - 1))
    assert abs(float(sizes.var()) - expected) <= STANDARD_ERRORS * error


def fixed_size(size, rate, drawn):
    return drawn.uniform(size).argsort()[: round(size * rate)]


def with_replacement(size, rate, drawn):
    return (size * drawn.uniform(round(size * rate))).long()


def test_sampling_is_poisson():
    check_poisson(batches(poisson_sample))


@pytest.mark.parametrize("wrong", [fixed_size, with_replacement])
def test_other_sampling_is_caught(wrong):
    with pytest.raises(AssertionError):
        check_poisson(batches(wrong))


def test_rate_one_takes_every_record_and_a_tiny_rate_none():
    assert torch.equal(poisson_sample(10, 1.0, stream()), torch.arange(10))
    assert len(poisson_sample(10, 1e-12, stream())) == 0


# 3 times 0.5, and what floating point and the grid may add to that
SCALE = gaussian.noise_deviation(ClippedSum({"": torch.zeros(200_000)}, 0.5), 3.0)


def noise_samples(add, sensitivity=0.5, multiplier=3.0, count=200_000):
    total = ClippedSum({"a": torch.zeros(count // 2), "b": torch.zeros(count // 2)}, sensitivity)
    noisy = add(total, multiplier, stream(2))
    return torch.cat([noisy["a"], noisy["b"]]).double().numpy()


def check_noise(samples, scale):
    assert_scale(samples, scale)
    assert_normal(samples, scale)
    half = samples.size // 2
    correlation = np.corrcoef(samples[:half], samples[half:])[0, 1]
    assert abs(correlation) <= STANDARD_ERRORS / math.sqrt(half)


def test_noise_is_gaussian_and_scaled_from_the_reported_sensitivity():
    check_noise(noise_samples(gaussian.add_noise), SCALE)


def scaled(factor):
    return lambda total, multiplier, drawn: gaussian.add_noise(total, multiplier * factor, drawn)


def repeated(total, multiplier, drawn):
    noisy = gaussian.add_noise(total, multiplier, drawn)
    return {"a": noisy["a"], "b": noisy["a"]}


def in_floating_point(total, multiplier, drawn):
    scale = multiplier * total.sensitivity
    generator = torch.Generator().manual_seed(drawn.step)
    return {
        name: value + scale * torch.randn(value.shape, generator=generator, dtype=value.dtype)
        for name, value in total.params.items()
    }


@pytest.mark.parametrize(("add", "whole"), [(gaussian.add_noise, True), (in_floating_point, False)])
def test_what_is_released_is_a_point_of_the_grid_whatever_the_sum_is(add, whole):
    """In floating point, the control, the last bits of the sum show in those of the release."""
    total = ClippedSum({"a": torch.linspace(-1, 1, 5000, dtype=torch.float64)}, sensitivity=0.5)
    scale = gaussian.noise_deviation(total, 2.0)
    steps = add(total, 2.0, stream(3))["a"] * (DEVIATION / scale)
    assert bool(((steps - steps.round()).abs() < 1e-6).all()) is whole


def test_a_sum_in_float32_is_released_as_the_nearest_number():
    total = ClippedSum({"a": torch.linspace(-1, 1, 5000), "b": torch.zeros(41)}, sensitivity=0.5)
    more = (1 + 2**-7) / (1 + 2**-8)  # the allowance for floating point in float32
    wide = ClippedSum({n: v.double() for n, v in total.params.items()}, sensitivity=0.5 * more)
    noisy, exact = (gaussian.add_noise(one, 2.0, stream(3)) for one in (total, wide))
    for name in ("a", "b"):
        assert noisy[name].dtype == torch.float32
        assert torch.equal(noisy[name], exact[name].float())


@pytest.mark.parametrize("size", [0, 1, 2, 7, 40])
def test_any_number_of_draws(size):
    total = ClippedSum({"a": torch.zeros(size), "b": torch.zeros(3, 1)}, sensitivity=1.0)
    noisy = gaussian.add_noise(total, 1.0, stream(0))
    assert noisy["a"].shape == (size,)
    assert noisy["b"].shape == (3, 1)
    assert len(torch.cat([noisy["a"], noisy["b"][:, 0]]).unique()) == size + 3


def largest_correlation(draws):
    """Between neighbours and their sizes."""
    first, second = draws[::2], draws[1::2]
    kinds = (np.positive, np.abs, np.square)
    return max(abs(np.corrcoef(f(first), g(second))[0, 1]) for f in kinds for g in kinds)


def test_neighbouring_draws_are_independent_of_each_other():
    """Of the Box-Muller transform, which they shared a radius in, a wrong radius shows in both."""
    limit = STANDARD_ERRORS / math.sqrt(100_000)
    draws = noise_samples(gaussian.add_noise)
    assert largest_correlation(draws) <= limit
    radius = np.hypot(draws[::2], draws[1::2])
    assert largest_correlation(draws * np.repeat(radius, 2)) > limit


@pytest.mark.parametrize("wrong", [scaled(2 / 3), scaled(3 / 2), scaled(0.98), repeated])
def test_other_noise_is_caught(wrong):
    with pytest.raises(AssertionError):
        check_noise(noise_samples(wrong), SCALE)


@pytest.mark.parametrize("rate", [1e-6, 0.01, 0.3, 1.0])
def test_a_padded_batch_is_the_exact_one_in_another_shape(rate):
    data = blobs(500)
    for seed in range(20):
        exact = exact_batch(data, rate, stream(seed))
        padded = padded_batch(data, rate, stream(seed))
        assert len(padded.examples) == padded_size(500, rate)
        assert torch.equal(padded.examples.inputs[padded.mask], exact.examples.inputs)
        assert torch.equal(padded.examples.targets[padded.mask], exact.examples.targets)


def test_a_batch_without_room_is_taken_whole(monkeypatch):
    monkeypatch.setattr(sampling, "padded_size", lambda size, rate: 32)
    batches = [padded_batch(blobs(500), 0.07, stream(seed)) for seed in range(50)]
    sizes = [len(poisson_sample(500, 0.07, stream(seed))) for seed in range(50)]
    assert [int(batch.count()) for batch in batches] == sizes
    assert [len(batch) for batch in batches] == [max(32, size) for size in sizes]
    assert min(sizes) < 32 < max(sizes)


def test_overflow_is_next_to_impossible():
    for size, rate in ((4000, 0.128), (60_000, 0.0043), (60_000, 0.034), (100, 0.01)):
        room = padded_size(size, rate)
        assert stats.binom.sf(room, size, rate) < 2e-6
        assert room < 1.5 * size * rate + 64  # most of the work is not for rows that do not count


@pytest.mark.parametrize("shape", [(), (0,), (7,), (5, 4), (3, 7)])
def test_noise_is_the_streams_draw_scaled_and_added_once(shape):
    value = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    total = ClippedSum({"w": value}, sensitivity=0.5)
    found = gaussian.add_noise(total, 3.0, stream(1))["w"]
    draws = stream(1).normal(value.numel())
    assert found.shape == shape
    assert found.dtype == torch.float32
    grid = gaussian.noise_deviation(total, 3.0) / DEVIATION
    whole = (value.reshape(-1).double() / grid).round() + (draws * DEVIATION).round()
    assert torch.equal(found.reshape(-1), (whole * grid).float())
    assert len(draws.unique()) == len(draws)


def test_rounding_a_sum_to_the_grid_is_part_of_its_sensitivity():
    """The deviation s solves s = multiplier (sensitivity + s sqrt(n) / steps of a deviation)."""
    total = ClippedSum({"w": torch.zeros(1_000_000)}, sensitivity=0.5)
    for multiplier in (1.0, 30.0):
        s, bound = gaussian.noise_deviation(total, multiplier), 0.5 * (1 + 2**-7)
        assert s >= multiplier * (bound + s * 1000 / DEVIATION)
        assert s <= multiplier * (bound + s * 1000.0 * 1.002 / DEVIATION)
        there = gaussian.noise_deviation(total, torch.tensor(multiplier, dtype=torch.float64))
        assert float(there) == pytest.approx(s, rel=1e-12)
    assert gaussian.noise_deviation(total, 1.0) < 0.5 * 1.0013 * (1 + 2**-7)
    part = replace(total, params={"w": torch.zeros(10)}, whole=1_000_000)  # a shard of it
    assert gaussian.noise_deviation(part, 30.0) == s


def rounded_sums_move_by_less_than_the_noise_allows():
    """Two sums at the sensitivity from each other, all of whose numbers rounding moves apart.

    Without the allowance for floating point, which is meant for something else.
    """
    count, multiplier = 10_000, 300.0
    total = ClippedSum({"w": torch.zeros(count, dtype=torch.float64)}, sensitivity=1.0)
    s = gaussian.noise_deviation(total, multiplier)
    grid, part = s / DEVIATION, 1 / math.sqrt(count)
    one = torch.full((count,), 0.499 * grid, dtype=torch.float64)  # rounded down
    other = torch.full((count,), (math.floor(part / grid) + 0.501) * grid, dtype=torch.float64)
    assert float((other - one).norm()) <= 1.0
    moved = float(((other / grid).round() - (one / grid).round()).norm()) * grid
    assert multiplier * moved <= s / (1 + gaussian.FLOATING_POINT[torch.float64])


def rounding_left_out(patch):
    def wrong(total, multiplier):
        return multiplier * total.sensitivity * (1 + gaussian.FLOATING_POINT[torch.float64])

    patch.setattr(gaussian, "noise_deviation", wrong)


test_law_holds, test_mutant_is_killed = law_tests(
    [Mutant(rounded_sums_move_by_less_than_the_noise_allows, rounding_left_out)]
)


def test_noise_that_is_too_coarse_for_so_many_weights_is_refused():
    total = ClippedSum({"w": torch.zeros(1_000_000)}, sensitivity=0.5)
    with pytest.raises(InvalidInputError, match="train at most 159"):
        gaussian.add_noise(total, 1000.0, stream())
