"""Checks of single values: each names the value it refuses."""

import math
from typing import Any

from dpsur.errors import InvalidInputError


def number(name: str, value: Any) -> None:
    """Refuse what is no number at all, such as a word or None, or beyond what a float holds."""
    if not hasattr(value, "__float__"):
        raise InvalidInputError(
            f"{name} must be a number, got {value!r} ({type(value).__name__}); write it as a number"
        )
    try:
        float(value)
    except OverflowError:
        raise InvalidInputError(
            f"{name} must be a number below 1e308, got a whole number of about "
            f"{int(value).bit_length() * 0.30103:.0f} digits"
        ) from None


def positive(name: str, value: float) -> None:
    """Refuse anything but a finite number above zero."""
    number(name, value)
    if not (math.isfinite(value) and value > 0):
        raise InvalidInputError(f"{name} must be a finite number above 0, got {value}")


def non_negative(name: str, value: float) -> None:
    """Refuse anything but a finite number of at least zero."""
    number(name, value)
    if not (math.isfinite(value) and value >= 0):
        raise InvalidInputError(f"{name} must be a finite number of at least 0, got {value}")


def finite(name: str, value: float) -> None:
    """Refuse NaN and the infinities."""
    number(name, value)
    if not math.isfinite(value):
        raise InvalidInputError(f"{name} must be a finite number, got {value}")


def at_least_one(name: str, value: int) -> None:
    """Refuse counts below one and numbers that are not whole."""
    number(name, value)
    if not (math.isfinite(value) and value == int(value) and value >= 1):
        raise InvalidInputError(f"{name} must be a whole number of at least 1, got {value}")


def at_least_one_each(owner: object, *names: str) -> None:
    """Refuse such counts among attributes; None, which leaves the choice open, is fine."""
    for name in names:
        value = getattr(owner, name)
        if value is not None:
            at_least_one(name, value)


def sample_rate(name: str, value: float) -> None:
    """Refuse what is not a probability in (0, 1]."""
    number(name, value)
    if not 0 < value <= 1:
        raise InvalidInputError(f"{name} must be in (0, 1], got {value}")


def fraction_below_one(name: str, value: float) -> None:
    """Refuse what is not in [0, 1)."""
    number(name, value)
    if not 0 <= value < 1:
        raise InvalidInputError(f"{name} must be in [0, 1), got {value}")


def probability(name: str, value: float) -> None:
    """Refuse what is not in (0, 1)."""
    number(name, value)
    if not 0 < value < 1:
        raise InvalidInputError(f"{name} must be in (0, 1), got {value}")


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a word that is not on the list."""
    if value not in choices:
        raise InvalidInputError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
