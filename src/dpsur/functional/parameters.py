"""Parameters by name, and the one place that knows how their numbers lie in memory.

Everything that is done to each number (noise, optimizer steps, restoring a rejected update) goes
through `elementwise`. Today the tensors of a state are views of one vector, so that an operation on
all of them is one kernel. Where they come from elsewhere they are copied together once, and
parameters of several types are worked on one by one.

A sharded implementation (tensors of which each process holds some rows) has to provide:

- `Params` with the local part of every parameter, under the name that it has in the model;
- `elementwise` on the local parts: it needs no communication, since the function is applied to each
  number alone. Noise is addressed by the offset of a number in the whole vector, so that its shards
  together get the noise that one process would draw;
- `to_vector` and `from_vector` for the local part only; the whole vector never exists;
- norms that are summed over shards before the root. Per-example norms need activations and output
  gradients only, so clipping factors are known before a weighted sum is reduce-scattered.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

Params = dict[str, Tensor]


def elementwise(function: Callable[..., Tensor], first: Params, *others: Params) -> Params:
    """Apply a function of single numbers to corresponding parameters, to all of them at once."""
    if len({value.dtype for value in first.values()}) != 1:
        return {
            name: function(value, *(other[name] for other in others))
            for name, value in first.items()
        }
    return from_vector(
        function(to_vector(first), *(to_vector(other, first) for other in others)), first
    )


def to_vector(params: Params, order: Params | None = None) -> Tensor:
    """All parameters as one vector, in the order of `order`: a view where they are neighbours."""
    values = list(params.values() if order is None else map(params.__getitem__, order))
    values = [value for value in values if value.numel()] or values  # nothing has no place
    first = values[0]
    place, size = first.data_ptr(), first.element_size()
    for value in values:
        if value.data_ptr() != place or not value.is_contiguous():
            return torch.cat([value.reshape(-1) for value in values])
        place += value.numel() * size
    # Neighbours in memory may still belong to two storages: the first one's has to hold them all.
    storage = first.untyped_storage()
    if place > storage.data_ptr() + storage.nbytes():
        return torch.cat([value.reshape(-1) for value in values])
    count = (place - first.data_ptr()) // size
    return first.as_strided((count,), (1,), first.storage_offset())


def from_vector(vector: Tensor, like: Params) -> Params:
    """Views of a vector in the shapes of parameters."""
    shapes = list(like.values())
    parts = _unflatten_dense_tensors(vector, shapes)  # type: ignore[no-untyped-call]
    if any(not value.numel() for value in shapes):  # those come back without their shapes
        parts = [part.view(value.shape) for part, value in zip(parts, shapes, strict=True)]
    return dict(zip(like, parts, strict=True))
