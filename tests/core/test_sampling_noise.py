import math

import numpy as np
import pytest
import torch
from scipy import stats

from dpsur.core.gradients import ClippedSum
from dpsur.core.noise import add_gaussian
from dpsur.core.sampling import poisson_sample
from tests.statistics import STANDARD_ERRORS, assert_frequency, assert_normal
from tests.statistics import assert_standard_deviation as assert_scale


def batches(sample, size=50, rate=0.2, count=4000):
    generator = torch.Generator().manual_seed(1)
    mask = torch.zeros(count, size)
    for row in mask:
        row[sample(size, rate, generator)] = 1
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


def fixed_size(size, rate, generator):
    return torch.randperm(size, generator=generator)[: round(size * rate)]


def with_replacement(size, rate, generator):
    return torch.randint(size, (round(size * rate),), generator=generator)


def test_sampling_is_poisson():
    check_poisson(batches(poisson_sample))


@pytest.mark.parametrize("wrong", [fixed_size, with_replacement])
def test_other_sampling_is_caught(wrong):
    with pytest.raises(AssertionError):
        check_poisson(batches(wrong))


def test_rate_one_takes_every_record_and_a_tiny_rate_none():
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(poisson_sample(10, 1.0, generator), torch.arange(10))
    assert len(poisson_sample(10, 1e-12, generator)) == 0


def noise_samples(add, sensitivity=0.5, multiplier=3.0, count=200_000):
    total = ClippedSum({"a": torch.zeros(count // 2), "b": torch.zeros(count // 2)}, sensitivity)
    noisy = add(total, multiplier, torch.Generator().manual_seed(2))
    return torch.cat([noisy["a"], noisy["b"]]).double().numpy()


def check_noise(samples, scale):
    assert_scale(samples, scale)
    assert_normal(samples, scale)
    half = samples.size // 2
    correlation = np.corrcoef(samples[:half], samples[half:])[0, 1]
    assert abs(correlation) <= STANDARD_ERRORS / math.sqrt(half)


def test_noise_is_gaussian_and_scaled_from_the_reported_sensitivity():
    check_noise(noise_samples(add_gaussian), 1.5)


def scaled(factor):
    return lambda total, multiplier, generator: add_gaussian(total, multiplier * factor, generator)


def repeated(total, multiplier, generator):
    noisy = add_gaussian(total, multiplier, generator)
    return {"a": noisy["a"], "b": noisy["a"]}


@pytest.mark.parametrize("wrong", [scaled(2 / 3), scaled(3 / 2), scaled(0.98), repeated])
def test_other_noise_is_caught(wrong):
    with pytest.raises(AssertionError):
        check_noise(noise_samples(wrong), 1.5)
