"""The scattering transform against another implementation, and what must not change it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dpsur.errors import InvalidInputError
from dpsur.features import scattering
from dpsur.features import scattering as filters
from dpsur.features.scattering import Scattering2d

FIXTURE = Path(__file__).parent.parent / "fixtures" / "scattering.npz"
CASES = ["grey_28", "colour_32", "oblong", "three_scales"]
TOLERANCE = 1e-5


def stored(case):
    with np.load(FIXTURE) as arrays:
        inputs, outputs = (
            torch.from_numpy(arrays[f"{case}_{part}"]) for part in ("inputs", "outputs")
        )
        return inputs, outputs.flatten(1, 2), [int(n) for n in arrays[f"{case}_arguments"]]


def images(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gap(one, other):
    return (one - other).abs().max().item()


@pytest.mark.parametrize("case", CASES)
def test_it_agrees_with_another_implementation(case):
    inputs, outputs, arguments = stored(case)
    ours = Scattering2d(*arguments)(inputs)
    assert ours.shape == outputs.shape
    assert ours.dtype == torch.float32
    assert gap(ours, outputs) < TOLERANCE


def test_the_comparison_notices_small_faults(monkeypatch):
    inputs, outputs, arguments = stored("grey_28")
    ours = Scattering2d(*arguments)(inputs)
    assert gap(ours.roll(1, dims=1), outputs) > 100 * TOLERANCE  # another order of the paths
    monkeypatch.setattr(filters, "_PI", np.pi)
    assert gap(Scattering2d(*arguments)(inputs), outputs) > TOLERANCE
    monkeypatch.undo()
    monkeypatch.setattr(scattering, "lowest", lambda spectra, factor, axes: 1.0001 * spectra)
    assert gap(Scattering2d(*arguments)(inputs), outputs) > TOLERANCE


@pytest.mark.parametrize(("size", "channels", "shape"), [(28, 1, (81, 7, 7)), (32, 3, (243, 8, 8))])
def test_the_shapes_of_the_paper(size, channels, shape):
    transform = Scattering2d(size, size)
    assert transform(images(2, channels, size, size)).shape == (2, *shape)
    assert transform(images(0, channels, size, size)).shape == (0, *shape)


def test_channels_are_transformed_by_themselves_and_in_order():
    colour, transform = images(2, 3, 16, 16), Scattering2d(16, 16)
    alone = [transform(colour[:, [channel]]) for channel in range(3)]
    assert gap(transform(colour), torch.cat(alone, dim=1)) < 1e-6


def test_a_record_has_its_features_in_any_company(monkeypatch):
    batch, transform = images(7, 2, 16, 20), Scattering2d(16, 20)
    together = transform(batch)
    assert gap(transform(batch.flip(0)).flip(0), together) < 1e-6
    assert gap(transform(batch[3:4]), together[3:4]) < 1e-6
    monkeypatch.setattr(scattering, "_NUMBERS_PER_THREAD", 1)  # one plane at a time
    assert transform._planes_at_once(torch.device("cpu")) == 1
    assert gap(transform(batch), together) < 1e-6


def test_single_precision_is_enough():
    batch = images(2, 1, 28, 28)
    assert gap(Scattering2d(28, 28)(batch), Scattering2d(28, 28).double()(batch.double())) < 1e-5


def test_a_constant_image_has_its_average_and_nothing_else():
    features = Scattering2d(16, 16)(torch.full((1, 1, 16, 16), 0.7))
    assert gap(features[:, 0], torch.tensor(0.7)) < 1e-4
    assert features[:, 1:].abs().max() < 1e-6


def test_features_follow_the_angle_of_the_stripes():
    """Stripes along one axis excite the wavelets across them, and others when turned."""
    rows = torch.arange(32.0).reshape(1, 1, 32, 1).expand(1, 1, 32, 32)
    stripes = torch.sin(0.75 * np.pi * rows)
    energies = Scattering2d(32, 32)(stripes)[0, 1:9].mean((1, 2))
    turned = Scattering2d(32, 32)(stripes.mT)[0, 1:9].mean((1, 2))
    assert energies.argmax() == 3  # the angle 0
    assert turned.argmax() == 7  # a quarter turn from it
    assert energies.max() > 10 * energies[7]


def test_gradients_reach_the_pixels_of_a_blank_image():
    blank = torch.zeros(1, 1, 16, 16, requires_grad=True)
    Scattering2d(16, 16)(blank).sum().backward()
    assert blank.grad.isfinite().all()


def test_nothing_is_trained_or_saved():
    transform = Scattering2d(16, 16)
    assert not list(transform.parameters())
    assert not transform.state_dict()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((30, 28), "height that is a multiple of 4"),
        ((28, 4), "at least 8, got 4"),
        ((28, 28, 0), "scales"),
        ((28, 28, 2, 0), "angles"),
    ],
)
def test_sizes_that_cannot_be_are_refused(arguments, words):
    with pytest.raises(InvalidInputError, match=words):
        Scattering2d(*arguments)


@pytest.mark.parametrize("shape", [(2, 28, 28), (2, 1, 32, 32), (2, 80)])
def test_other_inputs_are_refused_by_their_shape(shape):
    with pytest.raises(InvalidInputError, match=str(shape[-1])):
        Scattering2d(28, 28)(torch.zeros(shape))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_card_agrees_too(case):
    inputs, outputs, arguments = stored(case)
    ours = Scattering2d(*arguments).cuda()(inputs.cuda())
    assert gap(ours.cpu(), outputs) < TOLERANCE
