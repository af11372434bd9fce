"""What is not trained must not change: it would carry private records into a release."""

import torch
from torch import Tensor, nn

from dpsur.errors import UnsupportedModelError


def fixed_parts(model: nn.Module) -> dict[str, Tensor]:
    """Buffers, whether or not they are saved, and parameters that are not trained."""
    parts = dict(model.named_buffers(remove_duplicate=False))
    for name, value in model.named_parameters(remove_duplicate=False):
        if not value.requires_grad:
            parts[name] = value.detach()
    return parts


def check_fixed_parts(model: nn.Module, original: nn.Module) -> None:
    """Refuse a model whose fixed parts are no longer, bit by bit, those it had at the start."""
    before, after = fixed_parts(original), fixed_parts(model)
    for name in sorted(before.keys() | after.keys()):
        if name in before and name in after and same_bits(before[name], after[name]):
            continue
        raise UnsupportedModelError(
            f"{name}, a buffer or frozen parameter, changed in a forward pass and would "
            "carry private records into the release, so nothing is released; make the forward "
            "pass free of side effects"
        )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same, NaN included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_bytes(one.to(other.device)), _bytes(other))


def _bytes(values: Tensor) -> Tensor:
    dense = values.detach().to_dense().contiguous()
    return dense.reshape(-1).view(torch.uint8)
