"""Plain PyTorch, eager and captured, and the two simple ways to DP-SGD."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpsur.bench.cell import MAX_GRAD_NORM, NOISE_MULTIPLIER, Cell, sgd
from dpsur.core.graphs import graph_of
from dpsur.core.streams import NOISE
from dpsur.core.types import Params


class PlainStep:
    """Ordinary PyTorch, without privacy: forward, backward of the mean loss, momentum step."""

    def __init__(self, cell: Cell) -> None:
        self._batch = cell.batch
        self._model = cell.model()
        self._optimizer = sgd(self._model)

    def __call__(self) -> None:
        """Make the step."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self._model(self._batch.inputs), self._batch.targets)
        torch.autograd.backward(loss)
        self._optimizer.step()


class CapturedPlainStep:
    """The same as one CUDA graph, replayed: plain PyTorch without the cost of launching kernels."""

    def __init__(self, cell: Cell) -> None:
        step = PlainStep(cell)
        self._step = step  # keeps alive the tensors whose addresses the graph replays
        self._replay = graph_of(step, cell.device)

    def __call__(self) -> None:
        """Replay the step."""
        self._replay()


class PerExampleStep:
    """DP-SGD from per-example gradients that a subclass finds, as a user would write it."""

    def __init__(self, cell: Cell) -> None:
        self._batch = cell.batch
        self._model = cell.model()
        self._params = dict(self._model.named_parameters())
        self._optimizer = sgd(self._model)
        self._generator = cell.streams()[NOISE]

    def clipped_sum(self) -> Params:
        """The sum of clipped gradients."""
        raise NotImplementedError

    def __call__(self) -> None:
        """Make the step."""
        scale = MAX_GRAD_NORM * NOISE_MULTIPLIER
        for name, total in self.clipped_sum().items():
            noise = torch.randn(total.shape, generator=self._generator, device=total.device)
            self._params[name].grad = (total + scale * noise) / len(self._batch)
        self._optimizer.step()


class VmapStep(PerExampleStep):
    """Per-example gradients of the whole batch by `torch.func`."""

    def clipped_sum(self) -> Params:
        """Gradients with one row per example, then norms, then the weighted sum."""
        params = {name: value.detach() for name, value in self._params.items()}

        def loss_of_one(params: Params, input_: Tensor, target: Tensor) -> Tensor:
            output = functional_call(self._model, params, (input_.unsqueeze(0),))
            return F.cross_entropy(output, target.unsqueeze(0))

        with sdpa_kernel(SDPBackend.MATH):  # the only attention kernel with a batching rule
            gradients: Params = vmap(grad(loss_of_one), in_dims=(None, 0, 0))(
                params, self._batch.inputs, self._batch.targets
            )
        squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()])
        scales = (MAX_GRAD_NORM / squares.sum(0).sqrt()).clamp(max=1.0)
        return {name: torch.tensordot(scales, g, dims=1) for name, g in gradients.items()}


class LoopStep(PerExampleStep):
    """One example after another, as the authors' released code does it."""

    def clipped_sum(self) -> Params:
        """Clip and add up gradients one by one."""
        total = {name: torch.zeros_like(value) for name, value in self._params.items()}
        for row in range(len(self._batch)):
            output = self._model(self._batch.inputs[row : row + 1])
            loss = F.cross_entropy(output, self._batch.targets[row : row + 1])
            gradients = torch.autograd.grad(loss, list(self._params.values()))
            norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
            scale = (MAX_GRAD_NORM / norm).clamp(max=1.0)
            for value, gradient in zip(total.values(), gradients, strict=True):
                value += scale * gradient
        return total
