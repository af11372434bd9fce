"""The gradient of every record's own loss, by the simplest correct means."""

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpsur.functional.call import call_on, use_weights
from dpsur.functional.parameters import Params
from dpsur.functional.problem import LossFunction, Objective, forbid_side_effects, mode, output_rows
from dpsur.functional.process_settings import widen
from dpsur.functional.records import Examples
from dpsur.functional.tree import TensorTree, map_tensors, split_rows, tensors_of, with_tensors
from dpsur.per_example.tape import NotSupportedError

# torch.func has no batching rule for these; they are differentiated one record at a time.
WITHOUT_VMAP = (nn.RNNBase,)


def batched_gradients(
    objective: Objective, params: Params, batch: Examples
) -> tuple[Params, Tensor]:
    """Gradients with one row per record, and losses, in training mode.

    Layers draw fresh randomness for each record.
    """
    if any(isinstance(module, WITHOUT_VMAP) for module in objective.model.modules()):
        return one_at_a_time(objective, params, batch)
    try:
        return _batched(objective, objective.loss, params, batch)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # a loss that cannot be batched, which `engine_report` names
        pass
    # outside of `except`, so that an error of the loss itself comes through by itself
    return one_at_a_time(objective, params, batch)


def batching_fault(objective: Objective, params: Params, inputs: TensorTree) -> Exception | None:
    """Why torch.func cannot differentiate the model, tried on synthetic inputs; None if it can."""
    for name, module in objective.model.named_modules():
        if isinstance(module, WITHOUT_VMAP):
            kind = type(module).__name__
            return NotSupportedError(f"torch.func cannot batch {kind}", f"{name}.weight")
    try:
        _batched(objective, _total, params, Examples(inputs, None))
    except Exception as error:  # whatever goes wrong, one record at a time may still work
        return error
    return None


def _total(outputs: TensorTree, _: TensorTree) -> Tensor:
    """A loss that every number of the outputs matters to."""
    sums = [value.sum() for value in tensors_of(outputs) if value.is_floating_point()]
    return torch.stack(sums).sum() if len(sums) > 1 else sums[0]


def outputs_on(model: nn.Module, params: Params, inputs: TensorTree) -> TensorTree:
    """Outputs with other weights, in full precision for the loss."""
    return map_tensors(widen, output_rows(call_on(model, params, inputs)))


def one_at_a_time(objective: Objective, params: Params, batch: Examples) -> tuple[Params, Tensor]:
    """The same by one backward pass per record: slow, and right for every model."""
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    rows, losses = [], []
    unchanged = forbid_side_effects(objective.model, params)
    with mode(objective.model, training=True), unchanged, torch.enable_grad():
        for inputs, targets in split_rows((batch.inputs, batch.targets), 1):
            with objective.training_precision():
                outputs = outputs_on(objective.model, leaves, inputs)
            loss = objective.loss(outputs, targets).reshape(())
            losses.append(loss.detach())
            # the weights again, for what is computed again (torch.utils.checkpoint)
            with use_weights(objective.model, lambda name, own: leaves.get(name, own)):
                rows.append(
                    torch.autograd.grad(
                        loss, list(leaves.values()), allow_unused=True, materialize_grads=True
                    )
                )
    stacked = (torch.stack(column) for column in zip(*rows, strict=True))
    return dict(zip(leaves, stacked, strict=True)), torch.stack(losses)


def _batched(
    objective: Objective, loss: LossFunction, params: Params, batch: Examples
) -> tuple[Params, Tensor]:
    def loss_of_one(params: Params, inputs: list[Tensor], targets: list[Tensor]) -> Tensor:
        inputs_row = with_tensors(batch.inputs, (value.unsqueeze(0) for value in inputs))
        targets_row = with_tensors(batch.targets, (value.unsqueeze(0) for value in targets))
        with objective.training_precision():
            outputs = outputs_on(objective.model, params, inputs_row)
        return loss(outputs, targets_row).reshape(())

    gradient_of_one = vmap(
        grad_and_value(loss_of_one), in_dims=(None, 0, 0), randomness="different"
    )
    unchanged = forbid_side_effects(objective.model, params)
    with mode(objective.model, training=True), unchanged, sdpa_kernel(SDPBackend.MATH):
        # the only attention kernel with a batching rule
        found: tuple[Params, Tensor] = gradient_of_one(
            params, tensors_of(batch.inputs), tensors_of(batch.targets)
        )
    return found
