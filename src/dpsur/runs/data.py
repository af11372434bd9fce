"""From what a user has to checked tensors."""

from collections.abc import Sized
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur.core.types import Examples, LossFunction
from dpsur.errors import InvalidInputError

CLASSIFICATION_LOSSES = (F.cross_entropy, F.nll_loss)
CLASSIFICATION_LOSS_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)


def as_examples(data: Any, name: str) -> Examples:
    """Take a pair of tensors, a map-style data set or ready examples, and check the values."""
    if isinstance(data, Examples):
        examples = data
    elif isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[0], Tensor):
        examples = Examples(torch.as_tensor(data[0]), torch.as_tensor(data[1]))
    elif hasattr(data, "__getitem__") and isinstance(data, Sized):
        examples = _stack(data, name)
    else:
        raise InvalidInputError(
            f"{name} must be a pair of tensors or a map-style data set with a length, "
            f"got {type(data).__name__}"
        )
    _check_values(examples, name)
    return examples


def _stack(data: Any, name: str) -> Examples:
    if len(data) == 0:
        raise InvalidInputError(f"{name} is empty; there must be at least one record")
    inputs, targets = [], []
    for index in range(len(data)):
        item = data[index]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise InvalidInputError(
                f"{name}[{index}] must be a pair (input, target), got {type(item).__name__}"
            )
        inputs.append(torch.as_tensor(item[0]))
        targets.append(torch.as_tensor(item[1]))
        if inputs[-1].shape != inputs[0].shape or targets[-1].shape != targets[0].shape:
            raise InvalidInputError(
                f"{name}[{index}] has an input of shape {tuple(inputs[-1].shape)}, the first "
                f"record {tuple(inputs[0].shape)}; pad or crop the records to one shape"
            )
    return Examples(torch.stack(inputs), torch.stack(targets))


def _check_values(examples: Examples, name: str) -> None:
    if len(examples) == 0:
        raise InvalidInputError(f"{name} is empty; there must be at least one record")
    for part, values in (("inputs", examples.inputs), ("targets", examples.targets)):
        if values.dtype.is_floating_point and not values.isfinite().all():
            bad = (
                int((~values.isfinite()).flatten(1).any(1).nonzero()[0]) if values.dim() > 1 else 0
            )
            raise InvalidInputError(
                f"the {part} of {name} hold NaN or infinity (first at record {bad}); "
                "clean or impute them first"
            )


def is_classification(loss: LossFunction) -> bool:
    """Whether the loss takes class indices."""
    return loss in CLASSIFICATION_LOSSES or isinstance(loss, CLASSIFICATION_LOSS_MODULES)


def check_labels(examples: Examples, outputs: Tensor, loss: LossFunction, name: str) -> None:
    """Refuse class indices that the model has no output for."""
    targets = examples.targets
    if not is_classification(loss) or targets.dtype.is_floating_point:
        return
    if outputs.dim() < 2:
        raise InvalidInputError(
            f"the model returns outputs of shape {tuple(outputs.shape)}; a classification loss "
            "needs one score per class"
        )
    classes = outputs.shape[1]
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= classes:
        raise InvalidInputError(
            f"the labels of {name} run from {low} to {high}, but the model has {classes} outputs "
            f"(labels 0 to {classes - 1}); fix the labels or widen the model"
        )
