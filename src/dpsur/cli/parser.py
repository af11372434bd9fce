"""Argument parsing with one-line errors."""

import argparse
from typing import Any, ClassVar, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, headed by the program's name, with exit status 2."""

    program: ClassVar[str] = "dpsur"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where to look."""
        self.exit(2, f"{self.program}: error: {message} (see: {self.prog} --help)\n")
