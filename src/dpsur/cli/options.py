"""Options made from the hyper-parameters of the methods."""

import argparse
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field
from typing import Any

from dpsur.errors import InvalidInputError
from dpsur.methods import METHODS, Method
from dpsur.tasks import TASKS


def flag(name: str) -> str:
    """The option that sets a hyper-parameter."""
    return "--" + name.replace("_", "-")


def add_method_options(parser: argparse.ArgumentParser) -> None:
    """Add the hyper-parameters of all methods, each once, saying which methods have it."""
    group = parser.add_argument_group(
        "hyper-parameters", "what is not given is chosen for the task, the data and the budget"
    )
    for name, owners in _owners().items():
        choices = _field(METHODS[owners[0]], name).metadata["choices"]
        kind = _value_type(METHODS[owners[0]], name)
        group.add_argument(
            flag(name),
            type=kind,
            choices=choices,
            metavar=None if choices else {int: "COUNT", float: "NUMBER"}.get(kind),
            help=_help(owners, name).replace("%", "%%"),
        )


def method_options(options: argparse.Namespace, method: type[Method]) -> dict[str, Any]:
    """The hyper-parameters that were given, checked to belong to the method."""
    given = {
        name: getattr(options, name) for name in _owners() if getattr(options, name) is not None
    }
    known = {field.name for field in method.options()}
    for name in given:
        if name not in known:
            owners = ", ".join(_owners()[name])
            raise InvalidInputError(
                f"method {method.name} has no option {flag(name)}, which belongs to {owners}; "
                f"leave it out or choose --method {_owners()[name][0]}"
            )
    return given


def build_method(name: str, values: Mapping[str, Any]) -> Method:
    """Make a method from stored or given hyper-parameters; an unknown key is an error."""
    method = METHODS[name]
    unknown = sorted(set(values) - {field.name for field in method.options()})
    if unknown:
        raise InvalidInputError(f"method {name} has no hyper-parameter {unknown[0]!r}")
    return method(**values)


def _owners() -> dict[str, list[str]]:
    owners: dict[str, list[str]] = {}
    for name, method in METHODS.items():
        for field in method.options():
            owners.setdefault(field.name, []).append(name)
    return owners


def _field(method: type[Method], name: str) -> Field[Any]:
    return next(field for field in method.options() if field.name == name)


def _value_type(method: type[Method], name: str) -> type[Any]:
    hint = typing.get_type_hints(method)[name]
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    result: type[Any] = hint
    return result


def _help(owners: list[str], name: str) -> str:
    """What the option means, its default, and which methods have it or mean something else."""
    texts = {owner: _field(METHODS[owner], name).metadata["help"] for owner in owners}
    usual: str = texts[owners[0]]
    others = [f"; {owner}: {text}" for owner, text in texts.items() if text != usual]
    return usual + _shown_default(owners, name) + "".join(others) + _shown_owners(owners)


def _shown_owners(owners: list[str]) -> str:
    without = [name for name in METHODS if name not in owners]
    if not without:
        return ""
    if len(without) < len(owners):
        return f" [not {', '.join(without)}]"
    return f" [{', '.join(owners)}]"


def _shown_default(owners: list[str], name: str) -> str:
    defaults = {owner: _field(METHODS[owner], name).default for owner in owners}
    values = [value for value in defaults.values() if value is not None and value is not MISSING]
    if not values:
        return ""
    usual = max(values, key=values.count)
    own = "the task's, else " if name in set_by_tasks() else ""
    others = [
        f", for {owner} {'left open' if value is None else value}"
        for owner, value in defaults.items()
        if value != usual
    ]
    return f" (default: {own}{usual}{''.join(others)})"


def set_by_tasks() -> set[str]:
    """Hyper-parameters that tasks have values of their own for."""
    return {
        name for task in TASKS.values() for settings in task.settings.values() for name in settings
    }
