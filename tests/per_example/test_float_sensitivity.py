"""What a record moves a sum of machine numbers by, and the bound that noise is scaled by."""

import itertools
import math

import pytest
import torch
from torch import nn

from dpsur.mechanism.gaussian import FLOATING_POINT
from dpsur.per_example.api import clipped_sum

BOUND = 0.1
WIDTH = 6


class Bilinear(nn.Module):
    """A record's gradient is the sum over positions of its targets times its inputs, exactly."""

    def __init__(self, dtype):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2, bias=False, dtype=dtype)

    def forward(self, x):
        return self.layer(x)


def slope(outputs, targets):
    return (outputs.float() * targets).sum().to(outputs.dtype)


def records(kind, count, dtype, seed=0):
    """Inputs and slopes of records that others may be made of."""
    draw = torch.Generator().manual_seed(seed)
    positions = 2 if kind == "cancelling" else 1
    x = torch.randn(count, positions, WIDTH, generator=draw)
    slopes = torch.randn(count, positions, 2, generator=draw)
    if kind == "huge":
        x, slopes = x * 1e18, slopes * 1e12
    elif kind == "tiny":
        x, slopes = x * 1e-18, slopes * 1e-18
    elif kind == "huge and tiny":
        x = x * 10.0 ** torch.randint(-18, 18, (count, 1, 1), generator=draw)
    elif kind == "aligned":  # large partial sums, in which a record's last bits are lost
        x, slopes = torch.ones(count, 1, WIDTH), torch.ones(count, 1, 2)
        slopes = slopes * (1 + 1e-3 * torch.rand(count, 1, 1, generator=draw))
    elif kind == "cancelling":
        x[:, 1], slopes[:, 1] = x[:, 0] * (1 + 1e-6), -slopes[:, 0]
    return x.to(dtype), slopes.to(dtype)


def summed(x, slopes, dtype):
    with torch.no_grad():
        model = Bilinear(dtype)
        nn.init.zeros_(model.layer.weight)
    found = clipped_sum(model, slope, x, slopes, BOUND).params["layer.weight"]
    return found.double()


def moved_by(kind, other, dtype, place, count=61):
    """How far one record moves the sum of others, in units of the clip norm."""
    x, slopes = records(kind, count, dtype, seed=place)
    mine = records(other, 1, dtype, seed=100 + place)
    if mine[0].shape[1] != x.shape[1]:
        pad = lambda v: torch.cat([v, torch.zeros_like(v)], 1) if v.shape[1] == 1 else v  # noqa: E731
        (x, slopes), mine = (pad(x), pad(slopes)), tuple(pad(value) for value in mine)
    both = [
        torch.cat([value[:place], one, value[place:]])
        for value, one in zip((x, slopes), mine, strict=True)
    ]
    return float((summed(*both, dtype) - summed(x, slopes, dtype)).norm()) / BOUND


KINDS = ("ordinary", "huge", "tiny", "huge and tiny", "aligned", "cancelling")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "other"), list(itertools.product(KINDS, KINDS)))
def test_no_record_moves_a_sum_by_more_than_is_charged(kind, other, dtype):
    """Wherever it stands: huge, tiny and cancelling records, among such."""
    for place in (0, 30, 61):
        assert moved_by(kind, other, dtype, place) <= 1 + FLOATING_POINT[dtype]


@pytest.mark.parametrize("kind", ["ordinary", "huge and tiny", "aligned", "cancelling"])
@pytest.mark.parametrize("count", [1_000, 8_191])
def test_nor_among_many_records(kind, count):
    """Beyond what is proved in float32."""
    most = 1 + FLOATING_POINT[torch.float32]
    for place in (0, count // 3, count):
        assert moved_by(kind, kind, torch.float32, place, count) <= most


def test_without_the_allowance_records_do():
    """So it is needed: the clip norm, over the real numbers, is exceeded by rounding."""
    assert any(moved_by("aligned", "aligned", torch.float32, place) > 1 for place in range(8))


def test_every_small_sum_of_records_moves_by_less_than_is_charged():
    """All batches of up to three records from a set with the ends of the numbers in it."""
    ends = [0.0, 1.0, -1.0, 1e-45, 1.1754944e-38, 3.4e38, -3.4e38, math.inf, math.nan]
    x = torch.tensor(ends)[:, None, None].expand(-1, 1, WIDTH).contiguous()
    slopes = torch.ones(len(ends), 1, 2)
    for size in (0, 1, 2):
        for others in itertools.combinations_with_replacement(range(len(ends)), size):
            rest = list(others)
            before = summed(x[rest], slopes[rest], torch.float32) if rest else 0.0
            for mine in range(len(ends)):
                after = summed(x[[*rest, mine]], slopes[[*rest, mine]], torch.float32)
                moved = float((after - before).norm()) / BOUND
                assert moved <= 1 + FLOATING_POINT[torch.float32]


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 195), (torch.float64, 2_000_000)])
def test_the_page_states_for_how_many_records_the_bound_is_proved(dtype, most):
    """Any order of so many additions, twice, and norms that are a fifth of a percent too small."""
    unit = torch.finfo(dtype).eps / 2
    gamma = (most + 4) * unit / (1 - (most + 4) * unit)
    norms = math.sqrt(1 + 4e-3) * (1 + 2**14 * unit)
    assert norms * (1 + 2 * gamma * most) <= 1 + FLOATING_POINT[dtype]
