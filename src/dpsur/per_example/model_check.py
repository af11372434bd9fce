"""Refuse models for which the gradient of one record is not defined, and say what to use."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpsur.errors import ModelInputError, UnsupportedModelError, from_custom_code
from dpsur.functional.problem import mode
from dpsur.functional.records import Examples
from dpsur.functional.side_effects import refuse_memory
from dpsur.functional.tree import TensorTree, describe_rows, map_tensors
from dpsur.per_example.mixing_check import (
    call_watched,
    check_mixing,
    random_rows,
    same_bits,
    synthetic,
)
from dpsur.per_example.padding_check import check_padding

# Layers that shorten the rows of their table in place, if they are given a max_norm.
_TABLES = (nn.Embedding, nn.EmbeddingBag)
# Batches on which a model is called to see whether it remembers any: of several sizes.
_ROWS = (2, 1, 3)


def check_model(model: nn.Module, examples: Examples) -> TensorTree:
    """Check a model before any record reaches it, on synthetic inputs of the records' shape.

    Returns the outputs for the synthetic inputs, whose shape says what the model predicts.
    """
    _check_parameters(model)
    _check_known_mixers(model)
    return _try_out(model, examples.inputs)


def draws_randomness(model: nn.Module, examples: Examples) -> bool:
    """Whether a forward pass in training mode draws random numbers, as dropout does."""
    with torch.no_grad(), mode(model, training=True):
        where = next(model.parameters()).device  # not always where the records are
        rows = map_tensors(lambda value: value.to(where), synthetic(examples.inputs, 2))
        return call_watched(model, rows).drew


def _check_parameters(model: nn.Module) -> None:
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise UnsupportedModelError(
            "the model has no parameter that requires a gradient; unfreeze the layers to train"
        )
    for name, value in trainable:
        if value.dtype not in (torch.float32, torch.float64):
            raise UnsupportedModelError(
                f"parameter {name} is {value.dtype}; convert the model with model.float()"
            )
        if not value.isfinite().all():
            raise UnsupportedModelError(
                f"parameter {name} holds values that are not finite; initialise the model again"
            )


def _check_known_mixers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        kind = type(module).__name__
        where = f"module {name or '(root)'} ({kind})"
        if isinstance(module, _BatchNorm):
            raise UnsupportedModelError(
                f"{where} mixes the examples of a batch, so one record's gradient is not defined; "
                "replace it with nn.GroupNorm"
            )
        if getattr(module, "track_running_stats", False):
            raise UnsupportedModelError(
                f"{where} keeps statistics of private records in its buffers; "
                "set track_running_stats=False"
            )
        if isinstance(module, _TABLES) and module.sparse:
            raise UnsupportedModelError(f"{where} has sparse gradients; set sparse=False")
        if isinstance(module, _TABLES) and module.max_norm is not None:
            raise UnsupportedModelError(
                f"{where} shortens the rows of its table that private records name, without noise; "
                "set max_norm=None, or shorten what it returns (F.normalize of the output)"
            )


def _try_out(model: nn.Module, inputs: TensorTree) -> TensorTree:
    """Call the model on synthetic inputs in many ways, and say what went wrong."""
    before = {name: value.clone() for name, value in _tensors(model)}
    try:
        refuse_memory("model", model, partial(_call, inputs), UnsupportedModelError, weights=False)
        outputs = check_mixing(model, inputs)
        check_padding(model, inputs)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, UnsupportedModelError):
            raise
        about = f"inputs of {describe_rows(inputs, 2)}"
        if from_custom_code(error):  # which its author knows best how to read
            error.add_note(f"dpsur: raised when the model was tried on synthetic {about}")
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelInputError(f"the model cannot take {about}: {reason}") from error
    for name, value in _tensors(model):
        if not same_bits(value, before[name]):
            raise UnsupportedModelError(
                f"{name} changes during a forward pass and would carry private records into the "
                "release; make the forward pass free of side effects"
            )
    return outputs


def _call(inputs: TensorTree, model: nn.Module, number: int) -> None:
    """Call a model in all the ways that training does, each time on other synthetic records."""
    rows = random_rows(inputs, _ROWS[number], seed=10 + number)
    for training, gradients in product((True, False), (True, False)):
        with mode(model, training=training), torch.set_grad_enabled(gradients):
            call_watched(model, rows)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Whatever a release holds: buffers, and parameters whether they are trained or not."""
    yield from ((f"buffer {name}", value) for name, value in model.named_buffers())
    yield from ((f"parameter {name}", value.detach()) for name, value in model.named_parameters())
