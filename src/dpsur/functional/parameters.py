"""Parameter dicts and their flat-vector layout.

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

from collections.abc import Callable, Iterator

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
    found = vector_view(params, order)
    if found is not None:
        return found
    names = params if order is None else order
    return torch.cat([params[name].reshape(-1) for name in names])


def vector_view(params: Params, order: Params | None = None) -> Tensor | None:
    """All parameters as one vector without a copy; None where they are not neighbours."""
    values = list(params.values() if order is None else map(params.__getitem__, order))
    values = [value for value in values if value.numel()] or values  # nothing has no place
    first = values[0]
    place, size = first.data_ptr(), first.element_size()
    for value in values:
        if value.data_ptr() != place or value.dtype != first.dtype or not value.is_contiguous():
            return None
        place += value.numel() * size
    # Neighbours in memory may still belong to two storages: the first one's has to hold them all.
    storage = first.untyped_storage()
    if place > storage.data_ptr() + storage.nbytes():
        return None
    count = (place - first.data_ptr()) // size
    return first.as_strided((count,), (1,), first.storage_offset())


def empty_like(params: Params, device: torch.device | None = None) -> Params:
    """Memory for as many numbers, side by side where all have one type."""
    first = next(iter(params.values()))
    if len({value.dtype for value in params.values()}) != 1:
        return {name: torch.empty_like(value, device=device) for name, value in params.items()}
    count = sum(value.numel() for value in params.values())
    return from_vector(first.new_empty(count, device=device or first.device), params)


def parts(*several: Params, most: int) -> Iterator[tuple[Tensor, ...]]:
    """Corresponding numbers of equally named parameters, `most` at a time.

    They are views: what is written to them is written to the parameters.
    """
    first = several[0]
    vectors = [vector_view(one, first) for one in several]
    rows: list[tuple[Tensor, ...]]
    if all(vector is not None for vector in vectors):
        rows = [tuple(vector for vector in vectors if vector is not None)]
    else:
        rows = [tuple(one[name] for one in several) for name in first]
    for row in rows:
        if all(value.is_contiguous() for value in row):
            yield from zip(*(torch.split(value.view(-1), most) for value in row), strict=True)
        else:
            yield row


def from_vector(vector: Tensor, like: Params) -> Params:
    """Views of a vector in the shapes of parameters."""
    shapes = list(like.values())
    parts = _unflatten_dense_tensors(vector, shapes)  # type: ignore[no-untyped-call]
    if any(not value.numel() for value in shapes):  # those come back without their shapes
        parts = [part.view(value.shape) for part, value in zip(parts, shapes, strict=True)]
    return dict(zip(like, parts, strict=True))
