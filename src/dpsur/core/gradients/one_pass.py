"""Clipped sums from one forward and one backward pass."""

import torch
from torch import Tensor
from torch.func import functional_call

from dpsur.core.gradients.layout import Layout
from dpsur.core.gradients.modules import Assignment, replaced
from dpsur.core.gradients.stored import KnownInputs
from dpsur.core.gradients.tape import Tape
from dpsur.core.gradients.uses import Factors
from dpsur.core.problem import Problem, example_losses, mode
from dpsur.core.types import Examples, LossFunction, Params


def one_pass_sum(
    problem: Problem,
    params: Params,
    batch: Examples,
    max_grad_norm: float,
    keep: Tensor | None,
    assignment: Assignment,
    layouts: list[Layout | None],
    rows: Tensor | None = None,
    coins: Tensor | None = None,
) -> Params:
    """Sum of clipped per-example gradients; `keep` says which rows count.

    `rows` tells where the batch stands in the training set, if it is known.

    Formal guarantee: what is added for an example is, over the reals, its gradient times
    min(1, max_grad_norm / norm), where norm is that of the same gradient over all parameters; zero
    if the norm is not finite or the row is not kept. Nothing here waits for the device.
    """
    tape = filled_tape(problem, params, batch, assignment, layouts, rows)
    with torch.no_grad():
        factors = clip_factors(tape.square_norms(), max_grad_norm, keep, coins)
        return {name: tape.weighted_sum(name, factors) for name in params}


def filled_tape(
    problem: Problem,
    params: Params,
    batch: Examples,
    assignment: Assignment,
    layouts: list[Layout | None],
    rows: Tensor | None = None,
) -> Tape:
    """A tape of one forward and one backward pass over a batch."""
    detached = {name: value.detach() for name, value in params.items()}
    tape = Tape(detached, len(batch), layouts)
    if rows is not None:
        tape.known = KnownInputs(problem.model, problem.train.inputs, rows, batch.inputs)
    with torch.enable_grad():
        outputs = taped_outputs(problem, tape, batch.inputs, assignment)
        losses = losses_one_by_one(problem.loss, outputs, batch.targets)
    if losses.requires_grad:
        torch.autograd.grad(losses.sum(), tape.leaves, allow_unused=True)
    del outputs, losses  # the graph, and with it inputs of layers that nobody needs any more
    tape.leaves.clear()
    return tape


def taped_outputs(problem: Problem, tape: Tape, inputs: Tensor, assignment: Assignment) -> Tensor:
    """Outputs in training mode, with all layers watched and no gradient of a weight prepared."""
    model = problem.model
    weights = {name: value.detach() for name, value in model.named_parameters()} | tape.params
    weights |= {name: broadcast_copies(tape, name) for name in assignment.copied}
    with mode(model, training=True), replaced(assignment, tape):
        outputs: Tensor = functional_call(model, weights, (inputs,))
    return outputs


def broadcast_copies(tape: Tape, name: str) -> Tensor:
    """A parameter of shape (1, ...) with a copy for every example in its first dimension."""
    return tape.copies(name).squeeze(1)


def losses_one_by_one(loss: LossFunction, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of every row alone, batched where the loss function allows it."""
    try:
        return example_losses(loss, outputs, targets)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        rows = zip(torch.split(outputs, 1), torch.split(targets, 1), strict=True)
        return torch.stack([loss(output, target).reshape(()) for output, target in rows])


def clip_factors(
    square_norms: Tensor,
    max_grad_norm: float,
    keep: Tensor | None,
    coins: Tensor | None = None,
) -> Factors:
    """Factor per example: min(1, bound / norm), and 0 where the norm is not finite.

    With `coins`, uniform draws in [0, 1), a clipped gradient is rounded at random to the norm 0 or
    the bound, so that its mean stays what it is.
    """
    norms = square_norms.sqrt()
    usable = norms.isfinite()
    usable = usable if keep is None else usable & keep
    scales = max_grad_norm / norms
    if coins is None:
        values = torch.where(usable, scales.clamp(max=1.0), 0.0)
    else:
        usable = usable & (coins * max_grad_norm < norms)
        values = torch.where(usable, scales, 0.0)
    # Asking whether all are usable costs nothing on the CPU and would stall any other device.
    if usable.device.type == "cpu" and bool(usable.all()):
        return Factors(values, None)
    return Factors(values, usable)
