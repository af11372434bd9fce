"""The command `dpsur`."""

import argparse
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from io import TextIOWrapper

from dpsur._version import __version__
from dpsur.cli.parser import Parser
from dpsur.cli.terminal import interrupts_exit_at_once, logged_privately, standard_streams
from dpsur.errors import (
    DiagnosticsWarning,
    DpsurError,
    FileError,
    InterruptedRunError,
    InvalidInputError,
    PrivacyWarning,
    describe_os_error,
)

# purpose -> name -> module and part, and what it does, in the order of the help. The module has
# `set_up_PART` and `run_PART`, or `set_up` and `run`. Only that of the command that is run is
# imported, so that accounting does not wait for torch.
GROUPS = {
    "train": {
        "train": ("train", "train a model under a privacy budget"),
        "plan": ("plan", "what a run would cost and give, before it is made"),
        "evaluate": ("evaluate", "test a release on its task's public test set"),
        "predict": ("evaluate:predict", "predictions of a release for new records"),
        "export": ("evaluate:export", "a program that needs no dpsur"),
        "report": ("report", "one HTML page about a finished run"),
        "compare": ("evaluate:compare", "finished runs side by side"),
        "plot": ("report:plot", "plot epsilon, accuracy or attack power of runs"),
        "methods": ("listings:methods", "list methods and hyper-parameters"),
        "explain": ("bench:explain", "which engine finds a model's gradients, why"),
        "bench": ("bench", "what a private step of your model costs"),
    },
    "check": {
        "verify": ("verify", "recompute a release's epsilon, check its weights"),
        "sign": ("verify:sign", "sign a release: changes are noticed"),
        "statement": (
            "report:statement",
            "a release's privacy statement, for reviewers, groups or other neighbours",
        ),
        "audit": ("attack:audit", "empirical lower bounds on epsilon"),
        "attack": ("attack", "membership inference on a target or a release"),
    },
    "privacy": {
        "account": ("account", "what a run costs, under each accounting"),
        "calibrate": ("account:calibrate", "choose noise, updates or gate for a budget"),
        "ledger": ("data:ledger", "what all runs on a data set may spend together"),
        "proof": ("listings:proof", "the theorem behind epsilon, and its proof"),
    },
    "data": {
        "tasks": ("listings:tasks", "list the tasks that can be trained"),
        "data": ("data", "start a schema of a table"),
        "doctor": ("listings:doctor", "versions, devices, optional parts"),
        "completion": ("listings:completion", "tab completion for your shell"),
    },
}
COMMANDS = {name: home for group in GROUPS.values() for name, (home, _) in group.items()}

MOVED = "`dpsur reproduce` has moved: run `python -m reproduction` in a checkout of the repository"
DESCRIPTION = """\
Differentially private training with selective update and release.

  dpsur train --out run          train on embedded digits at epsilon 3
  dpsur evaluate run             test what was released
  dpsur predict run new.csv      predictions for new records
  dpsur train --resume run       resume after an interruption
  dpsur verify run               recompute its epsilon and check its weights
  dpsur data schema table.csv    start a schema, for --task csv:table.csv

"""
DESCRIPTION += "\n\n".join(
    "\n".join([f"{group}:", *(f"  {name:<12}{text}" for name, (_, text) in commands.items())])
    for group, commands in GROUPS.items()
)


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
            return _report(program, f"error: [{error.code}] {error}", 2)
    finally:
        if arguments is None:  # the process ends: Ctrl-C has nothing left to stop
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run(parser_for: Callable[[Sequence[str]], Parser], program: str, given: list[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # no letter that a locale lacks ends a command
            stream.reconfigure(errors="backslashreplace")
    options = argparse.Namespace()
    try:
        with interrupts_exit_at_once():
            options = parser_for(given).parse_args(
                given if given or program != "dpsur" else ["--help"]
            )
        with warnings.catch_warnings():
            for kind in (PrivacyWarning, DiagnosticsWarning):  # also under `python -W error`
                warnings.simplefilter("always", kind)
            warnings.showwarning = _ShowOnce(program)
            return int(options.run(options))
    except InvalidInputError as error:
        logged = logged_privately(error, getattr(options, "resume", None))
        return _report(program, f"{_line(error, given)}{logged}", 2)
    except OSError as error:
        return _report(program, _line(error, given), 2)
    except KeyboardInterrupt:
        return _report(program, "stopped", 130)
    except InterruptedRunError as error:
        return _report(program, str(error), 130)
    except DpsurError as error:
        return _report(program, _line(error, given), 3)


def _line(error: DpsurError | OSError, given: Sequence[str]) -> str:
    """An error with its code on one line; with `--json` also as an object on standard output."""
    text = describe_os_error(error) if isinstance(error, OSError) else str(error)
    code = error.code if isinstance(error, DpsurError) else FileError.code
    if "--json" in given:
        print(json.dumps({"error": {"code": code, "message": text}}))
    return f"error: [{code}] {text}"


def _report(program: str, text: str, status: int) -> int:
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    own = f"rank {rank}: " if size != "1" and status != 130 else ""
    if status != 130 or rank == "0" or size == "1":  # a stop that was asked for is said once
        print(f"{program}: {own}{text}", file=sys.stderr)
    return status


def build_parser(given: Sequence[str]) -> Parser:
    if given[:1] == ["reproduce"]:
        raise InvalidInputError(MOVED)
    usage = "dpsur [-h] [--version] COMMAND ..."
    parser = Parser(prog="dpsur", usage=usage, description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"dpsur {__version__}")
    commands = parser.add_subparsers(
        prog="dpsur", metavar="COMMAND", required=True, help=argparse.SUPPRESS
    )
    for name in COMMANDS:
        command = commands.add_parser(name)
        if given[:1] == [name]:
            set_up(name, command)
    return parser


def whole_parser() -> Parser:
    """The parser with the options of every command, for tab completion."""
    parser = Parser(prog="dpsur")
    parser.add_argument("--version", action="store_true")
    commands = parser.add_subparsers(prog="dpsur", metavar="COMMAND")
    for name in COMMANDS:
        set_up(name, commands.add_parser(name, help=name))  # completion skips what has no help
    return parser


def set_up(name: str, parser: argparse.ArgumentParser) -> None:
    module, *part = COMMANDS[name].split(":")
    home = import_module(f"dpsur.cli.{module}")
    parser.set_defaults(run=getattr(home, "_".join(["run", *part]), None))
    getattr(home, "_".join(["set_up", *part]))(parser)


class _ShowOnce:
    """Prints a warning on one line, and once: a command may make many runs of one kind."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._shown: set[str] = set()

    def __call__(self, message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in self._shown:
            self._shown.add(str(message))
            print(f"{self._program}: warning: {message}", file=sys.stderr)
