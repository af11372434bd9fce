"""The training methods, by name. A method is registered by being listed here."""

from dpsur.errors import InvalidInputError
from dpsur.methods.base import Method
from dpsur.methods.dpagd import Dpagd
from dpsur.methods.dpis import Dpis
from dpsur.methods.dpsgd import Dpsgd, DpsgdHf
from dpsur.methods.dpsgd_ts import DpsgdTs
from dpsur.methods.dpsur import Dpsur
from dpsur.methods.nonprivate import Nonprivate

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Dpsur, Dpsgd, DpsgdTs, DpsgdHf, Dpis, Dpagd, Nonprivate)
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
    "Dpagd",
    "Dpis",
    "Dpsgd",
    "DpsgdHf",
    "DpsgdTs",
    "Dpsur",
    "Method",
    "Nonprivate",
    "method_named",
]
