"""Norms of per-example gradients, from what layers know about them.

A layer hands in either norms or, where gradients are never formed, inner products. What remains to
be done for the latter is done for all layers at once: for small networks the number of operations
counts, not their size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Below this part of the largest possible value a squared norm is taken to suffer from cancellation.
CANCELLED = 1e-2


@dataclass(frozen=True)
class InnerNorms:
    """Squared norms of sum_t g_t x_t^T as sums of inner products, one per example.

    `largest` is sum_t |x_t| |g_t|, and `terms` how many products were added up for one entry.
    """

    squares: Tensor
    largest: Tensor
    terms: int

    @staticmethod
    def of(inner: Tensor, outer: Tensor, terms: int) -> "InnerNorms":
        """From x_s.x_t and g_s.g_t: |sum_t g_t x_t^T|^2 = sum_st (x_s.x_t)(g_s.g_t)."""
        sizes = inner.diagonal(dim1=1, dim2=2) * outer.diagonal(dim1=1, dim2=2)
        return InnerNorms((inner * outer).sum((1, 2)), sizes.sqrt().sum(1), terms)

    @staticmethod
    def joined(parts: "Sequence[InnerNorms]") -> "InnerNorms":
        """Of several groups of examples."""
        if len(parts) == 1:
            return parts[0]
        return InnerNorms(
            torch.cat([part.squares for part in parts]),
            torch.cat([part.largest for part in parts]),
            parts[0].terms,
        )


Measure = Tensor | InnerNorms


def whole_norms(measures: Sequence[Measure]) -> Tensor:
    """Norm of every example's whole gradient, whose disjoint parts were measured."""
    norms = [measure for measure in measures if isinstance(measure, Tensor)]
    inner = [measure for measure in measures if isinstance(measure, InnerNorms)]
    parts = torch.stack(norms) if norms else None
    if inner:
        squares = torch.stack([one.squares for one in inner])
        largest = torch.stack([one.largest for one in inner])
        roots = guarded(squares, largest, max(one.terms for one in inner)).sqrt_()
        parts = roots if parts is None else torch.cat([parts, roots])
    assert parts is not None
    total: Tensor = torch.linalg.vector_norm(parts, dim=0)
    return total


def guarded(squares: Tensor, largest: Tensor, terms: int) -> Tensor:
    """Squared norms that are never too small.

    Where large positions nearly cancel, the sum is mostly rounding error and may even come out
    negative: a record made for it would pass the clip unclipped. The error is at most a small
    multiple of the unit in the last place of (sum_t |x_t| |g_t|)^2. Where that could matter it is
    added, so that such a record is clipped harder than it need be, never less.
    """
    whole = largest.square()
    slack = 8 * torch.finfo(squares.dtype).eps * terms**0.5
    safe = squares.clamp(min=0).add_(whole, alpha=slack)
    return torch.where(squares < CANCELLED * whole, safe, squares)


def row_norms(rows: Tensor) -> Tensor:
    """Norm of every row."""
    norms: Tensor = torch.linalg.vector_norm(rows.reshape(len(rows), -1), dim=1)
    return norms
