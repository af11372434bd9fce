"""The rules of layers against plain autograd, row by row, on synthetic records.

A row's gradient has to be the same whatever those of other examples are: a model may mix
records in its backward pass alone, as a hook does that clips a gradient by the norm of the batch.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dpsur.functional.call import call_on, use_weights
from dpsur.functional.parameters import Params
from dpsur.functional.problem import Objective, forbid_side_effects, mode, output_rows
from dpsur.functional.tree import (
    TensorTree,
    device_of,
    map_tensors,
    row_count,
    split_rows,
    tensors_of,
)
from dpsur.per_example.contributions import Factors
from dpsur.per_example.mixing_check import generator_state
from dpsur.per_example.one_pass import Assignment, watched_outputs
from dpsur.per_example.tape import Layout, NotSupportedError, Tape

# Relative to the norm of a row's gradient. In one batch the forward pass is the same. Alone it is
# another: kernels for another number of rows round otherwise, and a ReLU may open that was shut.
_TOLERANCE, _TOLERANCE_ALONE = 1e-3, 0.1
# By how much a norm may be too large: that costs no privacy (`norms.guard`).
_GUARDED = 0.05
# Where layers round to TF32, to 10 bits, two ways to a gradient differ by more (MobileNetV2: 3e-3).
# The same rules are compared in full float32 too, to the tolerance above.
_TOLERANCE_OF_TF32 = 2e-2
# Rows side by side whose gradients have these sizes: what is done to a batch because of the largest
# is done to the smallest too.
_SIZES = (1e12, 1.0, 1e-6)
# Parameters of a model whose gradients are looked at one by one.
_LARGE = 2**20
# Where a norm is above this power of the largest number, inner products for it may overflow.
_OVERFLOW = 0.4

Gradients = tuple[Tensor, ...]


def compare(
    objective: Objective,
    trial: Params,
    inputs: TensorTree,
    assignment: Assignment,
    layouts: list[Layout | None],
    *,
    alone: bool = True,
) -> int:
    """Raise where the rules are not right for a row; return the bytes that a pass holds on to.

    With `alone` a row's gradient is also compared with that of the row by itself. Where layers
    round to TF32 that is no test: a batch and a single row are rounded differently, units of a deep
    network open in one and not in the other, and gradients differ by a tenth and more.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in trial.items()}
    tape = Tape(leaves, row_count(inputs), layouts)
    held: list[Tensor] = []

    def hold(value: Tensor) -> Tensor:
        held.append(value.detach())  # a graph that holds its own outputs is never given back
        return held[-1]

    device = device_of(inputs)
    before = generator_state(device)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(hold, lambda value: value):
        # a copy, for a model that overwrites its inputs
        copy = map_tensors(torch.clone, inputs)
        outputs = _differentiable(watched_outputs(objective, tape, copy, assignment))
    if any(not value.dim() or len(value) != tape.examples for value in outputs):
        raise NotSupportedError("an output of the model has no row per example")
    drew = not torch.equal(before, generator_state(device))
    # a record that is alone gets other draws
    singly = _outputs_alone(objective, leaves, inputs) if alone and not drew else None
    tolerance = _TOLERANCE_OF_TF32 if rounds_to_tf32(device) else _TOLERANCE
    together = [[value[row] for value in outputs] for row in range(tape.examples)]
    passes = [(together, tolerance)]
    passes += [] if singly is None else [(singly, _TOLERANCE_ALONE)]
    # A row's gradients of both passes at once, but for a large model, whose gradients take memory.
    large = sum(value.numel() for value in tape.params.values()) > _LARGE
    groups = [[one] for one in passes] if large else [passes]
    for direction in _directions(outputs):
        norms = _norms_by_the_rules(tape, outputs, direction)
        for row in range(tape.examples):
            for several in groups:
                # What is computed again in a backward pass has the right weights here only: a model
                # that does so (torch.utils.checkpoint) is none for rules.
                with use_weights(objective.model, lambda name, own: leaves.get(name, own)):
                    expected = [
                        (_by_autograd(tape, made, direction, row), limit) for made, limit in several
                    ]
                _judge(tape, norms, row, expected)
                del expected  # each as large as the model
    found = [
        contribution
        for kept in tape.contributions.values()
        for contributions in kept.values()
        for contribution in contributions
    ]
    held += [value for contribution in found for value in contribution.tensors()]
    return sum(
        {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in held}.values()
    )


def rounds_to_tf32(device: torch.device) -> bool:
    """Whether layers round what they multiply to 10 bits."""
    allowed = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    return device.type == "cuda" and allowed


def _differentiable(outputs: TensorTree) -> list[Tensor]:
    """The outputs that can have a gradient."""
    return [value for value in tensors_of(outputs) if value.is_floating_point()]


def _outputs_alone(objective: Objective, leaves: Params, inputs: TensorTree) -> list[list[Tensor]]:
    """What the model itself makes of every record without other examples in the batch."""
    model = objective.model
    with torch.enable_grad(), mode(model, training=True), forbid_side_effects(model, leaves):
        rows = [map_tensors(torch.clone, row) for row in split_rows(inputs, 1)]
        found = [_differentiable(output_rows(call_on(model, leaves, row))) for row in rows]
        return [[value[0] for value in outputs] for outputs in found]


def _directions(outputs: list[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients of the outputs: rows of one size, and of very different sizes in every order."""
    direction = [torch.randn_like(value) for value in outputs]
    yield direction
    for shift in range(len(_SIZES)):
        yield [_resize(value, shift) for value in direction]


def _resize(values: Tensor, shift: int) -> Tensor:
    sizes = torch.tensor(_SIZES, dtype=values.dtype, device=values.device)
    each = sizes.roll(shift)[: len(values)]
    return values * each.view(-1, *[1] * (values.dim() - 1))


def _along(outputs: list[Tensor], direction: list[Tensor]) -> Tensor:
    """The sum of all products of outputs and directions."""
    terms = [(value * each).sum() for value, each in zip(outputs, direction, strict=True)]
    if not terms:
        raise NotSupportedError("the model returns no tensor of fractions")
    return sum(terms[1:], terms[0])


def _norms_by_the_rules(tape: Tape, outputs: list[Tensor], direction: list[Tensor]) -> Tensor:
    """The norm of every row's gradient, from one backward pass of all of them."""
    tape.contributions.clear()
    tape.recording = True
    leaves = list(tape.params.values())
    torch.autograd.grad(_along(outputs, direction), leaves, retain_graph=True, allow_unused=True)
    tape.recording = False
    return tape.norms()


def _by_autograd(
    tape: Tape, outputs: list[list[Tensor]], direction: list[Tensor], row: int
) -> Gradients:
    """A row's gradient, from a backward pass in which no other row has one."""
    return torch.autograd.grad(
        _along(outputs[row], [each[row] for each in direction]),
        list(tape.params.values()),
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )


def _judge(tape: Tape, norms: Tensor, row: int, expected: list[tuple[Gradients, float]]) -> None:
    """Compare a row's gradient and its norm by the rules with what they should be."""
    only = Factors((torch.arange(tape.examples, device=norms.device) == row).to(norms), None)
    names, our_norm = list(tape.params), norms[row]
    gaps: list[list[Tensor]] = [[] for _ in expected]
    for place, name in enumerate(names):
        ours = tape.weighted_sum(name, only)
        for found, (gradients, _) in zip(gaps[:-1], expected[:-1], strict=True):
            found.append((ours - gradients[place]).square().sum())
        gaps[-1].append(ours.sub_(expected[-1][0][place]).square_().sum())
        del ours
    for found, (gradients, tolerance) in zip(gaps, expected, strict=True):
        norm = _norm(gradients)
        if not our_norm.isfinite() and norm > torch.finfo(norm.dtype).max ** _OVERFLOW:
            continue  # such a gradient counts as zero
        more = our_norm - norm  # a bound on its rounding error may be part of it
        right = -tolerance * norm <= more <= max(tolerance, _GUARDED) * norm
        if not (torch.stack(found).sum().sqrt() <= tolerance * norm and right):
            sizes = [float(gap.sqrt().nan_to_num(torch.inf)) for gap in found]
            worst = names[sizes.index(max(sizes))]
            raise NotSupportedError(
                f"{worst} is used in a way that the rules do not see, or a backward pass mixes "
                "the records of a batch",
                worst,
            )


def _norm(gradients: Gradients) -> Tensor:
    return torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
