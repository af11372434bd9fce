"""Work in turns: a generator that yields while a device is busy, so that others can use the time.

Written once, the same work can be done alone, with `finished`, or beside other work.
"""

from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")
Turns = Generator[None, None, Result]


def finished(turns: Turns[Result]) -> Result:
    """Take all turns at once and return the result."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            result: Result = end.value
            return result
