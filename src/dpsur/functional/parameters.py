"""All parameters as one vector, so that what is done to each number takes one operation for all.

The tensors of a state live side by side in one piece of memory. Then joining them costs nothing;
wherever they come from elsewhere they are copied together once.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

Params = dict[str, Tensor]


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
    values = list(params.values() if order is None else map(params.__getitem__, order))
    values = [value for value in values if value.numel()] or values  # nothing has no place
    first = values[0]
    place, size = first.data_ptr(), first.element_size()
    for value in values:
        if value.data_ptr() != place or not value.is_contiguous():
            return torch.cat([value.reshape(-1) for value in values])
        place += value.numel() * size
    # Neighbours in memory may still be two pieces of it: the first one's has to hold them all.
    storage = first.untyped_storage()
    if place > storage.data_ptr() + storage.nbytes():
        return torch.cat([value.reshape(-1) for value in values])
    count = (place - first.data_ptr()) // size
    return first.as_strided((count,), (1,), first.storage_offset())


def parted(vector: Tensor, like: Params) -> Params:
    """Views of a vector in the shapes of parameters."""
    shapes = list(like.values())
    pieces = _unflatten_dense_tensors(vector, shapes)  # type: ignore[no-untyped-call]
    if any(not value.numel() for value in shapes):  # those come back without their shapes
        pieces = [piece.view(value.shape) for piece, value in zip(pieces, shapes, strict=True)]
    return dict(zip(like, pieces, strict=True))
