"""Checks of single values: each names the value it refuses."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, ParamSpec, Self, TypeVar

from dpsur.errors import ArgumentError, InvalidInputError

P = ParamSpec("P")
T = TypeVar("T")


def number(name: str, value: Any) -> None:
    """Refuse what is no number at all, such as a word or None, or beyond what a float holds."""
    if not hasattr(value, "__float__"):
        raise InvalidInputError(
            f"{name} must be a number, got {value!r} ({type(value).__name__}); write it as one",
            code="out-of-range",
        )
    try:
        float(value)
    except OverflowError:
        raise InvalidInputError(
            f"{name} must be a number below 1e308, got a whole number of about "
            f"{int(value).bit_length() * 0.30103:.0f} digits",
            code="out-of-range",
        ) from None
    except (TypeError, ValueError, RuntimeError):  # of an array or a tensor
        raise InvalidInputError(
            f"{name} must be one number, got {type(value).__name__} of several", code="out-of-range"
        ) from None


def _in_range(name: str, value: Any, sound: Callable[[Any], bool], words: str) -> None:
    number(name, value)
    if not sound(value):
        raise InvalidInputError(f"{name} must be {words}, got {value}", code="out-of-range")


def positive(name: str, value: float) -> None:
    _in_range(name, value, lambda x: math.isfinite(x) and x > 0, "a finite number above 0")


def positive_each(owner: object, *names: str) -> None:
    """Refuse such numbers among attributes; None, which leaves the choice open, is fine."""
    for name in names:
        value = getattr(owner, name)
        if value is not None:
            positive(name, value)


def non_negative(name: str, value: float) -> None:
    _in_range(name, value, lambda x: math.isfinite(x) and x >= 0, "a finite number of at least 0")


def finite(name: str, value: float) -> None:
    _in_range(name, value, math.isfinite, "a finite number")


def at_least_one(name: str, value: int) -> None:
    def sound(x: Any) -> bool:
        return math.isfinite(x) and x == int(x) and x >= 1

    _in_range(name, value, sound, "a whole number of at least 1")


def whole(name: str, value: Any, least: int) -> int:
    """Refuse what a file gives that is not written as a whole number, or too small."""
    if type(value) is not int or value < least:
        raise InvalidInputError(
            f"{name} must be a whole number of at least {least}, got {value!r}", code="out-of-range"
        )
    return value


def flag(name: str, value: Any) -> None:
    if type(value) is not bool:
        raise InvalidInputError(f"{name} must be true or false, got {value!r}")


def at_least_one_each(owner: object, *names: str) -> None:
    """Refuse such counts among attributes; None, which leaves the choice open, is fine."""
    for name in names:
        value = getattr(owner, name)
        if value is not None:
            at_least_one(name, value)


def sample_rate(name: str, value: float) -> None:
    _in_range(name, value, lambda x: 0 < x <= 1, "in (0, 1]")


def fraction_below_one(name: str, value: float) -> None:
    _in_range(name, value, lambda x: 0 <= x < 1, "in [0, 1)")


def probability(name: str, value: float) -> None:
    _in_range(name, value, lambda x: 0 < x < 1, "in (0, 1)")


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidInputError(
            f"{name} must be one of {', '.join(choices)}; got {value!r}", code="unknown-name"
        )


def shown(value: Any) -> str:
    """A value in a message: classes by their names, and nothing long."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    if len(text) <= 60 and "\n" not in text:
        return text
    return f"{text[:40]}..." if isinstance(value, str) else type(value).__name__


def arguments(
    function: Callable[P, T], elsewhere: Mapping[str, str] = MappingProxyType({})
) -> Callable[P, T]:
    """Have a function refuse arguments that it does not have, and name the nearest that it has.

    `elsewhere` says where others belong that users look for here.
    """
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        _check_arguments(function.__name__, parameters, args, kwargs, elsewhere)
        return function(*args, **kwargs)

    return checked


class NamedArguments:
    """A class whose instances are made by named arguments: others are refused by name.

    What is left at its default is not printed.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if args or kwargs:
            _check_arguments(cls.__name__, _parameters(cls), args, kwargs)
        return super().__new__(cls)

    def __repr__(self) -> str:
        found = {
            name: (getattr(self, name), parameter.default)
            for name, parameter in _parameters(type(self)).items()
        }
        given = (f"{name}={value!r}" for name, (value, usual) in found.items() if value != usual)
        return f"{type(self).__name__}({', '.join(given)})"


def _parameters(kind: type) -> Mapping[str, inspect.Parameter]:
    parameters = dict(inspect.signature(kind.__init__).parameters)  # type: ignore[misc]
    parameters.pop("self")
    return parameters


def _check_arguments(
    owner: str,
    parameters: Mapping[str, inspect.Parameter],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> None:
    more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())  # checked where they go
    parameters = {name: p for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    for name in kwargs:
        if name not in parameters and not more:
            near = get_close_matches(name, parameters, 1) or [
                known
                for known in parameters
                if known.startswith(name) or name == "".join(word[:1] for word in known.split("_"))
            ]
            remedy = f"did you mean {near[0]}?" if near else f"it has {', '.join(parameters)}"
            remedy = f"write {elsewhere[name]}" if name in elsewhere else remedy
            raise ArgumentError(f"unknown argument {name} of {owner}; {remedy}")
    positional = [p.name for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
    given = {*positional[: len(args)], *kwargs}
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in given]
    if missing:
        raise ArgumentError(
            f"{owner} needs the argument{'s' * (len(missing) > 1)} {', '.join(missing)}"
        )
    if len(args) > len(positional):
        raise ArgumentError(
            f"{owner} takes {len(positional)} arguments without a name, got {len(args)}; give the "
            f"others by name, such as {', '.join(parameters)}"
        )
