"""Multi-head attention, written with linear maps that the tape knows."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur.per_example.contributions import split_dimension
from dpsur.per_example.rules.linear import linear_map
from dpsur.per_example.tape import NotSupportedError, Tape


def attention(
    module: nn.MultiheadAttention,
    tape: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,  # noqa: ARG001  a hint about `attn_mask`, which is used itself
) -> tuple[Tensor, Tensor | None]:
    """Same result as `nn.MultiheadAttention`; four linear maps and an attention without weights."""
    weight, bias = module.in_proj_weight, module.in_proj_bias
    if weight is None or query.dim() != 3 or module.bias_k is not None or module.add_zero_attn:
        raise NotSupportedError("attention without a batch, with kdim, bias_kv or zero_attn")
    width = module.embed_dim
    projected: Sequence[Tensor]
    if query is key and key is value:
        projected = linear_map(tape, query, weight, bias).chunk(3, -1)
    else:
        projected = [
            linear_map(tape, one, weight, bias, some=slice(third * width, (third + 1) * width))
            for third, one in enumerate((query, key, value))
        ]
    if not module.batch_first:
        projected = [one.transpose(0, 1) for one in projected]
    heads, width = module.num_heads, module.head_dim
    queries, keys, values = (
        split_dimension(one, -1, (heads, width)).transpose(1, 2) for one in projected
    )
    mask = None  # both as one that is added to the scores (examples, heads, targets, sources)
    if attn_mask is not None:
        mask = _additive(attn_mask, queries)
        mask = split_dimension(mask, 0, (len(queries), -1)) if mask.dim() == 3 else mask
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, queries)[:, None, None]
        mask = padding if mask is None else mask + padding
    dropout = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        scores = (queries * width**-0.5) @ keys.mT
        weights = F.softmax(scores if mask is None else scores + mask, -1)
        weights = F.dropout(weights, dropout) if dropout else weights
        mixed = weights @ values
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        mixed = F.scaled_dot_product_attention(queries, keys, values, mask, dropout)
    joined = mixed.transpose(1, 2).flatten(2)
    joined = joined if module.batch_first else joined.transpose(0, 1)
    return linear_map(tape, joined, module.out_proj.weight, module.out_proj.bias), weights


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(
        mask, float("-inf")
    )
