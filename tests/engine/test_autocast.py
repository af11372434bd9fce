"""Autocast in a custom loop: a record moves the clipped sum by its bound, whatever is rounded."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dpsur.engine.watch import Watcher
from dpsur.errors import StepError
from dpsur.functional import process_settings
from dpsur.per_example.contributions import Factors, Products, Rows, combine
from dpsur.per_example.rules.embedding import Lookups
from tests.engine.helpers import private, without_noise

RECORDS = 1_500
ROUNDING = 1e-3


def clipped_sum(count, reduction, inside, monkeypatch):
    """Of nearly equal records, all of them in one batch: what rounds them alike adds up."""
    without_noise(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    inputs = 1 + 1e-3 * torch.randn(RECORDS, 1, 6, 6, generator=generator)
    data = TensorDataset(inputs[:count], torch.zeros(count, dtype=torch.int64))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 3)
    )
    _, model, optimizer, loader = private(
        model, data, batch_size=count, lr=1.0, loss_reduction=reduction
    )
    before = [value.detach().clone() for value in model.parameters()]
    for images, labels in loader:
        with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
            warnings.simplefilter("ignore")
            loss = F.cross_entropy(model(images).float(), labels, reduction=reduction)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        optimizer.step()
        break
    moved = [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
    return count * torch.cat([value.double().flatten() for value in moved])


def sensitivity(reduction, inside, monkeypatch):
    whole, one_less = (
        clipped_sum(count, reduction, inside, monkeypatch) for count in (RECORDS, RECORDS - 1)
    )
    return float((whole - one_less).norm())


@pytest.mark.parametrize(
    ("reduction", "inside"), [("mean", False), ("sum", False), ("mean", True), ("sum", True)]
)
def test_a_record_moves_the_sum_by_its_bound(reduction, inside, monkeypatch):
    assert sensitivity(reduction, inside, monkeypatch) <= 1 + ROUNDING


def test_with_autocast_around_norms_and_sums_it_would_move_more(monkeypatch):
    monkeypatch.setattr(process_settings, "_AUTOCAST", ())
    assert sensitivity("sum", True, monkeypatch) > 1 + ROUNDING


def test_gradients_of_a_mean_would_be_rounded_by_the_size_of_the_batch(monkeypatch):
    exact = Watcher.before_backward

    def divided(*given):
        start, rest = exact(*given)
        return 1.0, start * rest

    monkeypatch.setattr(Watcher, "before_backward", divided)
    assert sensitivity("mean", False, monkeypatch) > 1 + ROUNDING


def test_a_loss_in_half_precision_is_refused():
    _, model, _, loader = private()
    images, labels = next(iter(loader))
    loss = F.cross_entropy(model(images), labels).bfloat16()
    with pytest.raises(StepError, match=r"outputs\.float"):
        loss.backward()


@pytest.mark.parametrize("formed", [False, True])
def test_a_tied_table_with_factors_in_bfloat16(formed):
    """As a language model has it under autocast on a GPU."""
    torch.manual_seed(0)
    tokens, slopes = torch.tensor([[1, 4, 2], [3, 0, 5]]), torch.randn(2, 3, 8)
    linear = Products(torch.randn(2, 3, 8).bfloat16(), torch.randn(2, 3, 7).bfloat16())
    use = Rows(linear.per_example().bfloat16()) if formed else linear
    lookups = Lookups(tokens, slopes, 7)
    both = combine([lookups, use])
    exact = lookups.per_example() + use.per_example()
    squares = both.measure().square() if formed else both.squares
    torch.testing.assert_close(squares, exact.square().sum((1, 2)), rtol=1e-4, atol=0.0)
    factors = Factors(torch.tensor([0.5, 0.25]), None)
    total = lookups.weighted_sum(factors) + use.weighted_sum(factors)
    expected = 0.5 * exact[0] + 0.25 * exact[1]
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)
