"""The rules of layers against plain autograd, row by row, on made-up records.

A row's gradient has to be the same whatever the gradients of its company are: a model may mix
records in its backward pass alone, as a hook does that clips a gradient by the norm of the batch.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dpsur.functional.call import call_on
from dpsur.functional.parameters import Params
from dpsur.functional.problem import Problem, left_alone, mode
from dpsur.per_example.contributions import Factors
from dpsur.per_example.mixing_check import generator_state
from dpsur.per_example.modules import Assignment
from dpsur.per_example.one_pass import taped_outputs
from dpsur.per_example.tape import Layout, NotSupportedError, Tape

# Relative to the norm of a row's gradient. In company the forward pass is the same one. Alone it is
# another: kernels for another number of rows round otherwise, and a ReLU may open that was shut.
_TOLERANCE, _TOLERANCE_ALONE = 1e-3, 0.1
# Rows side by side whose gradients have these sizes: what is done to a batch because of the largest
# is done to the smallest too.
_SIZES = (1e12, 1.0, 1e-6)
# Where a norm is above this power of the largest number, inner products for it may overflow.
_OVERFLOW = 0.4

Gradients = tuple[Tensor, ...]


def compare(
    problem: Problem,
    trial: Params,
    inputs: Tensor,
    assignment: Assignment,
    layouts: list[Layout | None],
) -> int:
    """Raise where the rules are not right for a row; return the bytes that a pass holds on to."""
    leaves = {name: value.clone().requires_grad_() for name, value in trial.items()}
    tape = Tape(leaves, len(inputs), layouts)
    held: list[Tensor] = []

    def hold(value: Tensor) -> Tensor:
        held.append(value)
        return value

    before = generator_state(inputs)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(hold, lambda value: value):
        # a copy, for a model that overwrites its inputs
        outputs = taped_outputs(problem, tape, inputs.clone(), assignment)
    drew = not torch.equal(before, generator_state(inputs))
    # a record that is alone gets other draws
    alone = None if drew else _outputs_alone(problem, leaves, inputs)
    for direction in _directions(outputs):
        ours = _by_the_rules(tape, outputs, direction)
        names = list(tape.params)
        _judge(names, ours, _by_autograd(tape, list(outputs), direction), _TOLERANCE)
        if alone is not None:
            _judge(names, ours, _by_autograd(tape, alone, direction), _TOLERANCE_ALONE)
    found = [use for kept in tape.uses.values() for uses in kept.values() for use in uses]
    held += [value for use in found for value in use.tensors()]
    return sum(
        {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in held}.values()
    )


def _outputs_alone(problem: Problem, leaves: Params, inputs: Tensor) -> list[Tensor]:
    """What the model itself makes of every record without any company."""
    model = problem.model
    with torch.enable_grad(), mode(model, training=True), left_alone(model, leaves):
        rows = [row.clone() for row in torch.split(inputs, 1)]
        return [call_on(model, leaves, row)[0] for row in rows]


def _directions(outputs: Tensor) -> Iterator[Tensor]:
    """Gradients of the outputs: rows of one size, and of very different sizes in every order."""
    direction = torch.randn_like(outputs)
    yield direction
    sizes = torch.tensor(_SIZES, dtype=outputs.dtype, device=outputs.device)
    for shift in range(len(_SIZES)):
        each = sizes.roll(shift)[: len(outputs)]
        yield direction * each.view(-1, *[1] * (outputs.dim() - 1))


def _by_the_rules(
    tape: Tape, outputs: Tensor, direction: Tensor
) -> list[tuple[Tensor, list[Tensor]]]:
    """Norm and gradient of every row, from one backward pass of all of them."""
    tape.uses.clear()
    tape.recording = True
    leaves = list(tape.params.values())
    torch.autograd.grad((outputs * direction).sum(), leaves, retain_graph=True, allow_unused=True)
    tape.recording = False
    norms, found = tape.norms(), []
    for row in range(len(outputs)):
        only = Factors((torch.arange(len(outputs), device=norms.device) == row).to(norms), None)
        found.append((norms[row], [tape.weighted_sum(name, only) for name in tape.params]))
    return found


def _by_autograd(tape: Tape, outputs: list[Tensor], direction: Tensor) -> list[Gradients]:
    """Every row's gradient, from a backward pass in which no other row has one."""
    return [
        torch.autograd.grad(
            (output * each).sum(),
            list(tape.params.values()),
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        for output, each in zip(outputs, direction, strict=True)
    ]


def _judge(
    names: list[str],
    ours: list[tuple[Tensor, list[Tensor]]],
    expected: list[Gradients],
    tolerance: float,
) -> None:
    for (our_norm, our_gradients), gradients in zip(ours, expected, strict=True):
        norm = _norm(gradients)
        if not our_norm.isfinite() and norm > torch.finfo(norm.dtype).max ** _OVERFLOW:
            continue  # such a gradient counts as zero
        pairs = zip(our_gradients, gradients, strict=True)
        gaps = tuple(one - other for one, other in pairs)
        if not (_norm(gaps) <= tolerance * norm and (our_norm - norm).abs() <= tolerance * norm):
            sizes = [float(gap.norm().nan_to_num(torch.inf)) for gap in gaps]
            worst = names[sizes.index(max(sizes))]
            raise NotSupportedError(
                f"{worst} is used in a way that the rules do not see, or a backward pass mixes "
                "the records of a batch",
                worst,
            )


def _norm(gradients: Gradients) -> Tensor:
    return torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
