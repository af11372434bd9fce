"""What an attack reads off a model: answers, losses, and gradients of the last layer."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur.attacks.models import ROWS_AT_ONCE, Models
from dpsur.errors import InvalidInputError
from dpsur.functional.records import Examples


def posteriors(models: Models, examples: Examples, index: int = 0) -> Tensor:
    """Probabilities of the classes, as one of the models gives them."""
    return models.outputs(examples.inputs)[index].double().softmax(1)


def log_odds(outputs: Tensor, targets: Tensor) -> Tensor:
    """log(p / (1 - p)) of the true class, without ever forming p.

    `outputs` may have further dimensions in front of (records, classes).
    """
    outputs = outputs.double()
    index = targets.to(outputs.device).expand(outputs.shape[:-1]).unsqueeze(-1)
    true = outputs.gather(-1, index)
    rest = outputs.scatter(-1, index, float("-inf"))
    return true.squeeze(-1) - rest.logsumexp(-1)


def last_layer(module: nn.Module) -> nn.Linear:
    """The linear layer that gives the outputs: the last one that is registered."""
    layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
    if not layers:
        raise InvalidInputError(
            f"{type(module).__name__} has no linear layer whose gradient could be read"
        )
    return layers[-1]


@contextmanager
def _recorded(layer: nn.Linear) -> Iterator[list[Tensor]]:
    """What goes into a layer while the context is open."""
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    try:
        yield seen
    finally:
        handle.remove()


def last_layer_gradients(module: nn.Module, examples: Examples) -> tuple[Tensor, Tensor]:
    """Outputs, and each record's own gradient of cross-entropy by the last layer's weights.

    For outputs W h + b the gradient is (p - y) h^T, a matrix a record, with the gradient by b as a
    further column. Nothing is summed over records.
    """
    layer = last_layer(module)
    outputs, gradients = [], []
    device = layer.weight.device
    for start in range(0, len(examples), ROWS_AT_ONCE):
        rows = torch.arange(start, min(start + ROWS_AT_ONCE, len(examples)))
        part = examples.select(rows.to(examples.inputs.device)).to(device)
        with torch.no_grad(), _recorded(layer) as seen:
            answer = module(part.inputs)
        hidden = F.pad(seen[0], (0, 1), value=1.0)
        errors = answer.softmax(1) - F.one_hot(part.targets, answer.shape[1]).to(answer.dtype)
        outputs.append(answer)
        gradients.append(errors.unsqueeze(2) * hidden.unsqueeze(1))
    return torch.cat(outputs), torch.cat(gradients)
