"""Refuse a model or a loss that changes when it is called.

Clipping bounds what one record adds to a sum only if its gradient depends on that record alone. A
running mean, a counter or the last batch in an attribute makes it depend on the records before.
"""

import copy
import dis
import functools
import itertools
import sys
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import CodeType, FunctionType, MappingProxyType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpsur.errors import InvalidInputError, UnsupportedModelError
from dpsur.functional.problem import LossFunction


def refuse_memory(
    what: str,
    subject: Any,
    call: Callable[[Any, int], None],
    error: type[InvalidInputError],
    *,
    weights: bool = True,
) -> None:
    """Refuse a model or loss that changes while it is called on synthetic records.

    `call` makes the n-th call, each with other records and another number of them. What the first
    one sets for good is a cache, and fine if another copy sets the same on other records.
    """
    fresh = _copy(subject)
    start = snapshot(subject, weights=weights)
    try:
        call(subject, 0)
    except RuntimeError:
        # torch.vmap cannot use what an earlier call of it left behind in an attribute, and autograd
        # cannot use what was overwritten
        after = snapshot(subject, weights=weights)
        left = (name for (name, _), held in after.items() if held is LEFT_BEHIND)
        with suppress(RuntimeError):
            call(subject, 1)
        changed = next(left, difference(after, snapshot(subject, weights=weights)))
        if changed is None:
            raise
        raise error(changes(what, subject, changed)) from None
    first = snapshot(subject, weights=weights)
    for number in (1, 2):
        call(subject, number)
        changed = difference(first, snapshot(subject, weights=weights))
        if changed is not None:
            raise error(changes(what, subject, changed))
    changed = difference(start, first)
    if changed is None:
        return
    if fresh is not None and difference(start, snapshot(fresh, weights=weights)) is None:
        call(fresh, 2)
        changed = difference(first, snapshot(fresh, weights=weights))
    if changed is not None:
        raise error(changes(what, subject, changed))


def changes(what: str, subject: object, name: str) -> str:
    """One line about a model or loss that changes."""
    return (
        f"the {what} ({getattr(subject, '__name__', type(subject).__name__)}) keeps state: "
        f"{name or 'its value'} changes when it is called, so that one record's gradient would "
        "depend on others and exceed the clipping norm; compute everything from the arguments of "
        "the call and keep nothing, not even a count of calls"
    )


def _copy(subject: Any) -> Any:
    """Another one with the same weights; None if it cannot be copied."""
    shared = {}
    if isinstance(subject, nn.Module):
        shared = {id(value): value for value in subject.parameters()}
    try:
        return copy.deepcopy(subject, shared)
    except Exception:  # whatever an object of a user raises: then there is no copy to compare with
        return None


# By name, and a number where several things go by one name, such as an object and its class.
Snapshot = dict[tuple[str, int], Any]

_MOST, _DEEPEST = 20_000, 12
# Classes and functions of these packages are taken to keep no records; their instances may hold
# what a user put there.
_TRUSTED = {*sys.stdlib_module_names, "dpsur", "numpy", "torch"}
# The same, but what their instances hold is looked at: configurations, caches of attention.
_LIBRARIES = {"accelerate", "lightning", "peft", "timm", "torchvision", "transformers"}
_CONTAINERS = (list, tuple, deque)
_MAPPINGS = (dict, MappingProxyType)
_OF_EVERY_MODULE = set(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
LEFT_BEHIND = "a tensor that belongs to a call of torch.vmap"
_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME")


def snapshot(subject: object, *, weights: bool = True) -> Snapshot:
    """Copies of everything that is seen, by the name a user has for it.

    Without `weights`, parameters and buffers of modules are left out.
    """
    found: Snapshot = {}
    known: set[int] = set()
    uses: Counter[str] = Counter()
    ahead: deque[tuple[str, Any, int]] = deque([("", subject, 0)])
    while ahead and len(found) < _MOST:
        name, value, depth = ahead.popleft()
        leaf, inside = _seen(name, value, weights=weights)
        found[name, uses[name]] = leaf
        uses[name] += 1
        if inside is None or id(value) in known or depth == _DEEPEST:
            continue
        known.add(id(value))
        ahead.extend((inner, held, depth + 1) for inner, held in inside)
    return found


def difference(before: Snapshot, after: Snapshot) -> str | None:
    """The name of something that changed, if anything did."""
    for key in (*before, *(key for key in after if key not in before)):
        if key not in before or key not in after or not _same(before[key], after[key]):
            return key[0]
    return None


Inside = Iterator[tuple[str, Any]]


def _seen(name: str, value: Any, *, weights: bool) -> tuple[Any, Inside | None]:
    """What is noted about a value, and what it holds, if that is looked at."""
    kind = type(value)
    if isinstance(value, Tensor):
        return _tensor(value), None
    if isinstance(value, np.ndarray):
        return value.copy(), None
    if isinstance(value, (set, frozenset)):  # whose order is another one in a copy
        return (kind, sorted(map(repr, value))), None
    if isinstance(value, (bytearray, array, itertools.count)):
        return (bytes(value) if isinstance(value, (bytearray, array)) else repr(value)), None
    if value is None or isinstance(value, (int, float, complex, str, bytes, np.generic)):
        return value, None
    if isinstance(value, _CONTAINERS):
        return (kind, len(value)), ((f"{name}[{i}]", one) for i, one in enumerate(value))
    if isinstance(value, _MAPPINGS):
        return (kind, len(value)), _of_mapping(name, value)
    if isinstance(value, functools.partial):
        return kind, iter(
            [(name, value.func), (name, value.args), *_of_names(name, value.keywords)]
        )
    if isinstance(value, MethodType):
        return kind, iter([(name, value.__self__), (name, value.__func__)])
    if isinstance(value, FunctionType):
        if _trusted(value.__module__, libraries=True):
            return None, None
        return None, _of_function(name, value)
    if isinstance(value, type):
        if _trusted(value.__module__, libraries=True):
            return None, None
        return kind, _of_class(name, value)
    if isinstance(value, nn.Module):
        return kind, _of_module(name, value, weights=weights)
    if _trusted(kind.__module__):
        return kind, None
    return kind, _of_object(name, value)


def _tensor(value: Tensor) -> Any:
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return LEFT_BEHIND
    return value.detach().clone()


def _of_mapping(name: str, value: Mapping[Any, Any]) -> Inside:
    for place, (key, held) in enumerate(list(value.items())):
        known = isinstance(key, (str, int, float, bool, type(None)))
        yield f"{name}[{repr(key) if known else place}]", held


def _of_names(name: str, value: Mapping[str, Any]) -> Inside:
    prefix = f"{name}." if name else ""
    yield from ((f"{prefix}{key}", held) for key, held in list(value.items()))


def _of_object(name: str, value: Any) -> Inside:
    yield from _of_names(name, getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                yield from _of_names(name, {slot: getattr(value, slot)})
    yield name, type(value)


def _of_module(name: str, module: nn.Module, *, weights: bool) -> Inside:
    held = vars(module)
    yield from _of_names(name, module._modules)
    if weights:
        yield from _of_names(name, module._parameters)
        yield from _of_names(name, module._buffers)
    for key, value in list(held.items()):
        # recurrent layers keep another list of their weights
        if key not in _OF_EVERY_MODULE and not key.startswith("_flat_weight"):
            yield from _of_names(name, {key: value})
    for hooks in _HOOKS:
        for hook in list(held.get(hooks, {}).values()):
            yield name, hook
    yield name, type(module)


def _of_class(name: str, kind: type) -> Inside:
    for parent in kind.__mro__:
        if _trusted(parent.__module__, libraries=True):
            continue
        for key, value in list(vars(parent).items()):
            function = getattr(value, "__func__", value)  # of a static or class method
            if isinstance(function, FunctionType):
                yield name, function
            elif not key.startswith("__"):
                yield from _of_names(name, {key: value})


def _of_function(name: str, function: FunctionType) -> Inside:
    code = function.__code__
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            held = cell.cell_contents
        except ValueError:  # not set yet
            continue
        if held is not function:
            # a class that `super()` needs, or the object itself, under its own name
            yield from (
                [(name, held)]
                if variable in ("__class__", "self")
                else _of_names(name, {variable: held})
            )
    defaults = function.__defaults__ or ()
    arguments = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
    yield from _of_names(name, dict(zip(arguments, defaults, strict=True)))
    yield from _of_names(name, function.__kwdefaults__ or {})
    yield from _of_names(name, vars(function))
    for key in sorted(_globals(code)):
        if key in function.__globals__:
            yield key, function.__globals__[key]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for held in code.co_consts:
        if isinstance(held, CodeType):
            yield from _codes(held)


@functools.lru_cache(4096)
def _globals(code: CodeType) -> set[str]:
    """Globals that a function names, directly or in a function that it defines."""
    return {
        str(step.argval)
        for one in _codes(code)
        for step in dis.get_instructions(one)
        if step.opname in _GLOBALS
    }


def _trusted(module: str | None, *, libraries: bool = False) -> bool:
    package = "" if module is None else module.partition(".")[0]
    return package in _TRUSTED or (libraries and package in _LIBRARIES)


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
            return False
        if one.layout != torch.strided or one.is_quantized:
            return bool(torch.equal(one.to_dense(), other.to_dense()))
        both = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
        return torch.equal(*both)
    if isinstance(one, np.ndarray):
        return bool(one.shape == other.shape and one.tobytes() == other.tobytes())
    return bool(one == other) or (one != one and other != other)


def fixed_parts(model: nn.Module) -> dict[str, Tensor]:
    """Buffers, whether or not they are saved, and parameters that are not trained."""
    parts = dict(model.named_buffers(remove_duplicate=False))
    for name, value in model.named_parameters(remove_duplicate=False):
        if not value.requires_grad:
            parts[name] = value.detach()
    return parts


def check_fixed_parts(model: nn.Module, original: nn.Module) -> None:
    """Refuse a model whose fixed parts are no longer, bit by bit, those it had at the start."""
    before, after = fixed_parts(original), fixed_parts(model)
    for name in sorted(before.keys() | after.keys()):
        if name in before and name in after and _same_bits(before[name], after[name]):
            continue
        raise UnsupportedModelError(
            f"{name}, a buffer or frozen parameter, changed in a forward pass and would "
            "carry private records into the release, so nothing is released; make the forward "
            "pass free of side effects"
        )


class Unchanged:
    """What a model and a loss hold besides their weights, to compare with later."""

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        self._subjects = {"model": model, "loss": loss}
        self._before = {what: self._now(what) for what in self._subjects}

    def check(self) -> None:
        """Refuse a model or loss that has changed: what it did with records is not bounded."""
        for what, subject in self._subjects.items():
            changed = difference(self._before[what], self._now(what))
            if changed is not None:
                raise UnsupportedModelError(changes(what, subject, changed))

    def _now(self, what: str) -> Snapshot:
        return snapshot(self._subjects[what], weights=what == "loss")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_bytes(one.to(other.device)), _bytes(other))


def _bytes(values: Tensor) -> Tensor:
    dense = values.detach().to_dense().contiguous()
    return dense.reshape(-1).view(torch.uint8)
