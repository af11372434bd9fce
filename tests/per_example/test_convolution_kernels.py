"""The kernels chosen for a GPU compute what the usual ones do; here they run on the CPU."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.per_example import clipped_sum
from dpsur.per_example.clipping import strategy_for
from dpsur.per_example.kernels.cuda_weight_grad import blocks_for, summed_gradient
from dpsur.per_example.rules import patches
from dpsur.per_example.rules.patches import Window
from tests.per_example.test_gradient_rules import clipped, gradients

convolution = sys.modules["dpsur.per_example.rules.convolution"]  # not the rule of that name
ROWS, BOUND = 6, 0.05
LAYERS = {
    "1d": (lambda: nn.Conv1d(3, 4, 3, padding=1), (3, 7)),
    "1d-dilated": (lambda: nn.Conv1d(3, 4, 3, padding=1, dilation=2), (3, 9)),
    "2d": (lambda: nn.Conv2d(3, 4, 3, padding=1), (3, 5, 4)),
    "2d-no-bias": (lambda: nn.Conv2d(3, 4, 3, bias=False), (3, 5, 4)),
    "2d-strided": (lambda: nn.Conv2d(3, 4, 4, stride=2), (3, 7, 6)),
    "2d-strided-large": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), (3, 12, 11)),
    "2d-uneven": (lambda: nn.Conv2d(3, 4, (3, 2), padding=(2, 0), dilation=(1, 2)), (3, 5, 6)),
    "2d-much-padded": (lambda: nn.Conv2d(3, 4, 2, padding=3), (3, 4, 4)),
    "2d-same": (lambda: nn.Conv2d(3, 4, (2, 3), padding="same"), (3, 4, 5)),
    "2d-circular": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (3, 4, 5)),
    "2d-grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (4, 5, 5)),
    "2d-wide": (lambda: nn.Conv2d(24, 32, 3, padding=1, stride=2), (24, 3, 3)),
    "3d": (lambda: nn.Conv3d(2, 3, 2, padding=1), (2, 3, 3, 2)),
    "3d-wide": (lambda: nn.Conv3d(16, 24, 2), (16, 2, 3, 3)),
}


class Behind(nn.Module):
    """A convolution whose input has a gradient, between two linear maps."""

    def __init__(self, layer, shape):
        super().__init__()
        self.before, self.layer = nn.Linear(shape[-1], shape[-1]), layer
        self.head = nn.Linear(layer(torch.zeros(1, *shape)).numel(), 3)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(torch.tanh(self.before(x)))).flatten(1))


def problem_of(name):
    build, shape = LAYERS[name]
    torch.manual_seed(2)
    model = Behind(build(), shape).double()
    examples = Examples(torch.randn(ROWS, *shape).double(), torch.randint(0, 3, (ROWS,)))
    return Problem(model, F.cross_entropy, examples)


@pytest.fixture
def as_on_a_card(monkeypatch):
    monkeypatch.setattr(convolution, "PAYS_ON", ("cpu",))
    monkeypatch.setattr(patches, "_NUMBERS_ON_CPU", 64)  # in several pieces
    monkeypatch.setattr(convolution, "_instantiate", lambda *_: False)


def check(problem):
    params = problem.initial_params()
    plan = strategy_for(problem, params, problem.train.inputs)
    assert plan.reason is None
    expected = clipped(gradients(problem, params, problem.train), BOUND)
    found = clipped_sum(problem, params, problem.train, BOUND).params
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.usefixtures("as_on_a_card")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("pays", [True, False])
def test_sums_are_the_same(name, pays, monkeypatch):
    monkeypatch.setattr(convolution, "patches_pay", lambda *_: pays)
    check(problem_of(name))


def two_convolutions():
    return Problem(
        nn.Sequential(
            nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1), nn.Flatten()
        ).double(),
        lambda output, target: (output * target).sum(),
        Examples(torch.randn(ROWS, 3, 4, 4).double(), torch.randn(ROWS, 48).double()),
    )


@pytest.mark.usefixtures("as_on_a_card")
def test_a_wrong_kernel_is_found_out(monkeypatch):
    """The control: one that is not turned round gives other gradients than the definition."""
    check(two_convolutions())
    monkeypatch.setattr(
        convolution,
        "_input_gradient",
        lambda gradient, _, weight, geometry: geometry.apply(gradient, weight.mT, None),
    )
    with pytest.raises(AssertionError, match="not close"):
        check(two_convolutions())


def like(channels, height, side):
    return torch.empty(8, channels, side, side), torch.empty(8, height, side, side)


def test_shapes_decide(monkeypatch):
    assert not convolution.patches_pay(*like(16, 32, 4))
    monkeypatch.setattr(convolution, "PAYS_ON", ("cpu",))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert convolution.patches_pay(*like(16, 32, 4))  # second layer on scattering features
    assert convolution.patches_pay(*like(128, 128, 8))  # last convolution for CIFAR-10 pixels
    assert not convolution.patches_pay(*like(64, 64, 4))
    assert not convolution.patches_pay(*like(32, 32, 32))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert convolution.patches_pay(*like(16, 32, 4))
    assert not convolution.patches_pay(*like(128, 128, 8))


SAME = Window((3, 3), (1, 1), (1, 1), (1, 1))


def test_what_blocks_leave_behind_takes_no_more_than_the_inputs():
    small = torch.empty(8192, 243, 8, 8, device="meta")
    assert blocks_for(small, 64 * 243 * 9) == 132
    wide = torch.empty(256, 2048, 4, 4, device="meta")
    assert blocks_for(wide, 128 * 2048 * 9) == 3
    assert blocks_for(wide[:1], 128 * 2048 * 9) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("channels", "height", "sides", "window"),
    [
        (81, 16, (7, 7), Window((3, 3), (2, 2), (1, 1), (1, 1))),
        (81, 32, (7, 7), Window((3, 3), (1, 1), (1, 1), (1, 1))),
        (50, 16, (6, 9), Window((2, 3), (1, 2), (1, 1), (0, 2))),
        (100, 16, (4, 4), Window((1, 1), (1, 1), (1, 1), (0, 0))),
        (243, 64, (8, 8), SAME),  # in three parts
        (200, 48, (5, 8), Window((3, 2), (1, 1), (1, 1), (1, 1))),
        (128, 128, (8, 8), SAME),
    ],
)
@pytest.mark.parametrize("examples", [1, 17, 300])
def test_the_summing_kernel_gives_the_usual_gradient(channels, height, sides, window, examples):
    device = torch.device("cuda")
    inputs = torch.randn(examples, channels, *sides, device=device, dtype=torch.float64)
    geometry = convolution.Geometry(window.strides, window.margins, (1, 1), 1)
    weight = torch.randn(height, channels, *window.sizes, device=device, dtype=torch.float64)
    outputs = torch.randn_like(geometry.apply(inputs, weight, None))
    exact = geometry.backward(outputs, inputs, weight, [False, True, False])[1]
    found = summed_gradient(inputs.float(), outputs.float(), window)
    assert found is not None
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-3 * examples**0.5)
