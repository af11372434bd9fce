"""Things that are built from a plain description: a name and the arguments of its builder."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dpsur.errors import InvalidInputError

Built = TypeVar("Built")


def build(
    kind: str, builders: Mapping[str, Callable[..., Built]], description: Mapping[str, Any]
) -> Built:
    """Build what a description such as `{"name": "mlp", "inputs": 4, ...}` names."""
    arguments = dict(description)
    name = arguments.pop("name", None)
    if not isinstance(name, str) or name not in builders:
        raise InvalidInputError(f"unknown {kind} {name!r}; choose one of {', '.join(builders)}")
    signature = inspect.signature(builders[name])
    try:
        signature.bind(**arguments)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "no arguments"
        raise InvalidInputError(f"{kind} {name}: {error}; it takes {takes}") from None
    return builders[name](**arguments)
