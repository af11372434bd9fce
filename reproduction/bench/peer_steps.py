"""The steps that ours are compared with: two simple ways to DP-SGD, and Opacus.

Opacus is used by its public interface, and imported only when one of its arms is asked for.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

from dpsur.functional.tree import Params
from reproduction.bench.basic_arms import (
    MAX_GRAD_NORM,
    NOISE_MULTIPLIER,
    Cell,
    NotInstalledError,
    sgd,
)

HOOKS, GHOST = "hooks", "ghost"


class PerExampleStep:
    """DP-SGD from per-example gradients that a subclass finds, as a user would write it."""

    def __init__(self, cell: Cell) -> None:
        self._batch, self._loss = cell.batch, cell.loss
        self._model = cell.model()
        self._params = dict(self._model.named_parameters())
        self._optimizer = sgd(self._model)
        self._generator = cell.generator()

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
            return self._loss(output, target.unsqueeze(0))

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
            loss = self._loss(output, self._batch.targets[row : row + 1])
            gradients = torch.autograd.grad(loss, list(self._params.values()))
            norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
            scale = (MAX_GRAD_NORM / norm).clamp(max=1.0)
            for value, gradient in zip(total.values(), gradients, strict=True):
                value += scale * gradient
        return total


class OpacusStep:
    """The training step that Opacus documents, with per-example gradients or ghost clipping.

    Layers that it does not take as they are (LSTM, attention) are replaced by its own, as it
    recommends. The batch is fixed, unless one is given from `loader`; the accountant's hook is left
    in.
    """

    def __init__(self, cell: Cell, mode: str, *, poisson_sampling: bool = False) -> None:
        try:
            from opacus import PrivacyEngine
        except ImportError as error:
            raise NotInstalledError("not installed (pip install opacus)") from error
        self._cell, self._batch = cell, cell.batch
        self._mode = mode
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own random numbers, on purpose not secure
            engine = PrivacyEngine()
            model = engine.get_compatible_module(cell.model())
            made = engine.make_private(
                module=model,
                optimizer=sgd(model),
                criterion=nn.CrossEntropyLoss(),
                data_loader=_one_batch(cell),
                noise_multiplier=NOISE_MULTIPLIER,
                max_grad_norm=MAX_GRAD_NORM,
                poisson_sampling=poisson_sampling,
                noise_generator=cell.generator(),
                grad_sample_mode=mode,
            )
        self._model: Any = made[0]
        self._optimizer: Any = made[1]
        self.loader: Any = made[-1]
        self._loss: Any = made[2] if mode == GHOST else nn.CrossEntropyLoss()

    def __call__(self) -> None:
        """Make the step."""
        self._backward()
        self._optimizer.step()

    def clipped_sum(self) -> Params:
        """What its optimizer would add noise to."""
        self._backward()
        if self._mode == GHOST:
            self._optimizer.accumulate()
        else:
            self._optimizer.clip_and_accumulate()
        found = {
            name.removeprefix("_module."): value.summed_grad.detach().clone()
            for name, value in self._model.named_parameters()
        }
        self._optimizer.zero_grad()
        return found

    def _backward(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        with self._cell.precision():
            outputs = self._model(self._batch.inputs)
        outputs, targets = outputs.float(), self._batch.targets
        if targets.dim() == 1:
            self._loss(outputs, targets).backward()
        elif self._mode == GHOST:  # a label at every position, as it wants them
            shape = outputs.shape
            self._loss(outputs.flatten(0, 1), targets.flatten(), shape=shape).backward()
        else:
            torch.autograd.backward(self._cell.loss(outputs, targets))


def hooks_step(cell: Cell) -> OpacusStep:
    """Per-example gradients by hooks, its default."""
    return OpacusStep(cell, HOOKS)


def ghost_step(cell: Cell) -> OpacusStep:
    """Ghost clipping: norms in one backward pass, the clipped sum in a second."""
    return OpacusStep(cell, GHOST)


def _one_batch(cell: Cell) -> "DataLoader[tuple[torch.Tensor, ...]]":
    """A loader whose only batch is the cell's: the engine reads the batch size from it."""
    data = TensorDataset(cell.batch.inputs, cell.batch.targets)
    return DataLoader(data, batch_size=len(cell.batch))
