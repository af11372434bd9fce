"""Clip the gradient of every record by itself and add them up (Alg. 1, L4-7)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpsur.core.gradients.budget import GradientBudget
from dpsur.core.gradients.layout import NotSupportedError
from dpsur.core.gradients.one_pass import clip_factors, one_pass_sum
from dpsur.core.gradients.per_example import one_at_a_time, per_example_gradients
from dpsur.core.gradients.plan import Engine, Plan, plan_for
from dpsur.core.gradients.uses import Rows
from dpsur.core.problem import Problem
from dpsur.core.types import Examples, Params
from dpsur.errors import InvalidInputError


@dataclass(frozen=True)
class ClippedSum:
    """A sum of vectors and the most that one record can change it by, in L2 norm."""

    params: Params
    sensitivity: float


_DEFAULT_BUDGET = GradientBudget()


def clipped_sum(
    problem: Problem,
    params: Params,
    batch: Examples,
    max_grad_norm: float,
    *,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
    coins: Tensor | None = None,
    budget: GradientBudget = _DEFAULT_BUDGET,
) -> ClippedSum:
    """Sum of the per-example gradients of a batch, each scaled down to the norm bound.

    Formal guarantee: adding or removing one record of the batch moves the sum by at most
    `max_grad_norm` in L2 norm (over the reals), whatever the record: a gradient that is not finite
    counts as zero. An empty batch has the sum zero. A row for which `mask` is False adds exactly
    zero whatever it holds, so that batches of different sizes can be padded to one shape. After the
    first call for a model and a shape nothing here waits for the device.

    `rows`, if given, must be where the batch stands in `problem.train`: what depends on the data
    alone is then computed once for the whole set. It makes no other difference. `coins`, one
    uniform draw per row, rounds every clipped gradient at random to the norm 0 or the bound: the
    guarantee is the same, and so is the mean of the sum.
    """
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (len(batch),)):
        raise InvalidInputError(
            f"mask must hold one bool per row, {len(batch)} in all, "
            f"got {tuple(mask.shape)} of {mask.dtype}"
        )
    if rows is not None and rows.shape != (len(batch),):
        raise InvalidInputError(
            f"rows must hold one index per row of the batch, {len(batch)} in all, "
            f"got {tuple(rows.shape)}"
        )
    total = {name: torch.zeros_like(value) for name, value in params.items()}
    if not len(batch):
        return ClippedSum(total, sensitivity=max_grad_norm)
    plan = plan_for(problem, params, batch.inputs, budget)
    if mask is not None:
        batch = Examples(_blank(batch.inputs, mask), _blank(batch.targets, mask))
    for start in range(0, len(batch), plan.rows):
        some = slice(start, start + plan.rows)
        piece = Examples(batch.inputs[some], batch.targets[some])
        keep = None if mask is None else mask[some]
        known = None if rows is None else rows[some]
        tossed = None if coins is None else coins[some]
        part = _piece_sum(problem, params, piece, max_grad_norm, keep, known, tossed, plan)
        total = part if not start else {name: total[name] + part[name] for name in total}
    return ClippedSum(total, sensitivity=max_grad_norm)


def _blank(values: Tensor, mask: Tensor) -> Tensor:
    """Replace what masked rows hold, for a target that is no class would be an error."""
    return torch.where(mask.view(-1, *[1] * (values.dim() - 1)), values, torch.zeros_like(values))


def _piece_sum(
    problem: Problem,
    params: Params,
    batch: Examples,
    max_grad_norm: float,
    keep: Tensor | None,
    rows: Tensor | None,
    coins: Tensor | None,
    plan: Plan,
) -> Params:
    if plan.engine is Engine.ONE_PASS:
        try:
            return one_pass_sum(
                problem,
                params,
                batch,
                max_grad_norm,
                keep,
                plan.assignment(problem.model, params),
                list(plan.layouts),
                rows,
                coins,
            )
        except NotSupportedError:
            pass  # the model treats these records unlike the made-up ones of the plan
    batched = plan.engine is not Engine.ONE_BY_ONE
    find = per_example_gradients if batched else one_at_a_time
    uses = {name: Rows(rows) for name, rows in find(problem, params, batch).items()}
    squares = torch.stack([use.square_norms() for use in uses.values()]).sum(0)
    factors = clip_factors(squares, max_grad_norm, keep, coins)
    return {name: use.weighted_sum(factors) for name, use in uses.items()}
