"""Targets that depend on other records of the batch are refused when a record returns."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from dpsur.errors import StepError
from tests.engine.helpers import private


def numbers(count=60):
    made = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 6, generator=made), torch.randn(count, generator=made))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))


def loop(loss, data=None, order=None, passes=4, **options):
    _, net, optimizer, loader = private(
        model(), numbers() if data is None else data, seed=1, **options
    )
    for _ in range(passes):
        for x, y in loader:
            if order is not None:
                rows = order(x)
                x, y = x[rows], y[rows]
            optimizer.zero_grad()
            loss(net(x), y).backward()
            optimizer.step()


COUPLED = {
    "centred": lambda o, y: F.mse_loss(o, y - y.mean()),
    "scaled": lambda o, y: F.mse_loss(o, y / y.std()),
    "largest": lambda o, y: F.binary_cross_entropy_with_logits(o, (y >= y.median()).float()),
    "squares by hand": lambda o, y: ((o - (y - y.mean())) ** 2).mean(),
    "products by hand": lambda o, y: ((y - y.mean() - o) * (y - y.mean() - o)).mean(),
    "absolute values": lambda o, y: ((y - y.mean()) - o).abs().mean(),
    "huber": lambda o, y: F.smooth_l1_loss(o, y - y.mean()),
}


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("most", [None, 5])
def test_targets_from_other_records_are_refused(name, most):
    with pytest.raises(StepError, match="computed from other records"):
        loop(COUPLED[name], max_physical_batch_size=most)


def test_also_where_the_loop_splits_a_batch():
    _, net, optimizer, loader = private(model(), numbers(), seed=1)

    def run():
        for _ in range(4):
            for x, y in loader:
                y = y - y.mean()
                for one, target in zip(x.split(3), y.split(3), strict=True):
                    F.mse_loss(net(one), target).backward()
                optimizer.step()

    with pytest.raises(StepError, match="computed from other records"):
        run()


ALONE = {
    "as it is": F.mse_loss,
    "of another scale": lambda o, y: F.mse_loss(o, (y - 0.3) / 1.7),
    "of another type": lambda o, y: F.binary_cross_entropy_with_logits(o, (y > 0).float()),
    "by hand": lambda o, y: ((o - y.exp()) ** 2).mean(),
    "logarithms": lambda o, y: F.mse_loss(o, y.abs().log()),
}


@pytest.mark.parametrize("name", ALONE)
def test_targets_of_each_record_pass(name):
    loop(ALONE[name])


CLASSES = {
    "probabilities": lambda o, y: F.cross_entropy(o, F.one_hot(y, 3) * 0.9 + y.float().mean()),
    "gathered": lambda o, y: -o.log_softmax(1).gather(1, (y + y.sum())[:, None] % 3).mean(),
}


@pytest.mark.parametrize("name", CLASSES)
def test_classes_from_other_records_are_refused(name):
    _, net, optimizer, loader = private(seed=1)

    def run():
        for _ in range(4):
            for x, y in loader:
                CLASSES[name](net(x), y).backward()
                optimizer.step()

    with pytest.raises(StepError, match="computed from other records"):
        run()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_targets_that_are_not_finite(value):
    """Such a record counts as zero, and is the same one when it returns."""
    x, y = numbers().tensors
    loop(F.mse_loss, TensorDataset(x, torch.where(torch.arange(60) % 3 == 0, value, y)))


@pytest.mark.parametrize("way", ["reversed", "sorted"])
def test_the_order_within_a_batch_is_free(way):
    order = {
        "reversed": lambda x: torch.arange(len(x)).flip(0),
        "sorted": lambda x: x[:, 0].argsort(),
    }[way]
    loop(F.mse_loss, order=order)


class Noisy(Dataset):
    """Draws other targets each time, each record by itself."""

    def __len__(self):
        return 60

    def __getitem__(self, row):
        x, y = numbers()[row]
        return x, y + torch.randn(())


def test_a_data_set_may_draw_its_targets():
    loop(F.mse_loss, Noisy())


def test_two_records_with_one_input_have_targets_of_their_own():
    x, y = numbers().tensors
    loop(F.mse_loss, TensorDataset(torch.ones_like(x), y))


def test_a_teacher_that_learns_goes_to_the_criterion():
    def run(loss):
        engine, net, optimizer, loader = private(model(), numbers(), seed=1, criterion=nn.MSELoss())
        loss = engine.criterion if loss is None else loss
        for _ in range(4):
            for x, _ in loader:
                with torch.no_grad():
                    target = 0.9 * net(x)
                loss(net(x), target).backward()
                optimizer.step()

    run(None)
    with pytest.raises(StepError, match=r"engine\.criterion"):
        run(F.mse_loss)
