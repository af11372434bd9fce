import math

import numpy as np
import pytest
import torch
from scipy import stats

from dpsur.mechanism import gaussian
from dpsur.mechanism import gaussian as sampling
from dpsur.mechanism import streams as random_numbers
from dpsur.mechanism.gaussian import exact_batch, padded_batch, padded_size, poisson_sample
from dpsur.mechanism.streams import BATCH
from dpsur.per_example import ClippedSum
from tests.conftest import blobs, stream
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
    check_noise(noise_samples(gaussian.add_noise), 1.5)


def scaled(factor):
    return lambda total, multiplier, drawn: gaussian.add_noise(total, multiplier * factor, drawn)


def repeated(total, multiplier, drawn):
    noisy = gaussian.add_noise(total, multiplier, drawn)
    return {"a": noisy["a"], "b": noisy["a"]}


@pytest.mark.parametrize(("dtype", "end"), [(torch.float64, 106), (torch.float32, 48)])
def test_the_noise_ends_where_the_uniform_draws_do(dtype, end, monkeypatch):
    """Draws in float32, the control, have no tail: 24 bits reach sqrt(48 ln 2) = 5.77."""
    draws = torch.zeros(12, dtype=torch.float64)
    draws[::2] = 1 - torch.finfo(dtype).eps / 2  # as large as the radius gets, and no angle
    random_numbers._box_muller(draws, 1.0, draws)
    monkeypatch.setattr(random_numbers, "_on_cpu", lambda *_, normal: draws)
    total = ClippedSum({"a": torch.zeros(10)}, sensitivity=0.5)
    found = gaussian.add_noise(total, 2.0, stream())["a"]
    assert float(found[0]) == pytest.approx(math.sqrt(end * math.log(2)), rel=1e-6)
    assert (float(found[0]) > 8) is (dtype is torch.float64)


def in_float32(total, multiplier, drawn):
    scale = multiplier * total.sensitivity
    return {
        name: value + scale * drawn.normal(value.numel()).float().view(value.shape)
        for name, value in total.params.items()
    }


@pytest.mark.parametrize(("add", "fine"), [(gaussian.add_noise, True), (in_float32, False)])
def test_noise_is_drawn_in_float64_whatever_the_type_of_the_sum(add, fine):
    """Rounded once, after it was scaled: numbers that were drawn in float32 come back as such."""
    total = ClippedSum({"a": torch.zeros(5000), "b": torch.zeros(41)}, sensitivity=0.5)
    wide = ClippedSum({name: v.double() for name, v in total.params.items()}, sensitivity=0.5)
    noisy, exact = (add(one, 2.0, stream(3)) for one in (total, wide))
    found, drawn = (torch.cat([one["a"], one["b"]]) for one in (noisy, exact))
    assert found.dtype == torch.float32
    assert torch.equal(found, drawn.float())
    assert bool((drawn != drawn.float()).float().mean() > 0.99) is fine


@pytest.mark.parametrize("size", [0, 1, 2, 7, 40])
def test_any_number_of_draws(size):
    total = ClippedSum({"a": torch.zeros(size), "b": torch.zeros(3, 1)}, sensitivity=1.0)
    noisy = gaussian.add_noise(total, 1.0, stream(0))
    assert noisy["a"].shape == (size,)
    assert noisy["b"].shape == (3, 1)
    assert len(torch.cat([noisy["a"], noisy["b"][:, 0]]).unique()) == size + 3


def largest_correlation(draws):
    """Between the two draws that are made of one radius and one angle, and their sizes."""
    first, second = draws[::2], draws[1::2]
    kinds = (np.positive, np.abs, np.square)
    return max(abs(np.corrcoef(f(first), g(second))[0, 1]) for f in kinds for g in kinds)


def test_both_draws_of_a_pair_are_independent_of_each_other():
    """They share a radius. A wrong one, the control, would show in the sizes of both."""
    limit = STANDARD_ERRORS / math.sqrt(100_000)
    draws = noise_samples(gaussian.add_noise)
    assert largest_correlation(draws) <= limit
    radius = np.hypot(draws[::2], draws[1::2])
    assert largest_correlation(draws * np.repeat(radius, 2)) > limit


@pytest.mark.parametrize("wrong", [scaled(2 / 3), scaled(3 / 2), scaled(0.98), repeated])
def test_other_noise_is_caught(wrong):
    with pytest.raises(AssertionError):
        check_noise(noise_samples(wrong), 1.5)


@pytest.mark.parametrize("rate", [1e-6, 0.01, 0.3, 1.0])
def test_a_padded_batch_is_the_exact_one_in_another_shape(rate):
    data = blobs(500)
    for seed in range(20):
        exact = exact_batch(data, rate, stream(seed))
        padded = padded_batch(data, rate, stream(seed))
        assert len(padded.examples) == padded_size(500, rate)
        assert not padded.overflow
        assert torch.equal(padded.examples.inputs[padded.mask], exact.examples.inputs)
        assert torch.equal(padded.examples.targets[padded.mask], exact.examples.targets)


def test_overflow_is_told_never_cut_silently(monkeypatch):
    monkeypatch.setattr(sampling, "padded_size", lambda size, rate: 32)
    told = [bool(padded_batch(blobs(500), 0.07, stream(seed)).overflow) for seed in range(50)]
    sizes = [len(poisson_sample(500, 0.07, stream(seed))) for seed in range(50)]
    assert told == [size > 32 for size in sizes]
    assert 0 < sum(told) < 50


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
    assert torch.equal(found.reshape(-1), (1.5 * draws + value.reshape(-1)).to(torch.float32))
    assert len(draws.unique()) == len(draws)
