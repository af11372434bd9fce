"""All parameters as one vector, so that what is done to each number takes one operation for all.

The tensors of a state live side by side in one piece of memory. Then joining them costs nothing;
wherever they come from elsewhere they are copied together once.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dpsur.core.types import Params


def elementwise(function: Callable[..., Tensor], first: Params, *others: Params) -> Params:
    """Apply a function of single numbers to corresponding parameters, to all of them at once.

    Parameters of several types are worked on one by one.
    """
    if len({value.dtype for value in first.values()}) != 1:
        return {
            name: function(value, *(other[name] for other in others))
            for name, value in first.items()
        }
    return parted(function(joined(first), *(joined(other, first) for other in others)), first)


def joined(params: Params, order: Params | None = None) -> Tensor:
    """One vector of all parameters, in the order of `order`: a view where they lie side by side."""
    values = [params[name] for name in (params if order is None else order)]
    first, end = values[0], values[0].storage_offset()
    storage = first.untyped_storage().data_ptr()
    for value in values:
        if (
            value.storage_offset() != end
            or value.untyped_storage().data_ptr() != storage
            or not value.is_contiguous()
        ):
            return torch.cat([value.reshape(-1) for value in values])
        end += value.numel()
    return first.as_strided((end - first.storage_offset(),), (1,), first.storage_offset())


def parted(vector: Tensor, like: Params) -> Params:
    """Views of a vector in the shapes of parameters."""
    pieces = torch.split(vector, [value.numel() for value in like.values()])
    return {
        name: piece.view(value.shape)
        for (name, value), piece in zip(like.items(), pieces, strict=True)
    }
