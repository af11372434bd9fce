"""What one forward and one backward pass say about per-example gradients.

Rules take the place of the layers' forward methods for the length of the pass.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from dpsur.functional.call import call, every_module, use_weights
from dpsur.functional.parameters import Params
from dpsur.functional.problem import (
    LossFunction,
    Objective,
    example_losses,
    forbid_side_effects,
    mode,
    output_rows,
)
from dpsur.functional.process_settings import widen
from dpsur.functional.records import Examples
from dpsur.functional.tree import TensorTree, map_tensors, split_rows, tensors_of, with_tensors
from dpsur.per_example.input_cache import KnownInputs
from dpsur.per_example.operations import Operations
from dpsur.per_example.rules import FASTER, RULES, kind_of
from dpsur.per_example.tape import Layout, NotSupportedError, Tape


@dataclass(frozen=True)
class Assignment:
    """Which module follows which rule, and who looks after the parameters of the others.

    Modules are named by their places in `every_module`: this is kept for as long as the model is,
    and must not keep it alive. Rules are named by kinds of layers; None is `copy_per_example`. With
    `operations` set, parameters of modules without a rule are followed through torch functions.
    `faster` are modules that train nothing and have a faster way.
    """

    forwards: list[tuple[int, type[nn.Module] | None]]
    operations: bool = False
    faster: tuple[tuple[int, type[nn.Module]], ...] = ()


def assign(model: nn.Module, params: Params, *, operations: bool) -> Assignment:
    """Choose a rule for every layer that owns trained parameters, or that has a faster way.

    Without `operations` a module that owns parameters without a rule is differentiated by
    `torch.func`, with all that is inside it.
    """
    trained = {id(p) for name, p in model.named_parameters() if name in params}
    places = {module: place for place, module in enumerate(every_module(model))}
    forwards: list[tuple[int, type[nn.Module] | None]] = []
    faster: list[tuple[int, type[nn.Module]]] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        trains = any(id(p) in trained for p in module.parameters())
        kind = kind_of(module, RULES if trains else FASTER)
        own = any(id(p) in trained for p in module.parameters(recurse=False))
        if kind is not None and not trains:
            faster.append((places[module], kind))
        elif kind is not None:
            forwards.append((places[module], kind))
        elif not operations and ((trains and is_parametrized(module)) or own):
            forwards.append((places[module], None))
        else:
            for child in module.children():
                visit(child)

    visit(model)
    return Assignment(forwards, operations, tuple(faster))


@contextmanager
def use_rules(assignment: Assignment, model: nn.Module, tape: Tape) -> Iterator[None]:
    """Replace forward methods and put them back afterwards."""
    modules = list(every_module(model))
    changed: list[tuple[dict[str, Any], Any]] = []
    operations = Operations(tape) if assignment.operations else None

    def stand_in(module: nn.Module, forward: Callable[..., Any]) -> None:
        # set behind the module's back: its own way of setting attributes is slow
        own = vars(module)
        changed.append((own, own.get("forward")))
        own["forward"] = forward

    try:
        for place, kind in assignment.forwards:
            module = modules[place]
            if kind is None:
                stand_in(module, partial(copy_per_example, module, tape, module.forward))
                continue
            rule = partial(RULES[kind], module, tape)
            if operations is not None:
                rule = partial(_rule_or_own, operations, rule, module.forward)
            stand_in(module, rule)
        for place, faster in assignment.faster:
            stand_in(modules[place], partial(FASTER[faster], modules[place], tape))
        with operations or nullcontext():
            yield
    finally:
        for own, original in changed:
            if original is None:
                del own["forward"]
            else:
                own["forward"] = original


def _rule_or_own(
    operations: Operations,
    rule: Callable[..., Any],
    own: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A layer that sees no examples, as one for positions, is followed through its operations."""
    layouts = [operations.tape.layout(value) for value in tensors_of((args, kwargs))]
    if layouts and all(layout is None for layout in layouts):
        return own(*args, **kwargs)
    with operations.paused():
        return rule(*args, **kwargs)


class _Shell(nn.Module):
    """Calls a module's own forward method, so that neither rules nor hooks see the call."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self._own = module, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._own(*args, **kwargs)


class _PaddedTables(TorchFunctionMode):
    """Embeddings with a row for padding, which is not trained, where every example has a table.

    torch joins these tables into one, and leaves out the row of the first of them only.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Leave out the row of every table."""
        read = _look_up if func is F.embedding else func
        return read(*args, **(kwargs or {}))


def _look_up(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **options: Any
) -> Tensor:
    rows = F.embedding(input, weight, None, *args, **options)
    if padding_idx is None:
        return rows
    padding = (input == padding_idx % len(weight)).unsqueeze(-1)
    return torch.where(padding, rows.detach(), rows)


def copy_per_example(
    module: nn.Module, tape: Tape, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a module without a rule with its own copy of the parameters for every example.

    Arguments and outputs are trees of tensors; what else is among the arguments is the same for
    all examples.
    """
    given = tensors_of((args, kwargs))
    layouts = [tape.layout(value) for value in given]
    if any(layout is not None and layout.fold > 1 for layout in layouts):
        raise NotSupportedError("a module without a rule that sees parts of examples")
    axes = [None if layout is None else layout.axis for layout in layouts]
    if tape.dry:
        outputs = forward(*args, **kwargs)
        for value in _outputs_of(outputs):
            tape.layout(value)
        return outputs
    if not any(axis is not None for axis in axes):
        raise NotSupportedError("a module without a rule that does not see whole examples")
    shell = _Shell(module, forward)
    copies = {
        f"module.{local}": tape.copies(slot.parameter)
        for local, value in module.named_parameters()
        if (slot := tape.slot(value)) is not None
    }
    structure: Any = None
    places: list[int] = []

    def one(copy: Params, some: list[Tensor]) -> list[Tensor]:
        nonlocal structure
        alone = [
            value if axis is None else value.unsqueeze(axis)
            for value, axis in zip(some, axes, strict=True)
        ]
        positional, named = with_tensors((args, kwargs), alone)
        structure = functional_call(shell, copy, positional, named)
        outputs = _outputs_of(structure)
        for _ in outputs:
            where = tape.expected_layout(torch.Size())
            if where is None or where.fold > 1:
                raise NotSupportedError("a module without a rule that returns parts of examples")
            places.append(where.axis)
        return [value.squeeze(axis) for value, axis in zip(outputs, places, strict=True)]

    batched = vmap(one, in_dims=(0, axes), randomness="different")
    # the only attention kernel with a batching rule
    with sdpa_kernel(SDPBackend.MATH), _PaddedTables():
        results = batched(copies, given)
    moved = [value.movedim(0, axis) for value, axis in zip(results, places, strict=True)]
    return with_tensors(structure, moved)


def _outputs_of(outputs: Any) -> list[Tensor]:
    found = tensors_of(outputs)
    if not found:
        raise NotSupportedError("a module without a rule that returns no tensor")
    return found


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

    def weight(name: str, own: Tensor) -> Tensor:
        return tape.params[name] if name in tape.params else own.detach()

    tape.recording = False  # a gradient that the model takes on its way is not that of the loss
    with (
        mode(model, training=True),
        forbid_side_effects(model, tape.params),
        use_rules(assignment, model, tape),
        autocast or nullcontext(),
        use_weights(model, weight) as called,
    ):
        outputs = forward(called)
    tape.recording = True
    return outputs


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
    tape.once = True
    with torch.enable_grad():
        losses = losses_one_by_one(objective.loss, outputs, batch.targets)
    tape.spoiled = losses.detach().isnan()
    if losses.requires_grad:
        # of their sum: given gradients of its own, PyTorch imports a library of symbols first
        torch.autograd.grad(losses.sum(), tape.leaves, allow_unused=True)
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
