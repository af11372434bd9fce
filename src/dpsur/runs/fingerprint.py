"""What a model and a loss compute, as a digest that is the same in every process.

Two copies of an interrupted run share the noise that is still to come. Were they resumed with
different losses or networks, their releases could be subtracted from each other and the noise would
be gone, so a checkpoint is tied to both. This detects mistakes, not forgeries: code that the
interpreter does not see, such as a compiled extension, counts by its name alone.
"""

import functools
import re
from collections.abc import Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from dpsur.functional.problem import LossFunction
from dpsur.runs.checkpoint import digest_of
from dpsur.runs.files import sha256

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# What comes from these counts by its name: another version of them is not another loss.
_KNOWN = ("torch", "builtins", "math", "numpy")


def model_identity(model: nn.Module) -> str:
    """A digest of a network's modules, their settings and their code, but not of its weights."""
    return sha256(repr(_Description().module(model)).encode())


def loss_identity(loss: LossFunction) -> str:
    """A digest of a loss: its name, its code and what that refers to, and a module's weights."""
    return sha256(repr(_Description().of(loss, inside=True)).encode())


class _Description:
    """Describes values by what is equal for equal ones; each of them once, so that it ends."""

    def __init__(self) -> None:
        self._bare = set(vars(nn.Module()))
        self._seen: dict[int, object] = {}  # holds on to them, or a number would be used again

    def of(self, value: Any, *, inside: bool = False) -> Any:
        """A value; what an object of some class holds only where `inside` asks for it."""
        if isinstance(value, _PLAIN):
            return repr(value)
        if id(value) in self._seen:
            return "seen"
        self._seen[id(value)] = value
        if isinstance(value, nn.Parameter):
            return "parameter"  # of a network: trained, and in the checkpoint
        if isinstance(value, Tensor):
            return digest_of({"": value})
        if isinstance(value, nn.Module):
            return self.module(value), digest_of(value.state_dict())
        if isinstance(value, (list, tuple)):
            return [self.of(item) for item in value]
        if isinstance(value, (set, frozenset)):
            return sorted(repr(self.of(item)) for item in value)
        if isinstance(value, Mapping):
            return sorted((repr(key), repr(self.of(item))) for key, item in value.items())
        return self._callable(value, inside=inside)

    def module(self, module: nn.Module) -> Any:
        return _ADDRESS.sub("", repr(module)), [
            (name, _name(type(part)), self._class(type(part)), self._settings(part))
            for name, part in module.named_modules(remove_duplicate=False)
        ]

    def _settings(self, module: nn.Module) -> Any:
        own = {name: value for name, value in vars(module).items() if name not in self._bare}
        return [(name, self.of(value)) for name, value in sorted(own.items())]

    def _callable(self, value: Any, *, inside: bool) -> Any:
        if isinstance(value, functools.partial):
            return [self.of(part) for part in (value.func, value.args, value.keywords)]
        if isinstance(value, MethodType):
            return self.of(value.__func__), self.of(value.__self__, inside=inside)
        if isinstance(value, FunctionType):
            return _name(value), self._function(value)
        if isinstance(value, type) or not hasattr(value, "__dict__"):
            return _name(value)
        return _name(type(value)), self._class(type(value)), self.of(vars(value)) if inside else ""

    def _class(self, kind: type) -> Any:
        if _is_known(kind):
            return []
        own = [(name, getattr(part, "__func__", part)) for name, part in sorted(vars(kind).items())]
        functions = [(n, self._function(f)) for n, f in own if isinstance(f, FunctionType)]
        plain = [(n, repr(v)) for n, v in own if isinstance(v, _PLAIN) and not n.startswith("__")]
        return functions, plain, [self._class(base) for base in kind.__bases__]

    def _function(self, function: FunctionType) -> Any:
        if _is_known(function):
            return []
        code, named = function.__code__, function.__globals__
        referred = [
            *(function.__defaults__ or ()),
            *(function.__kwdefaults__ or {}).values(),
            *(_content(cell) for cell in function.__closure__ or ()),
            *(named[name] for name in code.co_names if name in named),
        ]
        return self._code(code), [self.of(value) for value in referred]

    def _code(self, code: CodeType) -> Any:
        """Instructions, names and constants, without the lines of the file that they come from."""
        constants = [
            self._code(c) if isinstance(c, CodeType) else _constant(c) for c in code.co_consts
        ]
        return code.co_code.hex(), constants, code.co_names, code.co_varnames


def _constant(value: Any) -> str:
    # The order of a set of words differs from process to process.
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _is_known(part: Any) -> bool:
    return (getattr(part, "__module__", None) or "").split(".")[0] in _KNOWN


def _name(part: Any) -> str:
    """The name of a thing, with its module only where its code is not looked at."""
    found = str(getattr(part, "__qualname__", None) or type(part).__qualname__)
    return f"{part.__module__}.{found}" if _is_known(part) else found
