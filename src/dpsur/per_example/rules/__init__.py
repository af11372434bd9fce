"""What is known about kinds of layers: so that one backward pass suffices, or why they are refused.

A rule is a function `rule(module, tape, *args, **kwargs)` that stands in for `module.forward`. It
returns what the layer returns and has the tape watch an output, with a record that turns the
output's gradient into contributions to the gradients of the layer's parameters
(`per_example/contributions.py`). A call that it does not cover raises `NotSupportedError`, and the
layer is followed through its operations.

To add one: write it in a file here, list it in `RULES` below and give it configurations in
`tests/per_example/test_gradient_rules.py`, where all rules pass the same test. A layer without a
rule works as well: it is followed through the operations that use its weights.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import is_parametrized

from dpsur.per_example.rules.attention import attention
from dpsur.per_example.rules.convolution import convolution_map
from dpsur.per_example.rules.embedding import embedding_bag_map, embedding_map
from dpsur.per_example.rules.linear import frozen_linear, linear_map
from dpsur.per_example.rules.normalization import group_norm_map, layer_norm_map, rms_norm_map
from dpsur.per_example.rules.pooling import max_pool
from dpsur.per_example.rules.recurrent import recurrent_cell, recurrent_layer
from dpsur.per_example.tape import Tape

Rule = Callable[..., Any]


def _as_operation(operation: Callable[..., Any], *names: str) -> Rule:
    """The rule of an operation, for a layer that gives it these attributes of its own."""

    def rule(module: nn.Module, tape: Tape, *args: Any, **kwargs: Any) -> Any:
        own = {name: getattr(module, name) for name in names}
        return operation(tape, *args, **own, **kwargs)

    return rule


_TABLE = ("weight", "padding_idx", "max_norm", "scale_grad_by_freq", "sparse")
_bag = _as_operation(embedding_bag_map, "mode", *_TABLE)


def _embedding_bag(
    module: nn.Module,
    tape: Tape,
    input: Tensor,
    offsets: Any = None,
    per_sample_weights: Any = None,
) -> Any:
    return _bag(module, tape, input, offsets=offsets, per_sample_weights=per_sample_weights)


_CONVOLUTION = _as_operation(
    convolution_map, "weight", "bias", "stride", "padding", "dilation", "groups", "padding_mode"
)
RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: _as_operation(linear_map, "weight", "bias"),
    nn.Conv1d: _CONVOLUTION,
    nn.Conv2d: _CONVOLUTION,
    nn.Conv3d: _CONVOLUTION,
    nn.Embedding: _as_operation(embedding_map, *_TABLE),
    nn.EmbeddingBag: _embedding_bag,
    nn.GroupNorm: _as_operation(group_norm_map, "num_groups", "weight", "bias", "eps"),
    nn.LayerNorm: _as_operation(layer_norm_map, "normalized_shape", "weight", "bias", "eps"),
    nn.RMSNorm: _as_operation(rms_norm_map, "normalized_shape", "weight", "eps"),
    nn.LSTM: recurrent_layer,
    nn.GRU: recurrent_layer,
    nn.RNN: recurrent_layer,
    nn.LSTMCell: recurrent_cell,
    nn.GRUCell: recurrent_cell,
    nn.RNNCell: recurrent_cell,
    nn.MultiheadAttention: attention,
}

# Layers without trained parameters that a faster way to the same values stands in for.
FASTER: dict[type[nn.Module], Rule] = {nn.MaxPool2d: max_pool, nn.Linear: frozen_linear}


def kind_of(
    module: nn.Module, rules: dict[type[nn.Module], Rule] = RULES
) -> type[nn.Module] | None:
    """The kind of layer whose rule is right for a layer: its nearest class that has one."""
    kind = next((kind for kind in type(module).__mro__ if kind in rules), None)
    if kind is None or is_parametrized(module) or "forward" in vars(module):
        return None
    changed = any(
        getattr(type(module), name, None) is not getattr(kind, name, None)
        for name in ("forward", "_conv_forward")
    )
    return None if changed else kind


# Layers that shorten the rows of their table in place, if they are given a max_norm.
TABLES = (nn.Embedding, nn.EmbeddingBag)


class LayerFault(NamedTuple):
    """Why a layer is refused, what to do, and whether `dpsur.fix` does it."""

    reason: str
    remedy: str
    fixable: bool = True

    def describe(self, name: str, module: nn.Module) -> str:
        """The same as a sentence about a module."""
        hint = " (dpsur.fix does this)" if self.fixable else ""
        kind = type(module).__name__
        return f"module {name or '(root)'} ({kind}) {self.reason}; {self.remedy}{hint}"


def layer_fault(module: nn.Module) -> LayerFault | None:
    """Why no record's gradient is defined where a layer is trained with, or None."""
    if isinstance(module, _BatchNorm):
        return LayerFault(
            "mixes the examples of a batch, so one record's gradient is not defined",
            "replace it with nn.GroupNorm, or keep its statistics, as those of public pretraining: "
            'dpsur.fix(model, batch_norm="frozen")',
            not isinstance(module, nn.modules.lazy.LazyModuleMixin),
        )
    if getattr(module, "track_running_stats", False):
        return LayerFault(
            "keeps statistics of private records in its buffers",
            "set track_running_stats=False",
            isinstance(module, _InstanceNorm),
        )
    if isinstance(module, torch.jit.ScriptModule):
        return LayerFault(
            "is compiled by TorchScript, inside which layers cannot be watched",
            "give the module that it was made from, and script the trained one",
            fixable=False,
        )
    if isinstance(module, TABLES) and module.sparse:
        return LayerFault("has sparse gradients", "set sparse=False")
    if isinstance(module, TABLES) and module.max_norm is not None:
        return LayerFault(
            "shortens the rows of its table that private records name, without noise",
            "set max_norm=None, or shorten what it returns (F.normalize of the output)",
        )
    return None
