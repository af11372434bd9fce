"""Nested values of tensors: frozen dataclasses, mappings and None.

Walking by structure, not by a list of names, means that a field added to the state later is
restored on rejection and saved in checkpoints without anyone having to remember it.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from torch import Tensor

from dpsur.errors import CheckpointError

Tree = TypeVar("Tree")


def map_tensors(
    function: Callable[..., Tensor],
    first: Tree,
    *others: Tree,
    together: Callable[..., dict[str, Tensor]] | None = None,
) -> Tree:
    """Apply a function to corresponding tensors of equally built trees.

    `together`, if given, applies it to all tensors of a mapping at once.
    """
    result: Any
    if isinstance(first, Tensor):
        result = function(first, *others)
    elif first is None:
        result = None
    elif isinstance(first, Mapping):
        if together and first and all(isinstance(value, Tensor) for value in first.values()):
            return together(function, first, *others)  # type: ignore[return-value]
        result = {
            key: map_tensors(
                function, value, *(_get(other, key) for other in others), together=together
            )
            for key, value in first.items()
        }
    elif is_dataclass(first):
        parts = {
            field.name: map_tensors(
                function,
                getattr(first, field.name),
                *(getattr(other, field.name) for other in others),
                together=together,
            )
            for field in fields(first)
        }
        kind: Any = type(first)
        result = kind(**parts)
    else:
        raise TypeError(f"not a tree of tensors: {type(first).__name__}")
    return result  # type: ignore[no-any-return]


def _get(tree: Any, key: Any) -> Any:
    return tree[key]


def flatten(tree: Any) -> dict[str, Tensor]:
    """Name every tensor by its path."""
    if isinstance(tree, Tensor):
        return {"": tree}
    if tree is None:
        return {}
    if isinstance(tree, Mapping):
        children = dict(tree)
    else:
        children = {field.name: getattr(tree, field.name) for field in fields(tree)}
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
