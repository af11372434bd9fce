"""Sums of inner products along a kernel, on a CPU, for convolutions that keep the size of a map.

To add up parts of a map that lie apart is slow: few numbers follow one another in memory. A whole
map that is shifted lies in one piece. Numbers that a shift takes over an edge are multiplied by
zero. (Where one of them is not finite, so is what is added to itself: the example counts as zero
either way.)
"""

from functools import lru_cache

import torch
from torch import Tensor

from dpsur.core.gradients.rules.window import Window

_SHAPES_REMEMBERED = 256


def shifting_pays(grams: Tensor, window: Window, dimension: int) -> bool:
    """Whether the map has as many places as pixels in a dimension, each at the kernel's centre."""
    size, margin = window.sizes[dimension], window.margins[dimension]
    return (
        grams.device.type == "cpu"
        and size % 2 == 1
        and window.strides[dimension] == 1
        and 2 * margin == window.dilations[dimension] * (size - 1)
        and margin < grams.shape[1 + dimension]
    )


def summed_by_shifts(grams: Tensor, window: Window, dimension: int) -> Tensor:
    """Inner products (examples, *map, *map), added up along one dimension of the kernel."""
    flat, sides = grams.flatten(1), tuple(grams.shape[1:])
    total = flat.clone()
    dilation, margin = window.dilations[dimension], window.margins[dimension]
    for offset in range(dilation, margin + 1, dilation):
        inside = _inside(sides, dimension, offset, grams.dtype)
        by = flat.shape[1] - len(inside)
        total[:, :-by].addcmul_(flat[:, by:], inside)
        total[:, by:].addcmul_(flat[:, :-by], inside)
    return total.view_as(grams)


@lru_cache(_SHAPES_REMEMBERED)
def _inside(sides: tuple[int, ...], dimension: int, offset: int, dtype: torch.dtype) -> Tensor:
    """One for pairs of pixels that stay on the map if both move on by `offset`, zero for others.

    Pairs are numbered as they lie in memory; those so near the end that none could are left out.
    Moved back by as much, the same pairs are counted from the other end.
    """
    axes = dimension, dimension + len(sides) // 2
    stays = torch.ones(sides, dtype=dtype)
    for axis in axes:
        stays.narrow(axis, sides[axis] - offset, offset).zero_()
    by = sum(offset * stays.stride(axis) for axis in axes)
    return stays.flatten()[: stays.numel() - by]
