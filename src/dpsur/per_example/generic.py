"""The gradient of every record's own loss, by the simplest correct means."""

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpsur.functional.call import call_on
from dpsur.functional.parameters import Params
from dpsur.functional.problem import LossFunction, Problem, left_alone, mode
from dpsur.functional.records import Examples
from dpsur.per_example.contributions import wide
from dpsur.per_example.tape import NotSupportedError

# torch.func has no batching rule for these; they are differentiated one record at a time.
WITHOUT_VMAP = (nn.RNNBase,)


def per_example_gradients(problem: Problem, params: Params, batch: Examples) -> Params:
    """Gradients with one row per record, in training mode. Layers draw fresh randomness each."""
    if any(isinstance(module, WITHOUT_VMAP) for module in problem.model.modules()):
        return one_at_a_time(problem, params, batch)
    try:
        return _batched(problem, problem.loss, params, batch)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # a loss that cannot be batched, which `engine_choice` reports
        pass
    # outside of `except`, so that an error of the loss itself comes through by itself
    return one_at_a_time(problem, params, batch)


def batching_fault(problem: Problem, params: Params, inputs: Tensor) -> Exception | None:
    """Why torch.func cannot differentiate the model, tried on made-up inputs; None if it can."""
    for name, module in problem.model.named_modules():
        if isinstance(module, WITHOUT_VMAP):
            kind = type(module).__name__
            return NotSupportedError(f"torch.func cannot batch {kind}", f"{name}.weight")
    try:
        _batched(problem, lambda output, _: output.sum(), params, Examples(inputs, inputs))
    except Exception as error:  # whatever goes wrong, one record at a time may still work
        return error
    return None


def one_at_a_time(problem: Problem, params: Params, batch: Examples) -> Params:
    """One backward pass per record: slow, and right for every model."""
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    rows = []
    alone = left_alone(problem.model, params)
    with mode(problem.model, training=True), alone, torch.enable_grad():
        for input_, target in zip(batch.inputs, batch.targets, strict=True):
            with problem.training_precision():
                output = call_on(problem.model, leaves, input_.unsqueeze(0))
            loss = problem.loss(wide(output), target.unsqueeze(0)).reshape(())
            rows.append(
                torch.autograd.grad(
                    loss, list(leaves.values()), allow_unused=True, materialize_grads=True
                )
            )
    stacked = (torch.stack(column) for column in zip(*rows, strict=True))
    return dict(zip(leaves, stacked, strict=True))


def _batched(problem: Problem, loss: LossFunction, params: Params, batch: Examples) -> Params:
    def loss_of_one(params: Params, input_: Tensor, target: Tensor) -> Tensor:
        with problem.training_precision():
            output = call_on(problem.model, params, input_.unsqueeze(0))
        return loss(wide(output), target.unsqueeze(0)).reshape(())

    gradient_of_one = vmap(grad(loss_of_one), in_dims=(None, 0, 0), randomness="different")
    alone = left_alone(problem.model, params)
    with mode(problem.model, training=True), alone, sdpa_kernel(SDPBackend.MATH):
        # the only attention kernel with a batching rule
        gradients: Params = gradient_of_one(params, batch.inputs, batch.targets)
    return gradients
