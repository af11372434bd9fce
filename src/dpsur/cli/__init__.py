"""The command `dpsur`."""

import sys
import warnings
from collections.abc import Sequence
from typing import TextIO

from dpsur.cli import evaluate, listing, train
from dpsur.cli.parsing import Parser
from dpsur.errors import DpsurError, InterruptedRunError, InvalidInputError, PrivacyWarning

COMMANDS = (train, evaluate, listing.tasks, listing.methods)

DESCRIPTION = """\
Differentially private training with selective update and release.

  dpsur train --out run          train on embedded digits at epsilon 3
  dpsur evaluate run             test what was released
  dpsur train --resume run       go on after an interruption
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 2 for bad input, 3 where nothing is released."""
    parser = Parser(prog="dpsur", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_to(commands)
    options = parser.parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", PrivacyWarning)
            warnings.showwarning = _show_warning
            return int(options.run(options))
    except InvalidInputError as error:
        print(f"dpsur: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dpsur: stopped", file=sys.stderr)
        return 130
    except InterruptedRunError as error:
        print(f"dpsur: {error}", file=sys.stderr)
        return 130
    except DpsurError as error:
        print(f"dpsur: error: {error}", file=sys.stderr)
        return 3


def _version() -> str:
    from dpsur._version import __version__

    return f"dpsur {__version__}"


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    del category, filename, lineno, line
    print(f"dpsur: warning: {message}", file=file or sys.stderr)
