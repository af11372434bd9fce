"""A kernel that slides over an input."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from dpsur.per_example.contributions import MEMORY_COST


@dataclass(frozen=True)
class Window:
    """A sliding kernel, and the zeros around its input in every dimension."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    margins: tuple[int, ...]

    def padded(self, inputs: Tensor) -> Tensor:
        if not any(self.margins):
            return inputs
        return F.pad(inputs, [m for margin in reversed(self.margins) for m in (margin, margin)])


# Patches are copies of the input, kernel-size times as large. They are made for a few examples at a
# time: on a CPU as many as stay in its cache, elsewhere as many as keep it busy, but no more than
# twice what the input takes, so that a step needs about the memory of a step without privacy.
_NUMBERS_ON_CPU = 2**19
_LEAST_ELSEWHERE, _MOST_ELSEWHERE = 3 * 2**18, 2**26
# What is kept about a data set is computed once, beside a batch that fills the memory.
_NUMBERS_FOR_TABLES = 2**20


def examples_at_once(inputs: Tensor, numbers: int) -> int:
    """How many examples to work on at a time if each takes so many numbers of scratch memory."""
    limit = _NUMBERS_ON_CPU
    if inputs.device.type != "cpu":
        limit = min(_MOST_ELSEWHERE, max(_LEAST_ELSEWHERE, 2 * inputs.numel()))
    return max(1, limit // numbers)


def patches(padded: Tensor, window: Window, *, inside: bool) -> Tensor:
    """All patches of padded inputs, in the shape (examples, channels * kernel, positions).

    With `inside` the rows are ordered as (kernel, channels), else as (channels, kernel). Made of
    strided views and one copy: `F.unfold` launches a kernel per example on CUDA.
    """
    dimensions = len(window.sizes)
    views = padded.movedim(1, -1).contiguous().movedim(-1, 1) if inside else padded
    for dimension in range(dimensions):
        size, dilation = window.sizes[dimension], window.dilations[dimension]
        views = views.unfold(2 + dimension, dilation * (size - 1) + 1, window.strides[dimension])
        if dilation > 1:
            views = views[..., ::dilation]
    kernel = range(2 + dimensions, 2 + 2 * dimensions)
    positions = range(2, 2 + dimensions)
    rows = len(padded), padded.shape[1] * prod(window.sizes)
    if inside:
        ordered = views.permute(0, *positions, *kernel, 1)
        return ordered.reshape(rows[0], -1, rows[1]).mT
    return views.permute(0, 1, *kernel, *positions).reshape(*rows, -1)


def instantiate(inputs: Tensor, outputs: Tensor, window: Window, groups: int) -> Tensor:
    """Gradient of the kernel for every example, in the shape (examples, out, in, *kernel)."""
    examples, channels = inputs.shape[:2]
    height, positions = outputs.shape[1], prod(outputs.shape[2:])
    kernel = prod(window.sizes)
    width = channels * kernel
    # channels innermost, where that copies more numbers that lie together
    together = channels * (window.sizes[-1] if window.dilations[-1] == 1 else 1)
    inside = groups == 1 and together > (outputs.shape[-1] if window.strides[-1] == 1 else 1)
    rows = inputs.new_empty(examples * groups, height // groups, width // groups)
    flat = outputs.reshape(examples * groups, height // groups, positions)
    step = examples_at_once(inputs, width * positions)
    for start in range(0, examples, step):
        seen = patches(window.padded(inputs[start : start + step]), window, inside=inside)
        some = slice(start * groups, (start + len(seen)) * groups)
        if groups > 1:
            seen = seen.view(-1, width // groups, positions)
        torch.bmm(flat[some], seen.mT, out=rows[some])
    if inside:
        return rows.view(examples, height, *window.sizes, channels).movedim(-1, 2)
    return rows.view(examples, height, channels // groups, *window.sizes)


def inner_products_cost(channels: int, spatial: torch.Size, window: Window, places: int) -> int:
    """Multiplications for inner products between the patches of one example, the cheaper way."""
    return min(_costs(channels, spatial, window, places))


def inner_products(inputs: Tensor, window: Window, places: int) -> Tensor:
    """Inner products between all patches of an input (examples, positions, positions).

    Patches overlap. Where that is cheaper, the inner products between single pixels are taken once,
    and those of patches are sums of them along the kernel, one dimension after the other.
    """
    if not _sharing_pays(inputs, window, places):
        seen = patches(window.padded(inputs), window, inside=True)
        return torch.bmm(seen.mT, seen)
    flat, spatial = inputs.flatten(2), inputs.shape[2:]
    grams = torch.bmm(flat.mT, flat).view(-1, *spatial, *spatial)
    for dimension in range(len(spatial)):
        grams = _sum_along(grams, window, dimension)
    return grams.reshape(len(inputs), places, places)


def _sum_along(grams: Tensor, window: Window, dimension: int) -> Tensor:
    """Add up inner products of pixels along one dimension of the kernel; margins hold zeros."""
    axes = 1 + dimension, 1 + dimension + len(window.sizes)
    size, stride = window.sizes[dimension], window.strides[dimension]
    dilation, margin = window.dilations[dimension], window.margins[dimension]
    places = (grams.shape[axes[0]] + 2 * margin - dilation * (size - 1) - 1) // stride + 1
    terms = sorted(_terms(grams, window, dimension, places), key=lambda term: -term[1])
    # a term for all places is what the others are added to, which spares making zeros
    if terms and terms[0][1] == places:
        total = terms.pop(0)[2].clone(memory_format=torch.contiguous_format)
    else:
        shape = [places if axis in axes else length for axis, length in enumerate(grams.shape)]
        total = grams.new_zeros(shape)
    for first, count, part in terms:
        into = total
        for axis in axes:
            into = into.narrow(axis, first, count)
        into.add_(part)
    return total


def _terms(
    grams: Tensor, window: Window, dimension: int, places: int
) -> Iterator[tuple[int, int, Tensor]]:
    """For every entry of the kernel in one dimension: the first place, how many, and the pixels."""
    axes = 1 + dimension, 1 + dimension + len(window.sizes)
    stride, dilation = window.strides[dimension], window.dilations[dimension]
    margin, length = window.margins[dimension], grams.shape[axes[0]]
    for offset in range(-margin, dilation * window.sizes[dimension] - margin, dilation):
        first = max(0, -(offset // stride))  # the first place whose pixel is not in the margin
        end = min(places, (length - 1 - offset) // stride + 1)
        if first >= end:
            continue
        part = grams
        for axis in axes:
            part = part.narrow(axis, first * stride + offset, (end - first - 1) * stride + 1)
            if stride > 1:
                part = part[(slice(None),) * axis + (slice(None, None, stride),)]
        yield first, end - first, part


def inner_products_of(inputs: Tensor, window: Window, places: int) -> Tensor:
    step = max(1, _NUMBERS_FOR_TABLES // scratch_of(inputs, window, places))
    pieces = torch.split(inputs, step)
    return torch.cat([inner_products(piece, window, places) for piece in pieces])


def scratch_of(inputs: Tensor, window: Window, places: int) -> int:
    if _sharing_pays(inputs, window, places):
        return 2 * max(prod(inputs.shape[2:]), places) ** 2
    return places * max(places, inputs.shape[1] * prod(window.sizes))


def _sharing_pays(inputs: Tensor, window: Window, places: int) -> bool:
    direct, shared = _costs(inputs.shape[1], inputs.shape[2:], window, places)
    return shared < direct


def _costs(channels: int, spatial: torch.Size, window: Window, places: int) -> tuple[int, int]:
    """Multiplications for patches themselves, and for sums of products between pixels."""
    direct = places * channels * prod(window.sizes) * (places + MEMORY_COST)
    shared = prod(spatial) ** 2 * (channels + MEMORY_COST // 4 * (1 + sum(window.sizes)))
    return direct, shared
