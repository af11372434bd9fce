"""Plain values and numpy arrays out of the pickled files that some data sets are published as.

The bytes are read as a list of instructions, and only those that build lists, tuples, dicts, texts,
numbers and numpy arrays are followed. Nothing is imported, called or executed, values are nested a
few levels deep at most, and keys are texts, so a file from anywhere can at worst be refused.
"""

import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ARRAY = {"numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"}
NAMES = {*ARRAY, "numpy ndarray", "numpy dtype"}
OBJECT = "O"

PUSH_ARGUMENT = {
    "BININT", "BININT1", "BININT2", "LONG1",
    "BINBYTES", "SHORT_BINBYTES", "BINSTRING", "SHORT_BINSTRING",
    "BINUNICODE", "SHORT_BINUNICODE",
}  # fmt: skip
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
IGNORED = {"PROTO", "FRAME", "STOP"}
# A dict of arrays of lists is five deep. Hashing tuples in tuples, thousands deep, ends the
# process.
DEEPEST = 8
# What may be used twice. A container could be put into itself.
SHARED = (str, bytes, int, type(None))
KEYS = (str, bytes)


@dataclass
class PickledObject:
    """A thing that the file describes by a name, arguments and a state. It is never made."""

    name: str
    arguments: Any
    state: Any = None


def read_plain_values(content: bytes) -> Any:
    """The value that the instructions describe; ValueError for anything but plain values."""
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(content):
            # Nearly all of the instructions: numbers in lists.
            if opcode.name in PUSH_ARGUMENT:
                machine.stack.append(argument)
            else:
                machine.follow(opcode.name, argument)
        (value,) = machine.stack
    except (LookupError, TypeError, AttributeError, ArithmeticError, MemoryError) as error:
        raise ValueError(f"broken instructions ({type(error).__name__})") from error
    return value


def as_array(value: Any) -> NDArray[Any]:
    """The numpy array that a value describes: of bytes, or one-dimensional of Python objects."""
    if not isinstance(value, PickledObject) or value.name not in ARRAY:
        raise ValueError("no numpy array where one was expected")
    try:
        _, shape, kind, fortran, payload = value.state
        code = kind.arguments[0]
        whole = isinstance(shape, tuple) and all(isinstance(length, int) for length in shape)
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise ValueError("an incomplete numpy array") from error
    if not whole or not isinstance(code, str):
        raise ValueError("an incomplete numpy array")
    if fortran:
        raise ValueError("a numpy array in Fortran order")
    if code.startswith(OBJECT) and isinstance(payload, list):
        return np.fromiter(payload, object, len(payload)).reshape(shape)
    if code in {"u1", "|u1"} and isinstance(payload, (str, bytes)):
        # A text is how Python 2 wrote bytes.
        raw = payload.encode("latin-1") if isinstance(payload, str) else payload
        return np.frombuffer(raw, dtype=np.uint8).reshape(shape)
    raise ValueError(f"a numpy array of kind {code!r}")


class _Machine:
    """The stack and the memory that instructions work on."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memory: dict[int, Any] = {}

    def follow(self, instruction: str, argument: Any) -> None:
        stack = self.stack
        match instruction:
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "MARK":
                self._marks.append(len(stack))
            case "BINPUT" | "LONG_BINPUT":
                self._memory[argument] = stack[-1]
            case "MEMOIZE":
                self._memory[len(self._memory)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._shared(argument))
            case "APPEND" | "APPENDS":
                items = self._since_mark() if instruction == "APPENDS" else self._top(1)
                _check_depth(items)
                stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                items = self._since_mark() if instruction == "SETITEMS" else self._top(2)
                _check_depth(items)
                stack[-1].update(zip(_texts(items[::2]), items[1::2], strict=True))
            case "TUPLE":
                stack.append(_tuple(self._since_mark()))
            case _ if instruction in TUPLES:
                stack.append(_tuple(self._top(TUPLES[instruction])))
            case _ if instruction in CONSTANTS:
                stack.append(CONSTANTS[instruction])
            case _ if instruction not in IGNORED:
                self._describe(instruction, argument)

    def _describe(self, instruction: str, argument: Any) -> None:
        stack = self.stack
        match instruction:
            case "GLOBAL":
                stack.append(_allowed(argument))
            case "STACK_GLOBAL":
                stack.append(_allowed(" ".join(_texts(self._top(2)))))
            case "REDUCE":
                name, arguments = self._top(2)
                _check_depth([arguments])
                stack.append(PickledObject(_allowed(name), arguments))
            case "BUILD":
                described, state = self._top(2)
                if not isinstance(described, PickledObject) or described.state is not None:
                    raise ValueError("a state for something that has none, or has one already")
                _check_depth([state])
                described.state = state
                stack.append(described)
            case _:
                raise ValueError(f"the instruction {instruction}, which plain values do not need")

    def _shared(self, place: int) -> Any:
        value = self._memory[place]
        if not isinstance(value, SHARED):
            raise ValueError("a value that is used twice and is neither a text nor a number")
        return value

    def _since_mark(self) -> list[Any]:
        return self._cut(self._marks.pop())

    def _top(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError("the stack is too short")
        return self._cut(len(self.stack) - count)

    def _cut(self, start: int) -> list[Any]:
        items = self.stack[start:]
        del self.stack[start:]
        return items


def _tuple(items: list[Any]) -> tuple[Any, ...]:
    _check_depth(items)
    return tuple(items)


def _check_depth(items: list[Any], depth: int = 1) -> None:
    """Refuse what would be nested too deep inside a container of these items.

    A container is filled before it is put into another one, so its depth does not grow later.
    """
    if depth >= DEEPEST:
        raise ValueError(f"values that are nested more than {DEEPEST} deep")
    # Most containers hold numbers only, which the set of their types tells in no time.
    if not {list, tuple, dict, PickledObject}.isdisjoint(map(type, items)):
        for item in items:
            if isinstance(item, PickledObject):
                _check_depth([item.arguments, item.state], depth + 1)
            elif isinstance(item, dict):
                _check_depth(list(item.values()), depth + 1)
            elif isinstance(item, (list, tuple)):
                _check_depth(list(item), depth + 1)


def _texts(values: list[Any]) -> list[Any]:
    for value in values:
        if not isinstance(value, KEYS):
            raise ValueError(f"a {type(value).__name__} in the place of a text")
    return values


def _allowed(name: Any) -> str:
    if not isinstance(name, str) or name not in NAMES:
        shown = f" {name[:80]!r}" if isinstance(name, str) else ""
        raise ValueError(f"the name{shown}, which no data set needs")
    return name
