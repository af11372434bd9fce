"""The command `dpsur`."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import TextIO

from dpsur._version import __version__
from dpsur.cli.parser import Parser
from dpsur.cli.private_log import logged_privately
from dpsur.errors import DpsurError, InterruptedRunError, InvalidInputError, PrivacyWarning

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
    "reproduce": ("dpsur.cli.reproduce", "make the paper's tables and figures"),
    "bench": ("dpsur.cli.bench", "speed and memory, side by side with PyTorch and Opacus"),
    "data": ("dpsur.cli.data", "fetch the public data sets and show which are there"),
    "cache": ("dpsur.cli.cache", "show or empty what is kept to save time"),
    "tasks": ("dpsur.cli.tasks", "list the tasks that can be trained"),
    "methods": ("dpsur.cli.methods", "list the methods and their hyper-parameters"),
}

DESCRIPTION = """\
Differentially private training with selective update and release.

  dpsur train --out run          train on embedded digits at epsilon 3
  dpsur evaluate run             test what was released
  dpsur train --resume run       go on after an interruption
  dpsur verify run               recompute its epsilon and check its weights
  dpsur data fetch mnist         download a public data set, for --task mnist
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 2 for bad input, 3 where nothing is released."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = build_parser(given).parse_args(given)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", PrivacyWarning)
            warnings.showwarning = _ShowOnce()
            return int(options.run(options))
    except InvalidInputError as error:
        print(f"dpsur: error: {error}{logged_privately(error, given)}", file=sys.stderr)
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


def build_parser(given: Sequence[str]) -> Parser:
    """The parser of the command line, with the options of the command that is given."""
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

    def __init__(self) -> None:
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
            print(f"dpsur: warning: {message}", file=file or sys.stderr)
