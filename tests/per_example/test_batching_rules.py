"""Operations that PyTorch batches wrongly are not batched: such code runs one record at a time.

All operations of torch's own list of samples (`torch.testing._internal`) were compared with a loop,
forward and backward, with one and with several batched arguments: these came out wrong.
"""

import pytest
import torch
from torch import nn
from torch.func import vmap

from dpsur.per_example.record_function import RecordFunction, Way


def scattered(rows, value):
    return torch.select_scatter(rows, value.expand(len(rows), rows.shape[2]), 1, 1)


def filled(rows, value):
    return torch.index_fill(rows, 1, torch.tensor([1]), value.sum())


class Writing(nn.Module):
    """Writes a parameter into what it computes."""

    def __init__(self, operation):
        super().__init__()
        self.layer, self.value = nn.Linear(3, 4), nn.Parameter(torch.rand(4))
        self.operation = operation

    def forward(self, x):
        return self.operation(self.layer(x), self.value).square().mean()


@pytest.mark.parametrize("operation", [scattered, filled])
def test_wrong_rules_are_not_used(operation):
    torch.manual_seed(0)
    model, x = Writing(operation).double(), torch.randn(5, 1, 2, 3, dtype=torch.float64)
    trained = dict(model.named_parameters())
    records = RecordFunction((model,), trained)
    tape, losses, _ = records.tape(model, x, 5)
    assert set(records.ways.values()) == {Way.ALONE}
    for row in range(5):
        loss = model(x[row])
        torch.testing.assert_close(losses[row], loss.detach())
        for name, gradient in zip(
            trained, torch.autograd.grad(loss, list(trained.values())), strict=True
        ):
            torch.testing.assert_close(tape.per_example(name)[row], gradient)


def test_pytorch_is_still_wrong():
    """The day this fails, the operation can be batched again."""
    rows, weights = torch.randn(3, 2, 4), torch.arange(8.0).view(2, 4)
    values = torch.randn(3, 4, requires_grad=True)

    def one(row, value):
        return torch.select_scatter(row, value, 0, 1)

    together = (vmap(one)(rows, values) * weights).sum()
    alone = sum((one(*pair) * weights).sum() for pair in zip(rows, values, strict=True))
    found, right = (torch.autograd.grad(total, values)[0] for total in (together, alone))
    assert not torch.allclose(found, right)
