"""The training methods, by name. A method is registered by being listed here."""

from dpsur.errors import InvalidInputError
from dpsur.methods.base import Method
from dpsur.methods.dpsgd import Dpsgd
from dpsur.methods.dpsur import Dpsur

METHODS: dict[str, type[Method]] = {"dpsur": Dpsur, "dpsgd": Dpsgd}


def method_named(name: str) -> type[Method]:
    """Look a method up by name."""
    try:
        return METHODS[name]
    except KeyError:
        known = ", ".join(METHODS)
        raise InvalidInputError(f"unknown method {name!r}; choose one of {known}") from None


__all__ = ["METHODS", "Dpsgd", "Dpsur", "Method", "method_named"]
