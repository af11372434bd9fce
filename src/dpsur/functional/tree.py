"""Trees of tensors (batches, outputs, targets, the state of a run), and parameters by name.

A tree is a tensor, or a tuple, list, mapping or dataclass of trees, or None. Objects like the
`ModelOutput` of Hugging Face are dataclasses; any other type that `torch.utils._pytree` knows works
too. Walking by structure, not by a list of names, means that a field added to the state later is
restored on rejection and saved in checkpoints without anyone having to remember it.

Everything that is done to each number of the parameters (noise, optimizer steps, restoring a
rejected update) goes through `elementwise`. The tensors of a state are views of one vector, so that
an operation on all of them is one kernel. Where they come from elsewhere they are copied together
once, and parameters of several types are worked on one by one. Noise is addressed by the offset of
a number in the whole vector, so that shards on several ranks together get the noise that one
process would draw.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors
from torch.utils import _pytree

from dpsur.errors import CheckpointError, InvalidInputError

Tree = TypeVar("Tree")
# A tree of tensors with one row per record in each; often a single tensor.
TensorTree: TypeAlias = Any


@dataclass(frozen=True)
class PersonRows:
    """Inputs of persons: a tree of tensors (persons, k, ...), with k records in a row."""

    rows: TensorTree

    @property
    def records_each(self) -> int:
        return int(tensors_of(self.rows)[0].shape[1])


def map_tensors(
    function: Callable[..., Any],
    first: Tree,
    *others: Any,
    together: Callable[..., dict[str, Tensor]] | None = None,
    otherwise: Callable[[Any], Any] | None = None,
) -> Tree:
    """Apply a function to corresponding tensors of equally built trees.

    `together`, if given, applies it to all tensors of a mapping at once. `otherwise` is applied to
    what is no tree of tensors; without it that is an error.
    """
    if isinstance(first, Tensor):
        return function(first, *others)  # type: ignore[no-any-return]
    if first is None:
        return None  # type: ignore[return-value]
    if not others and together is None and type(first) in _PLAIN:  # most trees, without detours
        if isinstance(first, dict):
            return {  # type: ignore[return-value]
                key: map_tensors(function, child, otherwise=otherwise)
                for key, child in first.items()
            }
        found = [map_tensors(function, child, otherwise=otherwise) for child in first]  # type: ignore[attr-defined]
        return type(first)(found)  # type: ignore[call-arg]
    if (
        together
        and isinstance(first, Mapping)
        and first
        and all(isinstance(value, Tensor) for value in first.values())
    ):
        return together(function, first, *others)  # type: ignore[return-value]
    children = children_of(first)
    if children is None:
        if otherwise is None:
            raise TypeError(f"not a tree of tensors: {type(first).__name__}")
        return otherwise(first)  # type: ignore[no-any-return]
    beside = [children_of(other) for other in others]
    result: Tree = _rebuild(
        first,
        {
            key: map_tensors(
                function,
                child,
                *(None if other is None else other[key] for other in beside),
                together=together,
                otherwise=otherwise,
            )
            for key, child in children.items()
        },
    )
    return result


_PLAIN = (tuple, list, dict)


def children_of(tree: Any) -> dict[Any, Any] | None:
    """What a tree consists of, by name or place; None for what is no tree."""
    if is_dataclass(tree) and not isinstance(tree, type):  # some of them are mappings too
        return {field.name: getattr(tree, field.name) for field in fields(tree)}
    if isinstance(tree, Mapping):
        return dict(tree)
    if isinstance(tree, torch.Size):  # a tuple that holds no tensors, and could hold none
        return None
    if isinstance(tree, (tuple, list)):
        return dict(enumerate(tree))
    known = _pytree.SUPPORTED_NODES.get(type(tree))
    return None if known is None else dict(enumerate(known.flatten_fn(tree)[0]))


def _rebuild(tree: Any, children: dict[Any, Any]) -> Any:
    """A tree like another one, of other children. A mapping of any kind becomes a dict."""
    kind: Any = type(tree)
    if is_dataclass(tree) and not isinstance(tree, Mapping):
        made = kind.__new__(kind)  # what a class checks when it is made was checked then
        for name, child in children.items():
            object.__setattr__(made, name, child)
        return made  # without what is no field: it could hold values of other records
    if is_dataclass(tree):
        return kind(**children)
    if isinstance(tree, Mapping):
        return children
    if isinstance(tree, (tuple, list)):
        return kind._make(children.values()) if hasattr(kind, "_make") else kind(children.values())
    known = _pytree.SUPPORTED_NODES[kind]
    return known.unflatten_fn(list(children.values()), known.flatten_fn(tree)[1])


def tensors_of(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) in _PLAIN:  # most trees, without detours
        children = tree.values() if isinstance(tree, dict) else tree
    else:
        children = (children_of(tree) or {}).values()
    found: list[Tensor] = []
    for child in children:
        if isinstance(child, Tensor):
            found.append(child)
        elif child is not None:
            found += tensors_of(child)
    return found


def contexts_of(tree: Any) -> list[Any]:
    """What classes that are registered with PyTorch keep beside their parts, within a tree."""
    if isinstance(tree, Tensor) or (children := children_of(tree)) is None:
        return []
    own = []
    if not is_dataclass(tree) and not isinstance(tree, (Mapping, tuple, list)):
        own.append(_pytree.SUPPORTED_NODES[type(tree)].flatten_fn(tree)[1])
    return own + [one for child in children.values() for one in contexts_of(child)]


def with_tensors(tree: Tree, tensors: Iterable[Tensor]) -> Tree:
    following = iter(tensors)
    return map_tensors(lambda _: next(following), tree, otherwise=keep)


def keep(value: Any) -> Any:
    """For `map_tensors`: what is no tensor stays as it is."""
    return value


def row_count(rows: TensorTree) -> int:
    """How many records a tree holds: the length of its first tensor."""
    return len(rows) if isinstance(rows, Tensor) else len(tensors_of(rows)[0])


def device_of(rows: TensorTree) -> torch.device:
    return tensors_of(rows)[0].device


def slice_rows(rows: TensorTree, some: slice) -> TensorTree:
    return map_tensors(lambda value: value[some], rows)


def split_rows(rows: TensorTree, size: int) -> list[TensorTree]:
    if isinstance(rows, Tensor):
        return list(torch.split(rows, size))
    count = row_count(rows)
    return [slice_rows(rows, slice(start, start + size)) for start in range(0, count, size)]


def concatenate_rows(parts: list[TensorTree]) -> TensorTree:
    if len(parts) == 1:
        return parts[0]
    return map_tensors(lambda *each: torch.cat(each), *parts)


def signature(rows: TensorTree) -> tuple[Any, ...]:
    """What two batches share whose records have the same structure, shapes and types."""
    if isinstance(rows, Tensor):
        return tuple(rows.shape[1:]), rows.dtype
    return tuple(
        (name, tuple(value.shape[1:]), value.dtype) for name, value in flatten(rows).items()
    )


def describe_rows(rows: TensorTree, count: int | None = None) -> str:
    """Shapes and types in words, such as `shape (28, 28) and type torch.float32`."""
    lead = () if count is None else (count,)
    if isinstance(rows, Tensor):
        return f"shape {(*lead, *rows.shape[1:])} and type {rows.dtype}"
    each = (f"{k}: {(*lead, *v.shape[1:])} {v.dtype}" for k, v in flatten(rows).items())
    return f"structure {{{', '.join(each)}}}"


def check_rows(rows: TensorTree, name: str) -> int | None:
    count = first = None
    try:
        found = flatten(rows)
    except TypeError as error:
        raise InvalidInputError(
            f"{name} must consist of tensors (in tuples, lists, dicts or dataclasses): {error}"
        ) from None
    for path, value in found.items():
        where = f"{name}[{path}]" if path else name
        if not value.dim():
            raise InvalidInputError(f"{where} must have a row per record, got a single number")
        if count is None:
            count, first = len(value), where
        elif len(value) != count:
            raise InvalidInputError(
                f"{where} has {len(value)} rows but {first} has {count}: there must be one row per "
                "record in each"
            )
    return count


def flatten(tree: Any) -> dict[str, Tensor]:
    if isinstance(tree, Tensor):
        return {"": tree}
    if tree is None:
        return {}
    children = children_of(tree)
    if children is None:
        raise TypeError(f"not a tree of tensors: {type(tree).__name__}")
    return {
        f"{key}/{path}" if path else str(key): value
        for key, child in children.items()
        for path, value in flatten(child).items()
    }


def unflatten(template: Tree, tensors: Mapping[str, Tensor]) -> Tree:
    """Fill a template's structure with named tensors; names, shapes and types must all agree."""
    expected = flatten(template)
    if set(expected) != set(tensors):
        odd = sorted(set(expected) ^ set(tensors))[0]
        raise CheckpointError(f"the saved state does not fit this run: {odd!r} is on one side only")
    for name, tensor in expected.items():
        saved = tensors[name]
        if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
            raise CheckpointError(
                f"the saved state does not fit this run: {name!r} is {tuple(saved.shape)} "
                f"{saved.dtype}, expected {tuple(tensor.shape)} {tensor.dtype}"
            )
    names = iter(expected)
    return map_tensors(lambda tensor: tensors[next(names)].to(tensor.device), template)


Params = dict[str, Tensor]


def elementwise(function: Callable[..., Tensor], first: Params, *others: Params) -> Params:
    if len(first) == 1 or len({value.dtype for value in first.values()}) != 1:
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
    count, device = sum(value.numel() for value in params.values()), device or first.device
    again = device.type == "cpu" and count * first.element_size() >= _LARGE
    vector = _memory(count, first.dtype) if again else first.new_empty(count, device=device)
    return from_vector(vector, params)


_LARGE = 2**20  # bytes
_ALIGNMENT = 64  # of what PyTorch reserves itself
_mine = threading.local()


def _memory(count: int, kind: torch.dtype) -> Tensor:
    """Memory on the host: what was given out last, if nothing uses it any more.

    The system clears memory that is new, which for a sum of gradients takes as long as to write it.
    """
    size = count * kind.itemsize
    last, in_use = getattr(_mine, "last", (np.empty(0), bool))
    if len(last) != size or in_use() is not None:
        whole = np.empty(size + _ALIGNMENT, dtype=np.uint8)
        last = whole[-whole.ctypes.data % _ALIGNMENT :][:size]
    lent = last[:]  # which lives as long as a tensor that was made of it
    _mine.last = last, weakref.ref(lent)
    return torch.from_numpy(lent).view(kind)


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
    shapes = list(like.values())
    parts = _unflatten_dense_tensors(vector, shapes)  # type: ignore[no-untyped-call]
    if any(not value.numel() for value in shapes):  # those come back without their shapes
        parts = [part.view(value.shape) for part, value in zip(parts, shapes, strict=True)]
    return dict(zip(like, parts, strict=True))
