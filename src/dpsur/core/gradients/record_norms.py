"""Norms of per-example gradients, without their sums."""

import torch
from torch import Tensor

from dpsur.core.gradients.budget import GradientBudget
from dpsur.core.gradients.engines import tape_of
from dpsur.core.gradients.one_pass import Piece
from dpsur.core.gradients.plan import plan_for
from dpsur.core.precision import precision
from dpsur.core.problem import Problem
from dpsur.core.types import Examples, Params


def clipped_norms(
    problem: Problem, params: Params, batch: Examples, max_grad_norm: float
) -> Tensor:
    """Norm of each record's clipped gradient, in double precision.

    Formal guarantee: each value depends on its own record only and lies in [0, max_grad_norm]; a
    gradient that is not finite counts as zero.
    """
    if not len(batch):
        return torch.zeros(0, dtype=torch.float64, device=batch.inputs.device)
    plan = plan_for(problem, params, batch.inputs, GradientBudget())
    pieces = []
    for start in range(0, len(batch), plan.rows):
        some = slice(start, start + plan.rows)
        tape = tape_of(problem, params, Piece(batch.part(some)), plan)
        with torch.no_grad(), precision(tf32=False):
            pieces.append(tape.norms())
    norms = torch.cat(pieces).double()
    return torch.where(norms.isfinite(), norms.clamp(max=max_grad_norm), 0.0)
