"""Clip the gradient of every record by itself and add them up (Alg. 1, L4-7)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpsur.core.gradients.per_example import per_example_gradients
from dpsur.core.problem import Problem
from dpsur.core.types import Examples, Params

# Per-example gradients of one piece of a batch are held at once: about this many numbers of them.
GRADIENT_NUMBERS_AT_ONCE = 2**25


@dataclass(frozen=True)
class ClippedSum:
    """A sum of vectors and the most that one record can change it by, in L2 norm."""

    params: Params
    sensitivity: float


def clipped_sum(
    problem: Problem,
    params: Params,
    batch: Examples,
    max_grad_norm: float,
    *,
    mask: Tensor | None = None,
) -> ClippedSum:
    """Sum of the per-example gradients of a batch, each scaled down to the norm bound.

    Formal guarantee: adding or removing one record of the batch moves the sum by at most
    `max_grad_norm` in L2 norm (over the reals), whatever the record: a gradient that is not finite
    counts as zero. An empty batch has the sum zero.
    """
    total = {name: torch.zeros_like(value) for name, value in params.items()}
    rows = max(1, GRADIENT_NUMBERS_AT_ONCE // sum(value.numel() for value in params.values()))
    for start in range(0, len(batch), rows):
        piece = Examples(batch.inputs[start : start + rows], batch.targets[start : start + rows])
        gradients = per_example_gradients(problem, params, piece)
        scales = clip_scales(gradients, max_grad_norm)
        if mask is not None:
            scales = torch.where(mask[start : start + rows], scales, torch.zeros_like(scales))
        for name, gradient in gradients.items():
            # zero times infinity is NaN, so non-finite entries go before the scaling
            safe = gradient.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            total[name] += torch.tensordot(scales.to(safe.dtype), safe, dims=1)
    return ClippedSum(total, sensitivity=max_grad_norm)


def clip_scales(gradients: Params, max_grad_norm: float) -> Tensor:
    """Factor per record: min(1, bound / norm), and 0 where the norm is not finite."""
    squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()]).sum(0)
    norms = squares.sqrt()
    scales = (max_grad_norm / norms).clamp(max=1.0)
    return torch.where(norms.isfinite(), scales, torch.zeros_like(scales))
