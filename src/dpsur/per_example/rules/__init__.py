"""What is known about kinds of layers: so that one backward pass suffices, or why they are refused.

Most layers are one operation on their weights, `F.linear` or `F.conv2d`, whose rule is found in
`per_example/operations.py`. A rule of a layer is a function `rule(module, tape, *args, **kwargs)`
that stands in for `module.forward`. It returns what the layer returns and has the tape watch an
output, with a record that turns the output's gradient into contributions to the gradients of the
layer's parameters (`per_example/contributions.py`). A call that it does not cover raises
`NotSupportedError`, and the layer is followed through its operations.

To add one: write it in a file here, list it in `RULES` below and give it configurations in
`tests/per_example/test_gradient_rules.py`, where all rules pass the same test. A layer without a
rule works as well: it is followed through the operations that use its weights.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import is_parametrized

from dpsur.per_example.rules.attention import attention
from dpsur.per_example.rules.pooling import max_pool
from dpsur.per_example.rules.recurrent import recurrent_cell, recurrent_layer

Rule = Callable[..., Any]

RULES: dict[type[nn.Module], Rule] = {
    nn.LSTM: recurrent_layer,
    nn.GRU: recurrent_layer,
    nn.RNN: recurrent_layer,
    nn.LSTMCell: recurrent_cell,
    nn.GRUCell: recurrent_cell,
    nn.RNNCell: recurrent_cell,
    nn.MultiheadAttention: attention,
    nn.MaxPool2d: max_pool,
}


def kind_of(module: nn.Module) -> type[nn.Module] | None:
    """The kind of layer whose rule is right for a layer: its nearest class that has one."""
    kind = next((kind for kind in type(module).__mro__ if kind in RULES), None)
    if kind is None or is_parametrized(module) or "forward" in vars(module):
        return None
    return kind if type(module).forward is kind.forward else None


# Layers that shorten the rows of their table in place, if they are given a max_norm.
TABLES = (nn.Embedding, nn.EmbeddingBag)


class LayerFault(NamedTuple):
    """Why a layer is refused, what to do, and whether `dpsur.fix` does it."""

    reason: str
    remedy: str
    fixable: bool = True

    def describe(self, name: str, module: nn.Module) -> str:
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
