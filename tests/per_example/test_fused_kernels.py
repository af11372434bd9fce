"""Kernels in Triton: on a GPU as they are, without one in Triton's interpreter where it works.

TRITON_INTERPRET=1 python -m pytest tests/per_example/test_fused_kernels.py
"""

import os
from copy import deepcopy
from dataclasses import replace
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad

from dpsur.functional.problem import Objective
from dpsur.functional.records import Examples
from dpsur.per_example import clipped_sum
from dpsur.per_example import contributions as norms
from dpsur.per_example.contributions import InnerNorms
from dpsur.per_example.kernels import fused
from dpsur.per_example.rules import recurrent
from dpsur.per_example.rules.patches import Window, instantiate

# the interpreter computes in NumPy, which warns of what is not finite
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BOUND = 1e-3  # far below every gradient, so that every record is clipped
ROUNDING = 1e-5


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """A device for which there are kernels."""
    pytest.importorskip("triton", reason="needs Triton")
    if request.param == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
        monkeypatch.setattr(fused, "DEVICE", "cpu")
    return torch.device(request.param)


def rounded(values):
    """To TF32, of ordinary numbers."""
    return ((values.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


@pytest.mark.parametrize(
    ("channels", "height", "side", "window"),
    [
        (3, 5, 7, Window((3, 3), (1, 1), (1, 1), (1, 1))),
        (4, 70, 8, Window((3, 3), (2, 2), (1, 1), (1, 1))),
        (5, 6, 9, Window((3, 3), (1, 1), (2, 2), (2, 2))),
        (8, 4, 6, Window((1, 1), (1, 1), (1, 1), (0, 0))),
        (20, 130, 6, Window((2, 3), (1, 2), (1, 1), (0, 1))),
    ],
)
def test_gradients_are_those_of_rounded_factors(channels, height, side, window, device):
    torch.manual_seed(0)
    inputs = torch.randn(3, channels, side, side, device=device)
    weight = torch.zeros(height, channels, *window.sizes, device=device)
    shape = F.conv2d(inputs, weight, None, window.strides, window.margins, window.dilations).shape
    outputs = torch.randn(shape, device=device)
    rows, squares = fused.rounded_gradients(inputs, outputs, window)
    exact = instantiate(rounded(inputs).double(), rounded(outputs).double(), window, 1)
    torch.testing.assert_close(rows.double(), exact, rtol=1e-4, atol=1e-4)
    # what is measured is what will be added up, not the exact gradient
    own = rows.double().flatten(1).square().sum(1)
    torch.testing.assert_close(squares.double(), own, rtol=1e-6, atol=0.0)


GROUPED = [
    (6, 6, 6, Window((3, 3), (1, 1), (1, 1), (1, 1))),  # depthwise
    (2, 6, 4, Window((3, 3), (2, 2), (1, 1), (1, 1))),
    (3, 30, 60, Window((1, 5), (1, 2), (1, 1), (0, 2))),
    (1, 20, 34, Window((1, 3), (1, 1), (1, 2), (0, 0))),
]


def factors_of(channels, height, window, groups, device, kind=torch.float32):
    """Inputs and output gradients of a convolution."""
    torch.manual_seed(0)
    inputs = torch.randn(3, channels, 9, 9, device=device)
    weight = torch.zeros(height, channels // groups, *window.sizes, device=device)
    given = window.strides, window.margins, window.dilations, groups
    outputs = torch.randn_like(F.conv2d(inputs, weight, None, *given))
    return inputs, outputs.to(kind)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("groups", "channels", "height", "window"), GROUPED)
def test_gradients_of_groups_and_along_one_dimension(
    groups, channels, height, window, kind, device
):
    inputs, outputs = factors_of(channels, height, window, groups, device, kind)
    rows, squares = fused.rounded_gradients(inputs, outputs, window, groups)
    seen = rounded(inputs) if kind == torch.float32 else inputs.to(kind)
    slopes = rounded(outputs) if kind == torch.float32 else outputs
    exact = instantiate(seen.double(), slopes.double(), window, groups)
    assert rows.dtype == kind
    # Triton's interpreter does not round to the nearest number of bfloat16
    bound = 1e-4 if kind == torch.float32 else 0.02 if device.type == "cuda" else 0.2
    torch.testing.assert_close(rows.double(), exact, rtol=bound, atol=bound)
    own = rows.double().flatten(1).square().sum(1)
    torch.testing.assert_close(squares.double(), own, rtol=1e-6, atol=0.0)


DEPTHWISE = [
    (6, 6, Window((3, 3), (1, 1), (1, 1), (1, 1))),
    (4, 12, Window((7, 7), (1, 1), (1, 1), (3, 3))),
    (5, 5, Window((2, 3), (2, 1), (1, 2), (0, 2))),
    (3, 6, Window((1, 5), (1, 2), (1, 1), (0, 2))),
]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("channels", "height", "window"), DEPTHWISE)
def test_gradients_of_kernels_that_see_one_channel(channels, height, window, kind, device):
    inputs, outputs = factors_of(channels, height, window, channels, device, kind)
    inputs = inputs.to(kind)
    rows, squares = fused.depthwise_gradients(inputs, outputs, window)
    exact = instantiate(inputs.double(), outputs.double(), window, channels)
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows.double(), exact, rtol=1e-5, atol=1e-4)
    own = rows.double().flatten(1).square().sum(1)
    torch.testing.assert_close(squares.double(), own, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001])
def test_rounding_keeps_what_is_not_a_number(bits, device):
    """Added to the bits of a NaN, half a unit can turn it into zero: the record would count."""
    inputs = torch.zeros(2, 1, 4, 4, dtype=torch.int32)
    inputs[0, 0, 1, 1] = bits
    window = Window((1, 1), (1, 1), (1, 1), (0, 0))
    outputs = torch.ones(2, 1, 4, 4, device=device)
    seen = inputs.view(torch.float32).to(device)
    squares = fused.rounded_gradients(seen, outputs, window)[1]
    assert squares.isfinite().tolist() == [False, True]


def test_rows_without_a_factor_are_not_read(device):
    torch.manual_seed(0)
    for count, width in ((37, 300), (1, 5), (9, 1000)):
        rows, factors = torch.randn(count, width), torch.rand(count)
        exact = factors.double() @ rows.double()
        rows, factors = (
            torch.cat([rows, rows[:1] * torch.nan]),
            torch.cat([factors, torch.zeros(1)]),
        )
        found = fused.weighted_rows(rows.to(device), factors.to(device))
        torch.testing.assert_close(found.double().cpu(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("positions", "width", "height"), [(5, 20, 3), (70, 33, 40), (130, 9, 64)])
def test_norms_from_factors(positions, width, height, device, monkeypatch):
    torch.manual_seed(0)
    inputs = torch.randn(3, positions, width, device=device)
    outputs = torch.randn(3, positions, height, device=device)
    outputs[1] *= 1e-19  # whose squares vanish
    found = InnerNorms.of_factors(inputs, outputs)
    exact = (outputs.double().mT @ inputs.double()).flatten(1).square().sum(1)
    torch.testing.assert_close(found.squares[::2].double(), exact[::2], rtol=1e-5, atol=0.0)
    assert (found.squares[1] > 0).item()
    monkeypatch.setattr(norms, "product_norms", lambda *_: None)
    expected = InnerNorms.of_factors(inputs, outputs)
    torch.testing.assert_close(found.errors[::2], expected.errors[::2], rtol=1e-4, atol=0.0)
    outputs[2, -1, -1] = torch.nan
    monkeypatch.undo()
    monkeypatch.setattr(fused, "DEVICE", device.type)
    assert InnerNorms.of_factors(inputs, outputs).squares.isnan().tolist() == [False, False, True]


def test_sums_of_normalisations(device):
    torch.manual_seed(0)
    inputs, slopes = torch.randn(2, 3, 8, 5, 7, device=device)
    seen, means, rates = torch.native_group_norm(inputs, None, None, 3, 8, 35, 4, 1e-5)
    scale, shift = fused.channel_sums(inputs, means, rates, slopes)
    torch.testing.assert_close(scale, (slopes * seen).sum((2, 3)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(shift, slopes.sum((2, 3)), rtol=1e-4, atol=1e-5)
    inputs, slopes = torch.randn(2, 3, 21, 70, device=device)
    seen, means, rates = torch.native_layer_norm(inputs, [70], None, None, 1e-5)
    scale, shift = fused.position_sums(inputs, means, rates, slopes)
    torch.testing.assert_close(scale, (slopes * seen).sum(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(shift, slopes.sum(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("directions", [1, 2])
def test_cells_are_those_of_pytorch(directions, device, monkeypatch):
    torch.manual_seed(0)
    shapes = [(6, 3, 28), (28, 7), (3, 7), (3, 7)]  # gates, weight, state, cell
    given = [torch.randn(directions, *shape, device=device) for shape in shapes]
    upstream = torch.randn(directions, 6, 3, 7, device=device)
    found = []
    for kind in (device.type, "nowhere"):
        monkeypatch.setattr(fused, "DEVICE", kind)
        leaves = [value.clone().requires_grad_() for value in given]
        gates, weight, *first = leaves
        states, last = recurrent.LstmRecurrence.apply(gates, weight.detach(), *first, [])
        ((states * upstream).sum() + last.square().sum()).backward()
        found.append([states, last, *(leaf.grad for leaf in (gates, *first))])
    tolerance = 5e-3 if device.type == "cuda" else 1e-5  # the recurrence may be rounded to TF32
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


class Residual(nn.Module):
    """Convolutions and normalisations as residual networks have them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(4, 8)
        self.second = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.last = nn.Linear(16, 3)

    def forward(self, images):
        seen = torch.relu(self.norm(self.first(images)))
        return self.last(torch.relu(self.second(seen)).mean((2, 3)))


class SmallMaps(nn.Module):
    """Convolutions with many channels on small maps, one of them used twice, and in groups."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 36, 3, padding=1, stride=2)
        self.again = nn.Conv2d(36, 36, 3, padding=1)
        self.depthwise = nn.Conv2d(36, 36, 3, groups=36, padding=1)
        self.wide = nn.Conv2d(36, 40, 3, padding=1, bias=False)
        self.last = nn.Linear(40, 3)

    def forward(self, images):
        seen = torch.tanh(self.first(images))
        seen = torch.tanh(self.again(torch.tanh(self.again(seen))))
        return self.last(torch.tanh(self.wide(self.depthwise(seen))).mean((2, 3)))


class Sequence(nn.Module):
    """A layer norm and a recurrence."""

    def __init__(self):
        super().__init__()
        self.norm, self.lstm, self.last = nn.LayerNorm(6), nn.LSTM(6, 5), nn.Linear(5, 3)

    def forward(self, sequence):
        return self.last(self.lstm(self.norm(sequence).transpose(0, 1))[0].mean(0))


MODELS = {
    "residual": (Residual, (3, 12, 12)),
    "small maps": (SmallMaps, (3, 6, 6)),
    "sequence": (Sequence, (7, 6)),
}


@pytest.fixture(params=MODELS)
def setting(request, device):
    torch.manual_seed(0)
    build, shape = MODELS[request.param]
    model = build().to(device)
    examples = Examples(torch.randn(6, *shape, device=device), torch.arange(6, device=device) % 3)
    params = {name: value.detach() for name, value in model.named_parameters()}
    return Objective(model, F.cross_entropy), params, examples


def reference(objective, params, examples, bound):
    """The definition, in double precision on the CPU."""
    model = deepcopy(objective.model).cpu().double()
    params = {name: value.cpu().double() for name, value in params.items()}
    examples = Examples(examples.inputs.cpu().double(), examples.targets.cpu())

    def loss(params, input_, target):
        output = functional_call(model, params, (input_.unsqueeze(0),))
        return F.cross_entropy(output, target.unsqueeze(0))

    rows = [
        grad(loss)(params, input_, target)
        for input_, target in zip(examples.inputs, examples.targets, strict=True)
    ]
    total = {name: torch.zeros_like(value) for name, value in params.items()}
    for row in rows:
        size = torch.stack([value.square().sum() for value in row.values()]).sum().sqrt()
        for name, value in row.items():
            total[name] += value * min(1.0, bound / float(size))
    return total


def test_the_clipped_sum_is_the_reference(setting):
    objective, params, examples = setting
    found = clipped_sum(objective, params, examples, 0.5).params
    found = {name: value.cpu().double() for name, value in found.items()}
    expected = reference(objective, params, examples, 0.5)
    gap = torch.stack([(found[n] - expected[n]).square().sum() for n in params]).sum().sqrt()
    size = torch.stack([value.square().sum() for value in expected.values()]).sum().sqrt()
    assert gap <= 3e-3 * size  # products are rounded to TF32


def passes_the_bound(objective, params, examples):
    """By how much the worst record passes the clip bound, relative to it."""
    sizes = []
    for row in range(len(examples)):
        only = torch.arange(len(examples), device=examples.targets.device) == row
        part = clipped_sum(objective, params, examples, BOUND, mask=only).params
        size = torch.stack([value.double().square().sum() for value in part.values()]).sum()
        sizes.append(float(size.sqrt()) / BOUND - 1)
    return max(sizes)


def test_no_record_passes_the_clip_bound(setting):
    assert passes_the_bound(*setting) <= ROUNDING


@pytest.mark.parametrize("setting", ["small maps"], indirect=True)
def test_norms_of_what_is_not_rounded_would_pass_it(setting, monkeypatch):
    """The control: sums of rounded factors, norms of those that are not."""
    sliding = import_module("dpsur.per_example.rules.convolution").Sliding
    measure = sliding.measure
    monkeypatch.setattr(sliding, "measure", lambda self: measure(replace(self, rounds=False)))
    assert passes_the_bound(*setting) > ROUNDING


@pytest.mark.gpu
@pytest.mark.parametrize("setting", MODELS, indirect=True)
def test_no_record_passes_it_in_bfloat16(setting):
    objective, params, examples = setting
    objective = replace(objective, bf16=True)
    assert passes_the_bound(objective, params, examples) <= ROUNDING
    found = clipped_sum(objective, params, examples, 0.5).params
    expected = reference(objective, params, examples, 0.5)
    gap = torch.stack([(found[n].cpu() - expected[n]).square().sum() for n in params]).sum().sqrt()
    size = torch.stack([value.square().sum() for value in expected.values()]).sum().sqrt()
    assert gap <= 0.1 * size


def test_records_that_are_not_finite_add_nothing(setting):
    objective, params, examples = setting
    kept = torch.arange(len(examples), device=examples.targets.device) != 2
    expected = clipped_sum(objective, params, examples, BOUND, mask=kept).params
    examples.inputs[2] = torch.nan
    found = clipped_sum(objective, params, examples, BOUND).params
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-8)


@pytest.mark.gpu
def test_a_pass_leaves_no_memory_behind():
    objective = Objective(Residual().cuda(), F.cross_entropy)
    params = {name: value.detach() for name, value in objective.model.named_parameters()}
    examples = Examples(torch.randn(64, 3, 12, 12).cuda(), (torch.arange(64) % 3).cuda())
    sizes = []
    for _ in range(4):
        clipped_sum(objective, params, examples, BOUND)
        sizes.append(torch.cuda.memory_allocated())
    assert sizes[1:] == sizes[1:2] * 3
