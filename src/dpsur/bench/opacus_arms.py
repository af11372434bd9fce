"""Opacus by its public interface, imported only when one of its arms is asked for."""

import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpsur.bench.cell import MAX_GRAD_NORM, NOISE_MULTIPLIER, Cell, NotInstalledError, sgd
from dpsur.core.streams import NOISE
from dpsur.core.types import Params

HOOKS, GHOST = "hooks", "ghost"


class OpacusStep:
    """The training step that Opacus documents, with per-example gradients or ghost clipping.

    Layers that it does not take as they are (LSTM, attention) are replaced by its own, as it
    recommends. The batch is fixed (`poisson_sampling=False`), the accountant's hook is left in.
    """

    def __init__(self, cell: Cell, mode: str) -> None:
        try:
            from opacus import PrivacyEngine
        except ImportError as error:
            raise NotInstalledError("not installed (pip install opacus)") from error
        self._batch = cell.batch
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
                poisson_sampling=False,
                noise_generator=cell.streams()[NOISE],
                grad_sample_mode=mode,
            )
        self._model: Any = made[0]
        self._optimizer: Any = made[1]
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
        self._loss(self._model(self._batch.inputs), self._batch.targets).backward()


def hooks_step(cell: Cell) -> OpacusStep:
    """Per-example gradients by hooks, its default."""
    return OpacusStep(cell, HOOKS)


def ghost_step(cell: Cell) -> OpacusStep:
    """Ghost clipping: norms in one backward pass, the clipped sum in a second."""
    return OpacusStep(cell, GHOST)


def _one_batch(cell: Cell) -> "DataLoader[tuple[torch.Tensor, ...]]":
    """A loader whose only batch is the cell's: it tells the engine the batch size."""
    data = TensorDataset(cell.batch.inputs, cell.batch.targets)
    return DataLoader(data, batch_size=len(cell.batch))
