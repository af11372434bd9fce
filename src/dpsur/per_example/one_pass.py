"""What one forward and one backward pass tell about per-example gradients."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpsur.functional.call import call_with
from dpsur.functional.parameters import Params
from dpsur.functional.problem import LossFunction, Problem, example_losses, left_alone, mode
from dpsur.functional.records import Examples
from dpsur.per_example.contributions import wide
from dpsur.per_example.input_cache import KnownInputs
from dpsur.per_example.modules import Assignment, replaced
from dpsur.per_example.tape import Layout, Tape


@dataclass(frozen=True)
class Piece:
    """Some rows of a batch, which of them count, and where they stand in a data set, if known.

    `coins`, a uniform draw per row, round its gradient at random to the norm 0 or the bound.
    """

    batch: Examples
    keep: Tensor | None = None
    known: KnownInputs | None = None
    coins: Tensor | None = None


def filled_tape(
    problem: Problem,
    params: Params,
    piece: Piece,
    assignment: Assignment,
    layouts: list[Layout | None],
) -> Tape:
    """A tape of one forward and one backward pass over some rows."""
    batch = piece.batch
    detached = {name: value.detach() for name, value in params.items()}
    tape = Tape(detached, len(batch), layouts, known=piece.known)
    with torch.enable_grad():
        outputs = taped_outputs(problem, tape, batch.inputs, assignment)
        losses = losses_one_by_one(problem.loss, outputs, batch.targets)
    if losses.requires_grad:
        torch.autograd.grad(losses, tape.leaves, torch.ones_like(losses), allow_unused=True)
    del outputs, losses  # the graph, and with it inputs of layers that nobody needs any more
    tape.leaves.clear()
    return tape


def taped_outputs(problem: Problem, tape: Tape, inputs: Tensor, assignment: Assignment) -> Tensor:
    """Outputs in training mode, with all layers watched and no gradient of a weight prepared."""
    model = problem.model
    weights = tape.params | {name: broadcast_copies(tape, name) for name in assignment.copied}

    def weight(name: str, own: Tensor) -> Tensor:
        return weights[name] if name in weights else own.detach()

    rules = replaced(assignment, model, tape)
    alone = left_alone(model, tape.params)
    with mode(model, training=True), alone, rules, problem.training_precision():
        outputs = call_with(model, weight, inputs)
    return wide(outputs)


def broadcast_copies(tape: Tape, name: str) -> Tensor:
    """A parameter of shape (1, ...) with a copy for every example in its first dimension."""
    return tape.copies(name).squeeze(1)


def losses_one_by_one(loss: LossFunction, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of every row alone, batched where the loss function allows it."""
    try:
        return example_losses(loss, outputs, targets)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # which `engine_choice` reports
        pass
    # outside of `except`, so that an error of the loss itself comes through by itself
    rows = zip(torch.split(outputs, 1), torch.split(targets, 1), strict=True)
    return torch.stack([loss(output, target).reshape(()) for output, target in rows])
