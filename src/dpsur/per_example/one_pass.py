"""What one forward and one backward pass tell about per-example gradients."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dpsur.functional.call import call, use_weights
from dpsur.functional.parameters import Params
from dpsur.functional.problem import (
    LossFunction,
    Objective,
    example_losses,
    forbid_side_effects,
    mode,
    output_rows,
)
from dpsur.functional.records import Examples
from dpsur.functional.tree import TensorTree, map_tensors, split_rows
from dpsur.per_example.contributions import widen
from dpsur.per_example.input_cache import KnownInputs
from dpsur.per_example.modules import Assignment, use_rules
from dpsur.per_example.tape import Layout, Tape

Outputs = TypeVar("Outputs")


@dataclass(frozen=True)
class Microbatch:
    """Some rows of a batch, which of them count, and where they stand in a data set, if known.

    `coins`, a uniform draw per row, round its gradient at random to the norm 0 or the bound.
    """

    batch: Examples
    keep: Tensor | None = None
    known: KnownInputs | None = None
    coins: Tensor | None = None


def tape_for(
    model: nn.Module,
    params: Params,
    forward: Callable[[Callable[..., Any]], Outputs],
    examples: int,
    assignment: Assignment,
    layouts: list[Layout | None],
    *,
    known: KnownInputs | None = None,
    autocast: AbstractContextManager[object] | None = None,
) -> tuple[Tape, Outputs]:
    """A tape of your forward pass: `forward` gets the model to call and returns what it likes.

    For a module and a loop that are not those of this package: compute a loss from the outputs that
    is a sum over records, take its gradient (`loss.backward()`, or `torch.autograd.grad` with
    respect to `tape.leaves`), then ask the tape for norms and weighted sums. `assignment` and
    `layouts` are those of a `Plan` for the model and its inputs (`plan_for`), and hold for one call
    of the model on `examples` records in training mode. Gradients of the model's parameters are not
    computed, and `.grad` stays as it is.
    """
    detached = {name: value.detach() for name, value in params.items()}
    tape = Tape(detached, examples, layouts, known=known)
    with torch.enable_grad():
        outputs = run_watched(model, tape, assignment, forward, autocast)
    return tape, outputs


def run_watched(
    model: nn.Module,
    tape: Tape,
    assignment: Assignment,
    forward: Callable[[Callable[..., Any]], Outputs],
    autocast: AbstractContextManager[object] | None = None,
) -> Outputs:
    """Call `forward` in training mode, all layers watched and no gradient of a weight prepared."""
    weights = tape.params | {name: broadcast_copies(tape, name) for name in assignment.copied}

    def weight(name: str, own: Tensor) -> Tensor:
        return weights[name] if name in weights else own.detach()

    with (
        mode(model, training=True),
        forbid_side_effects(model, tape.params),
        use_rules(assignment, model, tape),
        autocast or nullcontext(),
        use_weights(model, weight) as called,
    ):
        return forward(called)


def fill_tape(
    objective: Objective,
    params: Params,
    microbatch: Microbatch,
    assignment: Assignment,
    layouts: list[Layout | None],
) -> Tape:
    """A tape of one forward and one backward pass over some rows."""
    batch = microbatch.batch
    tape, outputs = tape_for(
        objective.model,
        params,
        lambda model: map_tensors(widen, output_rows(call(model, batch.inputs))),
        len(batch),
        assignment,
        layouts,
        known=microbatch.known,
        autocast=objective.training_precision(),
    )
    with torch.enable_grad():
        losses = losses_one_by_one(objective.loss, outputs, batch.targets)
    if losses.requires_grad:
        torch.autograd.grad(losses, tape.leaves, torch.ones_like(losses), allow_unused=True)
    del outputs, losses  # the graph, and with it inputs of layers that nobody needs any more
    tape.leaves.clear()
    return tape


def watched_outputs(
    objective: Objective, tape: Tape, inputs: TensorTree, assignment: Assignment
) -> TensorTree:
    """Outputs in training mode, recorded on a tape."""
    return run_watched(
        objective.model,
        tape,
        assignment,
        lambda model: map_tensors(widen, output_rows(call(model, inputs))),
        objective.training_precision(),
    )


def broadcast_copies(tape: Tape, name: str) -> Tensor:
    """A parameter of shape (1, ...) with a copy for every example in its first dimension."""
    return tape.copies(name).squeeze(1)


def losses_one_by_one(loss: LossFunction, outputs: TensorTree, targets: TensorTree) -> Tensor:
    """The loss of every row alone, batched where the loss function allows it."""
    try:
        return example_losses(loss, outputs, targets)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # which `engine_report` names
        pass
    # outside of `except`, so that an error of the loss itself comes through by itself
    pairs = split_rows((outputs, targets), 1)
    return torch.stack([loss(output, target).reshape(()) for output, target in pairs])
