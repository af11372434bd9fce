"""Operations that PyTorch batches wrongly are not batched: such code runs one record at a time.

All operations of torch's own list of samples (`torch.testing._internal`) were compared with a loop,
forward and backward, with one and with several batched arguments: these came out wrong.
"""

import sys
import types
import unittest
from unittest import mock

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpsur.per_example import record_level
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


RECORDS = 3


def op_samples():
    """Operations with arguments, of the list that PyTorch's own tests are made of."""
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if (
            torch.float64 not in op.supported_dtypes("cpu")
            or "rand" in op.name
            or "empty" in op.name
        ):
            continue
        torch.manual_seed(0)
        for number, sample in enumerate(op.sample_inputs("cpu", torch.float64)):
            arguments = sample.input, sample.args, sample.kwargs
            if op.name == "squeeze" and not (sample.args or sample.kwargs):
                continue  # keeps the dimension of a batch, as it would for several records
            if all(
                value.layout is torch.strided and value.dtype is not torch.float32
                for value in tensors_of(arguments)
            ):
                yield f"{op.name}.{op.variant_test_name} {number}", op.op, arguments


def tensors_of(tree):
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def with_tensors(tree, tensors):
    leaves, structure = tree_flatten(tree)
    following = iter(tensors)
    return tree_unflatten(
        [next(following) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure
    )


def apart(value, record):
    """A record's own version, in the same domain."""
    return value * (1 - 0.1 * record) if value.is_floating_point() else value


def called(op, arguments):
    first, args, kwargs = arguments
    found = tensors_of((op(first, *args, **kwargs),))
    return [value for value in found if value.layout is torch.strided and value.numel()]


def gradients(outputs, leaves):
    total = sum(
        (value * torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view_as(value)).sum()
        for value in outputs
        if value.is_floating_point() and value.requires_grad
    )
    if not isinstance(total, torch.Tensor):
        return [torch.zeros_like(leaf) for leaf in leaves]
    return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)


def one_by_one(op, arguments, batched):
    """Outputs and gradients of each record, by the operation itself."""
    outputs, slopes = [], []
    for record in range(RECORDS):
        tensors = [value.detach().clone() for value in tensors_of(arguments)]
        for place in batched:
            tensors[place] = apart(tensors[place], record).requires_grad_()
        found = called(
            op,
            with_tensors(
                arguments, [value * 1 if value.requires_grad else value for value in tensors]
            ),
        )
        outputs.append(found)
        slopes.append(gradients(found, [tensors[place] for place in batched]))
    return outputs, slopes


def at_once(op, arguments, batched):
    """The same, as a private step calls the operation."""
    holder = nn.Linear(1, 1)
    records = RecordFunction((holder,), dict(holder.named_parameters()))
    constants = [value.detach().clone() for value in tensors_of(arguments)]
    leaves = [
        torch.stack([apart(constants[place], record) for record in range(RECORDS)]).requires_grad_()
        for place in batched
    ]

    def function(given):
        tensors = [value.clone() for value in constants]
        for place, value in zip(batched, given, strict=True):
            tensors[place] = value * 1
        return called(op, with_tensors(arguments, tensors))

    _, found = records.run(function, leaves, RECORDS)
    outputs = [[value[record] for value in found] for record in range(RECORDS)]
    whole = gradients([value for several in outputs for value in several], leaves)
    slopes = [[value[record] for value in whole] for record in range(RECORDS)]
    return outputs, slopes, records.by_construction


def differences(name, op, arguments):
    """Where records at once come to something else than records alone.

    One argument, the first or the last, belongs to records, or all of them do.
    """
    places = [i for i, v in enumerate(tensors_of(arguments)) if v.is_floating_point()]
    for batched in {tuple(places[:1]), tuple(places[-1:]), tuple(places)} - {()}:
        try:
            with torch.random.fork_rng(), mock.patch("torch.manual_seed") as seeded:
                expected = one_by_one(op, arguments, batched)
                again = one_by_one(op, arguments, batched)
            torch.testing.assert_close(again, expected, equal_nan=True)
        except Exception:  # draws at random, or does not take these arguments
            continue
        if seeded.called:  # draws at random, and is seeded for that
            continue
        try:
            outputs, slopes, fast = at_once(op, arguments, batched)
        except Exception:  # refused, by name or by PyTorch: nothing wrong comes of it
            continue
        if not fast:
            continue
        try:
            torch.testing.assert_close((outputs, slopes), expected, equal_nan=True)
        except AssertionError as error:
            yield f"{name} {batched}: {str(error).splitlines()[0]}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_all_operations_that_pytorch_batches():
    """Forward and backward, with one and with all arguments of records."""
    wrong, count = [], 0
    for name, op, arguments in op_samples():
        wrong += differences(name, op, arguments)
        count += 1
    assert count > 3000
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wrong_rules_would_be_found(monkeypatch):
    monkeypatch.setattr(record_level, "WRONG", frozenset())
    names = ("select_scatter", "index_fill")
    found = [
        line
        for name, op, arguments in op_samples()
        if name.startswith(names)
        for line in differences(name, op, arguments)
    ]
    assert all(any(line.startswith(name) for line in found) for name in names)
