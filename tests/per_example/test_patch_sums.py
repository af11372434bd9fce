"""Inner products of patches, summed from those of pixels."""

import pytest
import torch

from dpsur.per_example.rules.patches import Window, _sum_along, patches

# Sizes of the map, then sizes, dilations and margins of a kernel that keeps them.
KEEPING = [
    ((4, 4), (3, 3), (1, 1), (1, 1)),
    ((5, 3), (3, 1), (1, 1), (1, 0)),
    ((6, 7), (5, 3), (1, 2), (2, 2)),
    ((5,), (3,), (2,), (2,)),
    ((3, 4, 2), (3, 3, 3), (1, 1, 1), (1, 1, 1)),
]


def along_all(inputs, window):
    sides = inputs.shape[2:]
    flat = inputs.flatten(2)
    grams = torch.bmm(flat.mT, flat).view(-1, *sides, *sides)
    for dimension in range(len(sides)):
        grams = _sum_along(grams, window, dimension)
    return grams


def directly(inputs, window):
    seen = patches(window.padded(inputs), window, inside=False)
    return torch.bmm(seen.mT, seen)


@pytest.mark.parametrize(("sides", "sizes", "dilations", "margins"), KEEPING)
def test_sums_of_pixels_are_the_inner_products_of_patches(sides, sizes, dilations, margins):
    torch.manual_seed(0)
    inputs = torch.randn(3, 2, *sides, dtype=torch.float64)
    window = Window(sizes, (1,) * len(sizes), dilations, margins)
    expected = directly(inputs, window)
    torch.testing.assert_close(along_all(inputs, window).view_as(expected), expected)


def test_an_example_that_is_not_finite_leaves_the_others_alone():
    inputs, window = torch.randn(3, 2, 4, 4), Window((3, 3), (1, 1), (1, 1), (1, 1))
    expected = along_all(inputs, window)
    inputs[1, 0, 2, 3] = torch.inf
    found = along_all(inputs, window)
    assert torch.equal(found[::2], expected[::2])
    assert not found[1].isfinite().all()


@pytest.mark.parametrize(
    "window",
    [
        Window((3,), (2,), (1,), (1,)),
        Window((3,), (1,), (1,), (0,)),
        Window((2,), (1,), (1,), (1,)),
        Window((11,), (1,), (1,), (5,)),
    ],
    ids=["stride", "no margin", "even", "wider than the map"],
)
def test_kernels_of_all_kinds(window):
    inputs = torch.randn(3, 2, 5, dtype=torch.float64)
    expected = directly(inputs, window)
    torch.testing.assert_close(along_all(inputs, window).view_as(expected), expected)
