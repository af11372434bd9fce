"""Norms of per-example gradients, from what layers know about them.

A layer hands in either norms or, where gradients are never formed, inner products. What remains to
be done for the latter is done for all layers at once: for small networks the number of operations
counts, not their size.

Norms are never too small. A record is free to choose numbers whose squares vanish in floating point
and whose products with other numbers do not: every norm has what can be lost that way added to it,
which leaves ordinary norms as they are, to the last bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpsur.functional.process_settings import widen
from dpsur.per_example.kernels.fused import inner_norms, product_norms
from dpsur.per_example.kernels.products import batched_product

# From this part of a squared norm on its error is taken into account.
TOLERATED = 4e-3


@dataclass(frozen=True)
class InnerNorms:
    """Squared norms of sum_t g_t x_t^T as sums of inner products, one per example.

    `errors` bounds what rounding may have done to them: an error of x_s.x_t, relative to
    |x_s| |x_t|, is multiplied by g_s.g_t, and the other way round. `terms` is how many products
    were added up for one entry: the widths of x and g and the number of positions t, together.
    """

    squares: Tensor
    errors: Tensor
    terms: int

    @staticmethod
    def of(inner: Tensor, outer: Tensor, terms: int) -> "InnerNorms":
        """From x_s.x_t and g_s.g_t: |sum_t g_t x_t^T|^2 = sum_st (x_s.x_t)(g_s.g_t).

        Let d, h be the widths, T the positions and m the smallest normal number. Underflow takes at
        most d m from x_s.x_t, h m from g_s.g_t and m from their product: from the whole sum at most
        m (d (sum_t |g_t|)^2 + h (sum_t |x_t|)^2 + T^2), but for terms in m^2. The squares of sums
        are at most T sum_t |g_t|^2 and T sum_t |x_t|^2, and (d + h) T <= terms^2 / 4. This is added
        here; m T^2, and what vanishes on the way, is left to `whole_norms`.
        """
        lost = lost_to_underflow(terms**2, inner.dtype) ** 2
        found = inner_norms(inner, outer, lost, rounding(terms, inner.dtype))
        if found is not None:
            return InnerNorms(*found, terms)
        squares = (inner * outer).sum((1, 2))
        inputs, outputs = inner.diagonal(dim1=1, dim2=2), outer.diagonal(dim1=1, dim2=2)
        squares.add_((inputs + outputs).sum(1), alpha=lost)
        scale = _between(inner, outputs) + _between(outer, inputs)
        return InnerNorms(squares, scale.mul_(rounding(terms, inner.dtype)), terms)

    @staticmethod
    def of_factors(inputs: Tensor, outputs: Tensor) -> "InnerNorms":
        """From x_t and g_t, (examples, positions, width) each."""
        terms = inputs.shape[2] + outputs.shape[2] + inputs.shape[1]
        kind = widen(inputs[:0]).dtype
        lost = lost_to_underflow(terms**2, kind) ** 2
        found = product_norms(inputs, outputs, lost, rounding(terms, kind))
        if found is not None:
            return InnerNorms(*found, terms)
        inner = batched_product(inputs, inputs.mT)
        return InnerNorms.of(inner, batched_product(outputs, outputs.mT), terms)

    @staticmethod
    def concatenate(parts: "Sequence[InnerNorms]") -> "InnerNorms":
        """Of several groups of examples."""
        if len(parts) == 1:
            return parts[0]
        return InnerNorms(
            torch.cat([part.squares for part in parts]),
            torch.cat([part.errors for part in parts]),
            parts[0].terms,
        )


Measure = Tensor | InnerNorms


def whole_norms(measures: Sequence[Measure], entries: int) -> Tensor:
    """Norm of every example's whole gradient, whose disjoint parts were measured.

    `entries` is the number of parameters. What underflow took from the parts, squares of entries in
    norms and squares of whole positions in inner products, is added once: norms of parts that are
    each short by some amount are together short by at most the norm of these amounts.
    """
    norms = [measure for measure in measures if isinstance(measure, Tensor)]
    inner = [measure for measure in measures if isinstance(measure, InnerNorms)]
    parts = torch.stack(norms) if norms else None
    if inner:
        squares = torch.stack([one.squares for one in inner])
        roots = guard(squares, torch.stack([one.errors for one in inner])).sqrt_()
        parts = roots if parts is None else torch.cat([parts, roots])
    assert parts is not None
    total = _combine(parts)
    positions = sum(one.terms**2 for one in inner)
    return total.add_(lost_to_underflow(entries + len(parts) + positions, total.dtype))


def _combine(parts: Tensor) -> Tensor:
    """Norms along the first dimension, where `vector_norm` is slow on a CPU."""
    if parts.device.type == "cpu":
        return parts.square_().sum(0).sqrt_()
    norms: Tensor = torch.linalg.vector_norm(parts, dim=0)
    return norms


def _between(products: Tensor, squares: Tensor) -> Tensor:
    """sum_st |products_st| |v_s| |v_t|, from the squared norms of v."""
    norms = squares.sqrt().unsqueeze(2)
    return torch.bmm(norms.mT, torch.bmm(products.abs(), norms))[:, 0, 0]


def rounding(terms: int, dtype: torch.dtype) -> float:
    """A bound on the relative error of an inner product: a few dozen units in the last place."""
    return float(8 * torch.finfo(dtype).eps * terms**0.5)


def guard(squares: Tensor, errors: Tensor) -> Tensor:
    """Squared norms that are never too small by more than a fraction of a percent.

    Where large positions nearly cancel, the sum is mostly rounding error and may even come out
    negative: a record made for it would pass the clip unclipped. Where an error could matter it is
    added, so that such a record is clipped harder than it need be, never less.
    """
    # A negative sum is rounding error too, or an overflow, which has to stay one. So has an error
    # that is not a number (zero times an overflow): only what is known to be small is left out.
    return torch.where(errors <= TOLERATED * squares, squares, squares.abs() + errors)


def part_norms(rows: Tensor) -> Tensor:
    """Norm of every row, for `whole_norms`: what underflow takes from it is added there."""
    flat = rows.reshape(len(rows), -1)
    if flat.shape[1] == 1:  # would not be squared, and so not overflow where others do
        return widen(flat[:, 0]).square().sqrt_()
    norms: Tensor = torch.linalg.vector_norm(flat, dim=1, dtype=widen(flat[:0]).dtype)
    return norms


def row_norms(rows: Tensor) -> Tensor:
    """Norm of every row, never too small: safe to multiply by another."""
    norms = part_norms(rows)
    return norms.add_(lost_to_underflow(rows[:1].numel(), norms.dtype))


def lost_to_underflow(count: int, dtype: torch.dtype) -> float:
    """The most that the norm of so many numbers can lack because squares vanished.

    A square below the smallest normal number m is rounded, or flushed to zero: either way less than
    m is lost. The sum of n squares lacks at most n m, and its root at most sqrt(n m).
    """
    return float((count * torch.finfo(dtype).tiny) ** 0.5)
