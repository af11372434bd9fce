"""Argument parsing with one-line errors."""

import argparse
import difflib
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

# Larger numbers do not fit the integers of torch and numpy.
LARGEST_NUMBER = 2**63 - 1
# What Linux file systems take: bytes of a name and of a whole path.
LONGEST_NAME, LONGEST_PATH = 255, 4095
LONGEST_SHOWN = 40
# What figures are written as.
FIGURES = (".svg", ".png", ".pdf")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, headed by the program's name, with exit status 2.

    Values of every option are checked here, so that no command has to: numbers are finite and fit
    64 bits, texts are printable and fit a path.
    """

    program: ClassVar[str] = "dpsur"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        self._rare: list[argparse.Action] = []
        self._whole = False
        super().__init__(*args, **kwargs)
        self.register("type", int, whole_number)
        self.register("type", float, finite_number)
        self.register("type", None, text)
        self.register("type", str, text)
        self.register("type", Path, lambda value: Path(text(value)))

    def show_in_full_help(self, action: argparse.Action) -> None:
        """Leave an option out of `--help`; `--help-all` shows it."""
        if not self._rare:
            text = "show all options and exit"
            hidden = argparse.SUPPRESS
            self.add_argument("--help-all", action=_HelpAll, nargs=0, dest=hidden, help=text)
        self._rare.append(action)

    def format_help(self) -> str:
        hidden = [] if self._whole else [(action, action.help) for action in self._rare]
        for action, _ in hidden:
            action.help = argparse.SUPPRESS
        text = super().format_help()
        for action, help_text in hidden:
            action.help = help_text
        if hidden:
            text += f"\n{len(hidden)} more options: {self.prog} --help-all\n"
        return text

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

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse. An unknown option is reported by the command that it was given to."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            parser = self._command_parser(args)
            word = next((word for word in rest if word.startswith("-")), rest[0])
            parser.error(
                f"unrecognized arguments: {' '.join(rest)}"
                + _closest(word.partition("=")[0], parser._option_string_actions)
            )
        return found

    def _command_parser(self, args: Any) -> "Parser":
        """The parser of the command that the arguments name, this one if they name none."""
        parser, words = self, list(args or ())
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                named = [n for n, word in enumerate(words) if word in action.choices]
                if named:
                    command = action.choices[words[named[0]]]
                    parser = command._command_parser(words[named[0] + 1 :])
        return parser

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = ", ".join(map(str, action.choices))
            raise argparse.ArgumentError(
                action,
                f"invalid choice: {shown(str(value))}{_closest(str(value), action.choices)} "
                f"(choose from {choices})",
            )

    def error(self, message: str) -> NoReturn:
        printable = "".join(letter if letter.isprintable() else "?" for letter in message)
        self.exit(2, f"{self.program}: error: {printable} (see: {self.prog} --help)\n")


class _HelpAll(argparse.Action):
    def __call__(self, parser: Any, *_: Any) -> None:
        parser._whole = True
        parser.print_help()
        parser.exit()


def whole_number(value: str) -> int:
    number = int(_short(value))
    if abs(number) > LARGEST_NUMBER:
        raise argparse.ArgumentTypeError(f"{shown(value)} is too large a number")
    return number


def finite_number(value: str) -> float:
    number = float(_short(value))
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{shown(value)} is not a finite number")
    return number


def _short(value: str) -> str:
    if len(value) > LONGEST_NAME:
        raise argparse.ArgumentTypeError(f"{shown(value)} is too long for a number")
    return value


def text(value: str) -> str:
    """A name or path that a file system can take."""
    if not value:
        raise argparse.ArgumentTypeError("expected a value, got ''")
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


def figure_path(value: str) -> Path:
    """A file that a figure can be written to, checked before anything is computed."""
    path = Path(text(value))
    if path.suffix not in FIGURES:
        raise argparse.ArgumentTypeError(f"{shown(value)} must end in .svg, .png or .pdf")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"there is no folder {shown(str(path.parent))}; create it, or choose another file"
        )
    return path


def _closest(word: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def shown(value: str) -> str:
    """A value as an error quotes it: escaped, and cut where it is long."""
    cut = value if len(value) <= LONGEST_SHOWN else f"{value[:LONGEST_SHOWN]}..."
    return ascii(cut)
