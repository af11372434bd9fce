"""Argument parsing with one-line errors."""

import argparse
import math
import os
from pathlib import Path
from typing import Any, ClassVar, NoReturn

# Larger numbers do not fit the integers of torch and numpy.
LARGEST_NUMBER = 2**63 - 1
# What Linux file systems take: bytes of a name and of a whole path.
LONGEST_NAME, LONGEST_PATH = 255, 4095
LONGEST_SHOWN = 40


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, headed by the program's name, with exit status 2.

    Values of every option are checked here, so that no command has to: numbers are finite and fit
    64 bits, texts are printable and fit a path.
    """

    program: ClassVar[str] = "dpsur"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self.register("type", int, whole_number)
        self.register("type", float, finite_number)
        self.register("type", None, text)
        self.register("type", str, text)
        self.register("type", Path, lambda value: Path(text(value)))

    def add_subparsers(self, **kwargs: Any) -> Any:
        """Subcommands. The words after a command are checked by the parser of that command."""
        action = super().add_subparsers(**kwargs)
        action.type = str.__str__
        return action

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse. argparse would read `--option=--` as an option whose value is an empty list."""
        for word in args or ():
            if word.startswith("--") and word.endswith("=--"):
                self.error(f"argument {word[:-3]}: expected a value, got '--'")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where to look."""
        printable = "".join(letter if letter.isprintable() else "?" for letter in message)
        self.exit(2, f"{self.program}: error: {printable} (see: {self.prog} --help)\n")


def whole_number(value: str) -> int:
    """A whole number of at most 64 bits."""
    _check_length(value)
    number = int(value)
    if abs(number) > LARGEST_NUMBER:
        raise argparse.ArgumentTypeError(f"{shown(value)} is too large a number")
    return number


def finite_number(value: str) -> float:
    """A number, but neither infinity nor NaN."""
    _check_length(value)
    number = float(value)
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{shown(value)} is not a finite number")
    return number


def text(value: str) -> str:
    """A name or path that a file system can take."""
    if not value.isprintable():
        raise argparse.ArgumentTypeError(f"{shown(value)} holds a line break or control character")
    longest = max(len(os.fsencode(part)) for part in value.split("/"))
    if longest > LONGEST_NAME:
        raise argparse.ArgumentTypeError(
            f"{shown(value)} holds a name of {longest} bytes; {LONGEST_NAME} are possible"
        )
    if len(os.fsencode(value)) > LONGEST_PATH:
        raise argparse.ArgumentTypeError(f"{shown(value)} is longer than {LONGEST_PATH} bytes")
    return value


def shown(value: str) -> str:
    """A value as an error quotes it: escaped, and cut where it is long."""
    cut = value if len(value) <= LONGEST_SHOWN else f"{value[:LONGEST_SHOWN]}..."
    return ascii(cut)


def _check_length(value: str) -> None:
    if len(value) > LONGEST_NAME:
        raise argparse.ArgumentTypeError(f"{shown(value)} is too long for a number")
