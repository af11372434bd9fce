"""The training methods, by name. A custom method is registered by adding it to `METHODS`."""

from dpsur.errors import InvalidInputError
from dpsur.methods.base import Method
from dpsur.methods.dpsgd import Dpsgd, DpsgdHf, Dpsur, Nonprivate

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Dpsur, Dpsgd, DpsgdHf, Nonprivate)
}


def method_named(name: str) -> type[Method]:
    try:
        return METHODS[name]
    except KeyError:
        known = ", ".join(METHODS)
        raise InvalidInputError(
            f"unknown method {name!r}; choose one of {known}", code="unknown-name"
        ) from None


__all__ = [
    "METHODS",
    "Dpsgd",
    "DpsgdHf",
    "Dpsur",
    "Method",
    "Nonprivate",
    "method_named",
]
