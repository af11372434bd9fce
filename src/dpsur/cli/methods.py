"""`dpsur methods`: how to train."""

import argparse

from dpsur.cli.options import flag, set_by_tasks
from dpsur.methods import METHODS


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = "List the methods and their hyper-parameters."
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the methods and their options."""
    del options
    for name, method in METHODS.items():
        print(f"{name}: {method.summary}")
        for field in method.options():
            own = "the task's, else " if field.name in set_by_tasks() else ""
            default = "" if field.default is None else f" (default: {own}{field.default})"
            print(f"  {flag(field.name):<24} {field.metadata['help']}{default}")
        print()
    return 0
