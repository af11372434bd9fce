"""Refuse models for which the gradient of one record is not defined, and say what to use."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpsur.core.problem import mode
from dpsur.core.types import Examples
from dpsur.errors import UnsupportedModelError

_TOLERANCE = 1e-3
# Layers that shorten the rows of their table in place, if they are given a max_norm.
_TABLES = (nn.Embedding, nn.EmbeddingBag)


def check_model(model: nn.Module, examples: Examples) -> Tensor:
    """Check a model before any record reaches it, on made-up inputs of the records' shape.

    Returns the outputs for the made-up inputs, whose shape tells what the model predicts.
    """
    _check_parameters(model)
    _check_known_mixers(model)
    return _probe(model, examples.inputs)


def draws_randomness(model: nn.Module, examples: Examples) -> bool:
    """Whether a forward pass in training mode draws random numbers, as dropout does."""
    with torch.no_grad(), mode(model, training=True):
        where = next(model.parameters()).device  # not always where the records are
        return _watched(model, made_up(examples.inputs, 2).to(where))[2]


def _generator_state(inputs: Tensor) -> Tensor:
    if inputs.is_cuda:
        return torch.cuda.get_rng_state(inputs.device)
    return torch.get_rng_state()


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
        if getattr(module, "max_norm", None) is not None and isinstance(module, _TABLES):
            raise UnsupportedModelError(
                f"{where} shortens the rows of its table that private records name, without noise; "
                "set max_norm=None, or shorten what it returns (F.normalize of the output)"
            )


def _probe(model: nn.Module, inputs: Tensor) -> Tensor:
    """Run made-up records in different company: a row's outputs must not depend on it.

    In both modes, since gradients are taken in training mode and losses in evaluation mode.
    """
    rows = made_up(inputs, 3)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    try:
        for training in (True, False):
            together = _compared(model, rows, training=training)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, UnsupportedModelError):
            raise
        reason = str(error).strip().splitlines()[0]
        raise UnsupportedModelError(
            f"the model cannot take inputs of shape {tuple(rows[:2].shape)} and type "
            f"{rows.dtype}: {reason}"
        ) from error
    changed = [n for n, v in model.named_buffers() if not torch.equal(v, buffers[n])]
    if changed:
        raise UnsupportedModelError(
            f"buffer {changed[0]} changes during a forward pass and would carry private records "
            "into the release; make the forward pass free of side effects"
        )
    return together


def _compared(model: nn.Module, rows: Tensor, *, training: bool) -> Tensor:
    """Outputs of two records, after comparing the first with itself in other company and alone."""
    with torch.no_grad(), mode(model, training=training):
        together, seen, drew = _watched(model, rows[:2])
        if not isinstance(together, Tensor) or not together.dim() or len(together) != 2:
            raise UnsupportedModelError(
                "the model must return one tensor with one row per example; wrap it in a module "
                "that does"
            )
        # The same draws in the same shape: layers such as dropout do not disturb this comparison,
        # while alone they draw other numbers.
        others = [_watched(model, rows[[0, 2]])[1]]
        if not drew:
            others.append(_watched(model, rows[:1])[1])
    for name, output in seen.items():
        if not all(_same_row(output, other.get(name)) for other in others):
            raise UnsupportedModelError(
                f"module {name or '(root)'} ({type(model.get_submodule(name)).__name__}) gives an "
                "example another output when it has other company in the batch; replace it with a "
                "layer that treats each example by itself, such as nn.GroupNorm or nn.LayerNorm"
            )
    return together


def made_up(inputs: Tensor, rows: int) -> Tensor:
    """Records of the same shape and type that say nothing about the real ones."""
    shape = (rows, *inputs.shape[1:])
    generator = torch.Generator().manual_seed(0)
    if inputs.dtype.is_floating_point:
        values = torch.randn(shape, generator=generator)
    else:
        values = torch.randint(0, 2, shape, generator=generator)
    return values.to(device=inputs.device, dtype=inputs.dtype)


def _watched(model: nn.Module, inputs: Tensor) -> tuple[object, dict[str, Tensor], bool]:
    """Outputs of the model and of its modules in the order they finish; whether it drew numbers."""
    seen: dict[str, Tensor] = {}

    def watch(name: str) -> torch.utils.hooks.RemovableHandle:
        def note(_: nn.Module, __: object, output: object) -> None:
            if isinstance(output, Tensor) and len(output.shape) and len(output) == len(inputs):
                seen[name] = output.clone()  # a later layer may overwrite it in place

        return model.get_submodule(name).register_forward_hook(note)

    handles = [watch(name) for name, _ in model.named_modules()]
    devices = [inputs.device] if inputs.is_cuda else []
    try:
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            before = _generator_state(inputs)
            outputs = model(inputs)
            return outputs, seen, not torch.equal(before, _generator_state(inputs))
    finally:
        for handle in handles:
            handle.remove()


def _same_row(together: Tensor, alone: Tensor | None) -> bool:
    if alone is None or alone.shape[1:] != together.shape[1:]:
        return True  # a module that folds other dimensions into the batch is judged by its parent
    if not together.dtype.is_floating_point:
        return torch.equal(together[0], alone[0])
    return torch.allclose(together[0], alone[0], rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
