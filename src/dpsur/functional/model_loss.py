"""The loss that a Hugging Face model has for its labels, computed for each record alone.

The models themselves average over a batch: over all of its tokens, for a language model. That
couples records, for a long text makes the gradients of short ones smaller before they are clipped.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from dpsur.errors import InvalidInputError

# What labels are called, in records of a task and in arguments of models.
LABELS = ("labels", "label", "label_ids")
SPANS = ("start_positions", "end_positions")
_IGNORED = -100  # of a token without a label


def is_transformers_model(model: nn.Module) -> bool:
    return hasattr(getattr(_base(model), "config", None), "model_type")


def _base(model: nn.Module) -> nn.Module:
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model


def model_loss(model: nn.Module) -> "ModelLoss":
    """The loss of a model of `transformers`, wrapped by peft or not.

    Cross entropy for classes and tokens, squared error for one number, binary cross entropy for
    several labels at once. A causal language model predicts the next token; tokens with the label
    -100 do not count, and a text is averaged over its own tokens.
    """
    return ModelLoss(shift=re.search("CausalLM|LMHead", type(_base(model)).__name__) is not None)


@dataclass(frozen=True)
class ModelLoss:
    """A loss of outputs with `logits` and of labels. With `shift`, of the token that comes next."""

    shift: bool = False

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """The mean over what a record is asked."""
        if isinstance(targets, Mapping) and set(targets) == set(SPANS):
            ends = (_pick(outputs, "start_logits"), _pick(outputs, "end_logits"))
            losses = [
                F.cross_entropy(logits, targets[name].clamp(0, logits.shape[1] - 1))
                for logits, name in zip(ends, SPANS, strict=True)
            ]
            return (losses[0] + losses[1]) / 2
        logits = outputs if isinstance(outputs, Tensor) else _pick(outputs, "logits")
        if targets.is_floating_point():
            if logits.shape[1:] == targets.shape[1:] and logits.shape[-1] > 1:
                return F.binary_cross_entropy_with_logits(logits, targets)
            return F.mse_loss(logits.reshape(targets.shape), targets)
        if logits.dim() == 2:
            return F.cross_entropy(logits, targets.long())
        if self.shift:
            logits, targets = logits[:, :-1], targets[:, 1:]
        tokens = F.cross_entropy(
            logits.transpose(1, 2), targets.long(), ignore_index=_IGNORED, reduction="none"
        )
        count = (targets != _IGNORED).sum().clamp(min=1)
        mean: Tensor = tokens.sum() / count
        return mean


def _pick(outputs: Any, name: str) -> Tensor:
    value = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
    if not isinstance(value, Tensor):
        raise InvalidInputError(
            f"the model returns no {name}; give a loss that maps (outputs, targets) to a number"
        )
    return value


def split_labels(record: Mapping[str, Any]) -> tuple[dict[str, Any], Any] | None:
    """Inputs and targets of a mapping that holds both, as Hugging Face data sets do."""
    if all(name in record for name in SPANS):
        inputs = {str(key): value for key, value in record.items() if key not in SPANS}
        return inputs, {name: record[name] for name in SPANS}
    named = [name for name in LABELS if name in record]
    if len(named) != 1 or len(record) < 2:
        return None
    return {str(k): v for k, v in record.items() if k != named[0]}, record[named[0]]
