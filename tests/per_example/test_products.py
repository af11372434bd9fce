"""Products on tensor cores: what is put together here in PyTorch, on a GPU in a kernel."""

from copy import deepcopy
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpsur.functional.problem import Objective
from dpsur.functional.process_settings import precision, tf32_is_forbidden
from dpsur.functional.records import Examples
from dpsur.per_example import clipped_sum
from dpsur.per_example.kernels import fused, products
from dpsur.per_example.kernels.products import launches_are_captured


def rounded(values):
    bits = ((values.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return torch.where(values.isnan(), values, bits)


def split_matrix(
    values,
    parts,
    factors=None,
    *,
    length,
    first=0,
    positions=1,
    scaled=False,
    transposed=False,
    dtype=torch.float32,
    room=0,
):
    """What the kernel computes."""
    values = values.float()
    rounded_to = rounded if dtype == torch.float32 else lambda some: some.bfloat16().float()
    if factors is not None:
        each = factors[(first + torch.arange(len(values))) // positions].unsqueeze(1)
        values = torch.where(each != 0, values * each if scaled else values, 0.0)
    values = values.mT if transposed else values
    values = F.pad(values, (0, length - values.shape[1]))
    large = rounded_to(values)
    small = rounded_to(values - large)
    found = torch.cat([small if rest else large for rest in parts], 1).to(dtype)
    return F.pad(found, (0, 0, 0, max(0, room - len(found))), value=torch.nan)


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(products, "split_matrix", split_matrix)
    monkeypatch.setattr(products, "pays", lambda *_: True)
    monkeypatch.setattr(products, "DEVICE", "cpu")
    monkeypatch.setattr(products, "_LONGEST", 8)
    monkeypatch.setattr(products, "_AT_ONCE", 64)
    monkeypatch.setattr(products, "_PART_AT_ONCE", 0)
    monkeypatch.setattr(products, "_SIDE", 4)
    monkeypatch.setattr(products, "_SHORTEST", 4)


@pytest.fixture
def device():
    """A GPU where the kernel pays."""
    if torch.cuda.get_device_capability() not in products.CAPABILITIES:
        pytest.skip("PyTorch's product is as fast here")
    pytest.importorskip("triton", reason="needs Triton")
    return torch.device("cuda")


def matrices(rows, inner, columns, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    one, other = (
        torch.randn(rows, inner, generator=generator),
        torch.randn(inner, columns, generator=generator),
    )
    return one.to(device), other.to(device), torch.randn(columns, generator=generator).to(device)


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


def transposed(matrix):
    return matrix.mT.contiguous().mT


def check_products(one, other, bias, bound):
    exact = one.double() @ other.double()
    assert error(products.product(one, other), exact) < bound
    assert error(products.product(transposed(one), transposed(other)), exact) < bound
    assert error(products.product(one, other, bias), exact + bias.double()) < bound


def weighted(outputs, inputs, factors, **options):
    found = factors.new_empty(outputs.shape[1], inputs.shape[1])
    assert products.weighted_product(outputs, inputs, factors, found, **options)
    twice = found.clone()
    assert products.weighted_product(outputs, inputs, factors, twice, add=True, **options)
    torch.testing.assert_close(twice, 2 * found)
    return found


def check_sums(one, other, bound, positions):
    """Rows without a factor are not read, the others are multiplied by theirs once."""
    left, right = one.mT.contiguous(), other.clone()
    factors = torch.linspace(0.1, 1.0, len(right) // positions).to(one)
    factors[1] = 0.0
    each = factors.repeat_interleave(positions).double()
    exact = one.double() @ (each.unsqueeze(1) * other.double())
    hidden = each == 0
    left[hidden], right[hidden] = torch.nan, torch.nan
    assert error(weighted(left, right, factors), exact) < bound
    assert error(weighted(right, left, factors), exact.mT) < bound
    left, right = left.bfloat16(), right.bfloat16()
    kept = torch.where(hidden.unsqueeze(1), 0.0, right.double()) * each.unsqueeze(1)
    exact = torch.where(hidden.unsqueeze(1), 0.0, left.double()).mT @ kept
    found = weighted(left, right, factors)
    assert error(found, exact) < max(bound, 4e-6)  # the 16 bits of two numbers of bfloat16


@pytest.mark.parametrize("shape", [(12, 20, 16), (7, 8, 9), (5, 33, 3), (1, 1, 1)])
def test_three_products_make_one(shape, emulated):
    one, other, bias = matrices(*shape)
    check_products(one, other, bias, 1e-6)


@pytest.mark.parametrize(("shape", "positions"), [((12, 20, 16), 4), ((3, 9, 10), 1)])
def test_weighted_sums_do_not_read_rows_without_a_factor(shape, positions, emulated):
    one, other, _ = matrices(*shape)
    check_sums(one, other, 1e-6, positions)


def test_a_rest_is_needed(emulated, monkeypatch):
    """The control: without it products have the error of TF32."""
    one, other, _ = matrices(12, 20, 16)
    monkeypatch.setattr(products, "_LEFT", (False,))
    monkeypatch.setattr(products, "_RIGHT", (False,))
    assert error(products.product(one, other), one.double() @ other.double()) > 1e-5


class Frozen(nn.Module):
    """A layer that is not trained between two that are, for vectors and for sequences.

    With `products` there is also a weight of the shape (in, out), used without a layer.
    """

    def __init__(self, products):
        super().__init__()
        self.first, self.last = nn.Linear(6, 9), nn.Linear(9, 4)
        self.frozen = nn.Linear(9, 9).requires_grad_(False)
        if products:
            self.weight, self.bias = nn.Parameter(torch.randn(9, 9)), nn.Parameter(torch.randn(9))
        self.products = products

    def forward(self, inputs):
        states = torch.relu(self.frozen(torch.relu(self.first(inputs))))
        if self.products:
            flat = torch.addmm(self.bias, states.view(-1, 9), self.weight)
            states = torch.tanh(flat.view(states.shape) @ self.weight)
        states = self.last(states)
        return states.mean(1) if states.dim() == 3 else states


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("shape", [(5, 7, 6), (5, 6)])
def test_clipped_sums_are_the_same(shape, others, emulated, monkeypatch):
    torch.manual_seed(0)
    objective = Objective(Frozen(others), F.cross_entropy)
    params = {n: v.detach() for n, v in objective.model.named_parameters() if v.requires_grad}
    inputs = torch.randn(shape)
    inputs[3] = torch.nan
    examples = Examples(inputs, torch.arange(5) % 4)
    kept = torch.tensor([True, True, False, True, True])
    found = clipped_sum(objective, params, examples, 0.1, mask=kept).params
    monkeypatch.setattr(products, "pays", lambda *_: False)
    expected = clipped_sum(objective, params, examples, 0.1, mask=kept).params
    for name, value in expected.items():
        assert value.isfinite().all()
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)


def test_tf32_is_forbidden_by_switching_it_off(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert not tf32_is_forbidden()
    with precision(tf32=False):  # our own, around norms and sums
        assert not tf32_is_forbidden()
        with precision(tf32=True):
            assert not tf32_is_forbidden()
    with precision(tf32=False, whole_run=True):
        assert tf32_is_forbidden()
        with precision(tf32=False), precision(tf32=True):
            assert tf32_is_forbidden()
    assert not tf32_is_forbidden()


@pytest.mark.gpu
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("shape", [(6, 5), (40, 64), (100, 1030)])
def test_the_kernel_splits(shape, is_transposed, device):
    values = matrices(*shape, 3)[0] * 10.0 ** torch.randint(-8, 9, shape)
    values[2], values[-3:] = torch.nan, torch.nan
    factors = torch.linspace(0.5, 1.0, len(values) // 3 + 1)
    factors[-2:] = 0.0
    length = values.shape[not is_transposed] + 3
    kinds = torch.float32, torch.bfloat16
    for parts, kind in product(((True, False, False), (False, True), (False,)), kinds):
        for given in ({}, {"first": 1}, {"first": 1, "scaled": True}, {"dtype": kind}):
            rule = {"length": length, "positions": 3, "transposed": is_transposed, **given}
            some = factors if given else None
            expected = split_matrix(values, parts, some, **rule)
            found = fused.split_matrix(
                values.cuda(), parts, None if some is None else some.cuda(), **rule
            )
            torch.testing.assert_close(found.cpu(), expected, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1024, 768, 1100), (512, 1025, 777), (640, 5000, 640)])
def test_products_on_tensor_cores(shape, device):
    one, other, bias = matrices(*shape, device)
    bound = 4e-9 * shape[1] + 2e-6
    with launches_are_captured():
        check_products(one, other, bias, bound)
        check_sums(one, other, bound, 1)


@pytest.mark.gpu
def test_a_linear_layer_on_tensor_cores(device):
    torch.manual_seed(0)
    layer = nn.Linear(700, 900).cuda().requires_grad_(False)
    x, slopes = torch.randn(5, 300, 700).cuda().requires_grad_(), torch.randn(5, 300, 900).cuda()
    assert products.fast_linear(x, layer.weight, layer.bias) is None  # too small, launch by launch
    with launches_are_captured():
        found = products.linear(x, layer.weight, layer.bias)
    assert type(found.grad_fn).__name__ == "_LinearBackward"
    exact = deepcopy(layer).double()(x.double())  # itself would change under the graph
    assert error(found.detach(), exact.detach()) < 1e-5
    with launches_are_captured():
        (one,) = torch.autograd.grad(found, x, slopes)
    (other,) = torch.autograd.grad(exact, x, slopes.double())
    assert error(one, other.double()) < 1e-5
