"""Plain values and numpy arrays out of the pickled files that some data sets are published as.

The bytes are read as a list of instructions, and only those that build lists, tuples, dicts, texts,
numbers and numpy arrays are followed. Nothing is imported, called or executed, so a file from
anywhere can at worst be refused.
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


@dataclass
class Described:
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
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"broken instructions ({error!r})") from error
    return value


def as_array(value: Any) -> NDArray[Any]:
    """The numpy array that a value describes: of bytes, or one-dimensional of Python objects."""
    if not isinstance(value, Described) or value.name not in ARRAY:
        raise ValueError("no numpy array where one was expected")
    try:
        _, shape, kind, fortran, payload = value.state
        code = kind.arguments[0]
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise ValueError("an incomplete numpy array") from error
    if fortran:
        raise ValueError("a numpy array in Fortran order")
    if code.startswith(OBJECT) and isinstance(payload, list):
        array = np.empty(len(payload), dtype=object)
        array[:] = payload
        return array.reshape(shape)
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
                stack.append(self._memory[argument])
            case "APPEND":
                item = stack.pop()
                stack[-1].append(item)
            case "APPENDS":
                items = self._since_mark()
                stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                items = self._since_mark() if instruction == "SETITEMS" else self._top(2)
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "TUPLE":
                stack.append(tuple(self._since_mark()))
            case _ if instruction in TUPLES:
                stack.append(tuple(self._top(TUPLES[instruction])))
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
                stack.append(_allowed(" ".join(self._top(2))))
            case "REDUCE":
                name, arguments = self._top(2)
                stack.append(Described(_allowed(name), arguments))
            case "BUILD":
                described, state = self._top(2)
                if not isinstance(described, Described):
                    raise ValueError("a state for something that has none")
                described.state = state
                stack.append(described)
            case _:
                raise ValueError(f"the instruction {instruction}, which plain values do not need")

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


def _allowed(name: Any) -> str:
    if name not in NAMES:
        raise ValueError(f"the name {name!r}, which no data set needs")
    return str(name)
