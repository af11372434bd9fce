import math

import pytest
import torch

from dpsur.errors import InvalidInputError
from dpsur.features.statistics import channel_statistics, clipped_rows_sum, private_quantile
from dpsur.privacy.events import Gaussian
from tests.conftest import stream
from tests.statistics import assert_standard_deviation


def features(count=500, seed=0):
    spread = torch.tensor([1.0, 2.0, 0.5]).reshape(1, 3, 1, 1)
    return spread * torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(seed)) + 1.0


def test_statistics_are_right_without_much_noise():
    data = features()
    found = channel_statistics(
        data, mean_bound=100.0, square_bound=1000.0, noise_multiplier=1e-6, stream=stream()
    )
    flat = data.double().transpose(0, 1).reshape(3, -1)
    assert torch.allclose(found.mean, flat.mean(1), atol=1e-5)
    assert torch.allclose(found.variance, flat.var(1, unbiased=False), atol=1e-4)
    assert torch.allclose(found.deviation, found.variance.sqrt())


def test_both_vectors_are_charged():
    found = channel_statistics(
        features(), mean_bound=1.0, square_bound=1.0, noise_multiplier=8.0, stream=stream()
    )
    assert found.events == (Gaussian(8.0), Gaussian(8.0))


def test_noise_is_scaled_from_the_bound():
    data = torch.zeros(10, 4000, 1)
    found = channel_statistics(
        data, mean_bound=2.0, square_bound=1.0, noise_multiplier=3.0, stream=stream()
    )
    assert_standard_deviation((found.mean * 10).numpy(), 6.0)


def most_it_moves(total, rows, extra):
    """How far one record moves the sum before noise, for the worst of a few records."""
    base = total(rows).params["sum"]
    return max(
        float((total(torch.cat([rows, x[None]])).params["sum"] - base).norm()) for x in extra
    )


def neighbours():
    rows = torch.cat([torch.full((10, 2), 0.1), torch.full((10, 2), 5.0)]).double()
    extra = torch.tensor([[1e3, 0.0], [0.0, 0.0], [-5.0, 5.0], [math.nan, 1.0]]).double()
    return rows, extra


def check_sensitivity(total):
    rows, extra = neighbours()
    assert most_it_moves(total, rows, extra) <= total(rows).sensitivity * (1 + 1e-12)


def test_one_record_moves_the_sum_by_at_most_the_bound():
    check_sensitivity(lambda rows: clipped_rows_sum(rows, 1.0))


def test_a_median_bound_read_off_the_records_is_caught():
    """The bound itself moves with a record, and every clipped vector with it."""

    def median_bound(rows):
        finite = rows.nan_to_num(nan=0.0)
        return clipped_rows_sum(rows, float(finite.norm(dim=1).median()))

    with pytest.raises(AssertionError):
        check_sensitivity(median_bound)


def test_a_private_quantile_is_near_the_real_one():
    values = torch.rand(20_000, generator=torch.Generator().manual_seed(0)) * 10
    bound, event = private_quantile(
        values, 0.5, least=0.01, most=100.0, noise_multiplier=5.0, stream=stream(1)
    )
    assert event == Gaussian(5.0)
    assert 4.5 < bound < 6.5


def test_a_private_quantile_depends_on_no_single_record_for_certain():
    """With one record either way, both answers keep a positive probability."""
    values = torch.tensor([1.0] * 50 + [10.0] * 50)
    seen = {
        private_quantile(
            values[:count], 0.5, least=0.1, most=100.0, noise_multiplier=2.0,
            stream=stream(seed), steps=8,
        )[0]
        for count in (99, 100)
        for seed in range(40)
    }  # fmt: skip
    assert len(seen) > 1


@pytest.mark.parametrize(
    "change",
    [{"mean_bound": 0.0}, {"square_bound": -1.0}, {"noise_multiplier": math.nan}],
)
def test_bad_statistics(change):
    arguments = {"mean_bound": 1.0, "square_bound": 1.0, "noise_multiplier": 1.0, **change}
    with pytest.raises(InvalidInputError, match=next(iter(change))):
        channel_statistics(features(), stream=stream(), **arguments)


def test_bad_quantiles():
    with pytest.raises(InvalidInputError, match="quantile"):
        private_quantile(
            torch.ones(3), 1.5, least=0.1, most=1.0, noise_multiplier=1.0, stream=stream()
        )


def test_a_channel_that_drowns_in_noise_is_not_blown_up():
    """Division by a variance far below its noise made channels a thousand times too large."""
    data = features()
    data[:, 2] *= 1e-4
    found = channel_statistics(
        data, mean_bound=5.0, square_bound=30.0, noise_multiplier=8.0, stream=stream()
    )
    assert found.variance_noise == pytest.approx(8.0 * 30.0 / len(data))
    assert (found.deviation >= found.variance_noise**0.5).all()
