"""What is known about single kinds of layers, so that one backward pass suffices for them.

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
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from dpsur.per_example.rules.attention import attention
from dpsur.per_example.rules.convolution import convolution
from dpsur.per_example.rules.embedding import embedding, embedding_bag
from dpsur.per_example.rules.linear import frozen_linear, linear
from dpsur.per_example.rules.normalization import (
    group_norm,
    layer_norm,
    rms_norm,
)
from dpsur.per_example.rules.pooling import max_pool
from dpsur.per_example.rules.recurrent import recurrent_cell, recurrent_layer
from dpsur.per_example.rules.transposed_convolution import transposed_convolution

Rule = Callable[..., Any]

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: convolution,
    nn.ConvTranspose1d: transposed_convolution,
    nn.ConvTranspose2d: transposed_convolution,
    nn.ConvTranspose3d: transposed_convolution,
    nn.Embedding: embedding,
    nn.EmbeddingBag: embedding_bag,
    nn.GroupNorm: group_norm,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
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
    """The kind of layer whose rule is right for a layer."""
    if is_parametrized(module) or "forward" in vars(module):
        return None
    for kind in rules:
        if isinstance(module, kind):
            changed = any(
                getattr(type(module), name, None) is not getattr(kind, name, None)
                for name in ("forward", "_conv_forward")
            )
            return None if changed else kind
    return None


def why_no_rule(module: nn.Module) -> str | None:
    """Why a layer has no rule, in words; None if it has one."""
    if kind_of(module) is not None:
        return None
    known = next((kind for kind in RULES if isinstance(module, kind)), None)
    if is_parametrized(module):
        return "no rule: its weight is parametrized"
    if "forward" in vars(module):
        return "no rule: its forward method was replaced"
    if known is not None:
        return f"no rule: a subclass of nn.{known.__name__} with another forward method"
    return f"no rule for {type(module).__name__}"
