"""Options of runs and methods, each declared in one place.

An option is a field of a frozen dataclass, made by `option`: its name, type, default, help text and
allowed range. The command line, the checks and the JSON of a stored run are derived from that.
"""

import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from dpsur import checks
from dpsur.errors import InvalidInputError

# Headings in the help of the command line, in their order.
DATA, MODEL, PRIVACY, RUN = "data", "model and method", "privacy", "run"
PERFORMANCE = "performance"
UPDATES, GATE, GATES, BLOCKS = "updates", "gate", "gates loss and coin", "gate block"
METRICS, OPTIMIZER = "noisy training metrics", "optimizer"
HYPER_PARAMETERS = (UPDATES, GATE, GATES, BLOCKS, METRICS, OPTIMIZER)

Owner = TypeVar("Owner")
# Refuses a value by raising; gets the name of the option and the value.
Check = Callable[[str, Any], object]

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a string",
    Path: "a path",
}


@dataclass(frozen=True)
class Option:
    """A declared option.

    `choices` are the only values that are allowed. `names` are listed in the help as examples of
    what is allowed, and `check` decides. `group` is the heading in the help; `common` options stand
    in `--help`, the others in `--help-all` alone. An option that is not for the command line can be
    set from Python only; one that is not stored is not part of the JSON of a run. `kinds` are the
    types of its values, `part` is the field that holds it, such as `intervals`.
    """

    help: str = ""
    choices: tuple[str, ...] | None = None
    check: Check | None = None
    names: Iterable[str] | None = None
    metavar: str | None = None
    group: str = ""
    common: bool = False
    command_line: bool = True
    stored: bool = True
    name: str = ""
    kinds: tuple[type, ...] = ()
    default: Any = None
    part: str | None = None

    @property
    def kind(self) -> type:
        """The type of its values, None aside."""
        return self.kinds[0]

    @property
    def flag(self) -> str:
        return flag(self.name)

    def value(self, owner: Any) -> Any:
        return getattr(owner if self.part is None else getattr(owner, self.part), self.name)

    def refuse_wrong(self, value: Any) -> None:
        if value is None and type(None) in self.kinds:
            return
        if self.check is not None:
            self.check(self.name, value)
        elif self.choices is not None:
            checks.one_of(self.name, value, self.choices)
        elif not any(_is_a(value, kind) for kind in self.kinds):
            allowed = " or ".join(_WORDS.get(kind, "None") for kind in self.kinds)
            raise InvalidInputError(
                f"{self.name} must be {allowed}, got {value!r} ({type(value).__name__})"
            )

    def read(self, value: Any) -> Any:
        """The value that a JSON file holds; refuses one of another type."""
        if Path in self.kinds and isinstance(value, str):
            return Path(value)
        exact = type(value) in self.kinds or (type(value) is int and float in self.kinds)
        if not exact and not (isinstance(value, dict) and Mapping in self.kinds):
            raise InvalidInputError(f"{self.name} cannot be {checks.shown(value)}")
        return value


def option(
    default: Any = MISSING, help: str = "", choices: tuple[str, ...] | None = None, **more: Any
) -> Any:
    """Declare an option, with what else `Option` says of it."""
    metadata = {"option": Option(help, choices, **{"names": choices, **more})}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


# The options of a class never change, and a command line asks for them hundreds of times.
_cache: WeakKeyDictionary[type, Mapping[str, Option]] = WeakKeyDictionary()


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def declared(owner: type) -> Mapping[str, Option]:
    """The options of a dataclass and of its parts, by name, in the order of their declaration.

    A part is a field that is a dataclass with options.
    """
    if owner not in _cache:
        _cache[owner] = MappingProxyType({each.name: each for each in _declared(owner, None)})
    return _cache[owner]


def _declared(owner: type, part: str | None) -> Iterator[Option]:
    hints = typing.get_type_hints(owner)
    for each in fields(owner):
        hint = hints[each.name]
        if "option" in each.metadata:
            kinds = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
            plain = tuple(typing.get_origin(kind) or kind for kind in kinds)
            found: Option = each.metadata["option"]
            yield replace(found, name=each.name, kinds=plain, default=each.default, part=part)
        elif is_dataclass(hint):
            yield from _declared(typing.cast(type, hint), each.name)


def by_heading(options: Iterable[Option]) -> dict[str, list[Option]]:
    """Options of the command line under their headings; those of one method come last."""
    found: dict[str, list[Option]] = {heading: [] for heading in HYPER_PARAMETERS}
    for each in options:
        if each.command_line:
            found.setdefault(each.group, []).append(each)
    return {heading: listed for heading, listed in found.items() if listed}


def check_options(owner: Any) -> None:
    for found in declared(type(owner)).values():
        if found.part is None:  # a part has checked itself
            found.refuse_wrong(getattr(owner, found.name))


def build(owner: type[Owner], values: Mapping[str, Any], **whole: Any) -> Owner:
    """An instance from the values of its options by name, those of its parts among them.

    `whole` are values of fields. Options that are not given have their defaults.
    """
    known = declared(owner)
    for name in values:
        if name not in known:
            raise InvalidInputError(f"there is no option {name!r}")
    own = {name: value for name, value in values.items() if known[name].part is None}
    for part in fields(owner):  # type: ignore[arg-type]
        changes = {name: v for name, v in values.items() if known[name].part == part.name}
        if changes:
            usual: Any = part.default if part.default_factory is MISSING else part.default_factory()
            own[part.name] = replace(usual, **changes)
    return owner(**own, **whole)


def to_plain(owner: Any) -> dict[str, Any]:
    """The options of an instance that are stored, as values that JSON has."""
    found = {}
    for name, each in declared(type(owner)).items():
        value = each.value(owner)
        if each.stored:
            found[name] = dict(value) if isinstance(value, Mapping) else value
            if isinstance(value, Path):
                found[name] = str(value)
    return found


def from_plain(owner: type, values: Any) -> dict[str, Any]:
    """The values of options in a JSON file, which may hold anything; refuses by name."""
    if not isinstance(values, dict):
        raise InvalidInputError("it must hold a JSON object")
    known = {n: each for n, each in declared(owner).items() if each.stored}
    for name in values:
        if name not in known:
            raise InvalidInputError(f"there is no option {name!r}")
    return {name: known[name].read(value) for name, value in values.items()}


def _is_a(value: Any, kind: type) -> bool:
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if kind is Path:
        return isinstance(value, (str, PathLike))
    return isinstance(value, kind)
