"""The gradient of every record's own loss, by the simplest correct means."""

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpsur.core.problem import Problem, mode
from dpsur.core.types import Examples, Params

# torch.func has no batching rule for these; they are differentiated one record at a time.
WITHOUT_VMAP = (nn.RNNBase,)


def per_example_gradients(problem: Problem, params: Params, batch: Examples) -> Params:
    """Gradients with one row per record, in training mode. Layers draw fresh randomness each."""

    def loss_of_one(params: Params, input_: Tensor, target: Tensor) -> Tensor:
        output = functional_call(problem.model, params, (input_.unsqueeze(0),))
        return problem.loss(output, target.unsqueeze(0)).reshape(())

    gradient_of_one = grad(loss_of_one)
    with mode(problem.model, training=True):
        if any(isinstance(module, WITHOUT_VMAP) for module in problem.model.modules()):
            return _one_at_a_time(problem, params, batch)
        batched = vmap(gradient_of_one, in_dims=(None, 0, 0), randomness="different")
        with sdpa_kernel(SDPBackend.MATH):  # the only attention kernel with a batching rule
            gradients: Params = batched(params, batch.inputs, batch.targets)
        return gradients


def _one_at_a_time(problem: Problem, params: Params, batch: Examples) -> Params:
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    rows = []
    for input_, target in zip(batch.inputs, batch.targets, strict=True):
        output = functional_call(problem.model, leaves, (input_.unsqueeze(0),))
        loss = problem.loss(output, target.unsqueeze(0)).reshape(())
        rows.append(
            torch.autograd.grad(
                loss, list(leaves.values()), allow_unused=True, materialize_grads=True
            )
        )
    stacked = (torch.stack(column) for column in zip(*rows, strict=True))
    return dict(zip(leaves, stacked, strict=True))
