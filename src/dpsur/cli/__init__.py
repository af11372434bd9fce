"""The command `dpsur`."""

import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import TextIO

from dpsur._version import __version__
from dpsur.cli.console import standard_streams
from dpsur.cli.parser import Parser
from dpsur.cli.private_log import logged_privately
from dpsur.cli.signals import interrupts_exit_at_once
from dpsur.errors import (
    DiagnosticsWarning,
    DpsurError,
    FileError,
    InterruptedRunError,
    InvalidInputError,
    PrivacyWarning,
    describe_os_error,
)

# name -> module and what it does, in the order of the help. Only the module of the command that is
# run is imported, so that accounting does not wait for torch.
COMMANDS = {
    "train": ("dpsur.cli.train", "train a model under a privacy budget"),
    "evaluate": ("dpsur.cli.evaluate", "test a release on its task's public test set"),
    "verify": ("dpsur.cli.verify", "recompute a release's epsilon and check its weights"),
    "proof": ("dpsur.cli.proof", "the theorem behind epsilon, its proof and its limits"),
    "account": ("dpsur.cli.account", "what a run costs, under each accounting"),
    "calibrate": ("dpsur.cli.calibrate", "noise, updates or test for a budget"),
    "attack": ("dpsur.cli.attack", "membership inference on a target or on a release"),
    "audit": ("dpsur.cli.audit", "lower bounds on epsilon, to hold against what is claimed"),
    "bench": ("dpsur.cli.bench", "time and memory of a step of your model, beside its peers"),
    "data": ("dpsur.cli.data", "fetch the public data sets and show which are there"),
    "cache": ("dpsur.cli.cache", "show or empty what is kept to save time"),
    "tasks": ("dpsur.cli.tasks", "list the tasks that can be trained"),
    "methods": ("dpsur.cli.methods", "list the methods and their hyper-parameters"),
}

MOVED = "`dpsur reproduce` has moved: run `python -m reproduction` in a checkout of the repository"
DESCRIPTION = """\
Differentially private training with selective update and release.

  dpsur train --out run          train on embedded digits at epsilon 3
  dpsur evaluate run             test what was released
  dpsur train --resume run       resume after an interruption
  dpsur verify run               recompute its epsilon and check its weights
  dpsur data fetch mnist         download a public data set, for --task mnist
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    2 for bad input and for files that cannot be read or written, 3 where nothing is released, 130
    for an interruption.
    """
    return run_command(build_parser, "dpsur", arguments)


def run_command(
    parser_for: Callable[[Sequence[str]], Parser],
    program: str,
    arguments: Sequence[str] | None = None,
) -> int:
    """Parse and run a command. Errors and warnings are one line each, headed by its name."""
    try:
        with standard_streams():
            given = sys.argv[1:] if arguments is None else list(arguments)
            return _run(parser_for, program, given)
    except FileError as error:  # of standard output, which is flushed last
        with standard_streams():
            return _report(program, f"error: {error}", 2)
    finally:
        if arguments is None:  # the process ends: Ctrl-C has nothing left to stop
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run(parser_for: Callable[[Sequence[str]], Parser], program: str, given: list[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # no letter that a locale lacks ends a command
            stream.reconfigure(errors="backslashreplace")
    try:
        with interrupts_exit_at_once():
            options = parser_for(given).parse_args(given)
        with warnings.catch_warnings():
            for kind in (PrivacyWarning, DiagnosticsWarning):  # also under `python -W error`
                warnings.simplefilter("always", kind)
            warnings.showwarning = _ShowOnce(program)
            return int(options.run(options))
    except InvalidInputError as error:
        return _report(program, f"error: {error}{logged_privately(error, given)}", 2)
    except OSError as error:
        return _report(program, f"error: {describe_os_error(error)}", 2)
    except KeyboardInterrupt:
        return _report(program, "stopped", 130)
    except InterruptedRunError as error:
        return _report(program, str(error), 130)
    except DpsurError as error:
        return _report(program, f"error: {error}", 3)


def _report(program: str, text: str, status: int) -> int:
    print(f"{program}: {text}", file=sys.stderr)
    return status


def build_parser(given: Sequence[str]) -> Parser:
    """The parser of the command line, with the options of the command that is given."""
    if given[:1] == ["reproduce"]:
        raise InvalidInputError(MOVED)
    parser = Parser(prog="dpsur", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"dpsur {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if given[:1] == [name]:
            import_module(module).set_up(command)
    return parser


class _ShowOnce:
    """Prints a warning on one line, and once: a command may make many runs of one kind."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._shown: set[str] = set()

    def __call__(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        del category, filename, lineno, line
        if str(message) not in self._shown:
            self._shown.add(str(message))
            print(f"{self._program}: warning: {message}", file=file or sys.stderr)
