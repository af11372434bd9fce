"""Norms of per-example gradients, without their sums."""

import torch
from torch import Tensor

from dpsur.core.gradients.budget import GradientBudget
from dpsur.core.gradients.layout import NotSupportedError
from dpsur.core.gradients.norms import whole_norms
from dpsur.core.gradients.one_pass import Piece, filled_tape
from dpsur.core.gradients.per_example import one_at_a_time, per_example_gradients
from dpsur.core.gradients.plan import Engine, Plan, plan_for
from dpsur.core.gradients.uses import Rows
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
        piece = Examples(batch.inputs[some], batch.targets[some])
        pieces.append(_norms(problem, params, piece, plan))
    norms = torch.cat(pieces).double()
    return torch.where(norms.isfinite(), norms.clamp(max=max_grad_norm), 0.0)


def _norms(problem: Problem, params: Params, batch: Examples, plan: Plan) -> Tensor:
    if plan.assignment is not None:
        try:
            tape = filled_tape(problem, params, Piece(batch), plan.assignment, list(plan.layouts))
            with torch.no_grad():
                return tape.norms()
        except NotSupportedError:
            pass  # the model treats these records unlike the made-up ones of the plan
    find = one_at_a_time if plan.engine is Engine.ONE_BY_ONE else per_example_gradients
    uses = [Rows(rows) for rows in find(problem, params, batch).values()]
    entries = sum(value.numel() for value in params.values())
    return whole_norms([use.measure() for use in uses], entries)
