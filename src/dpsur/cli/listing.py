"""`dpsur tasks` and `dpsur methods`: what there is."""

import argparse
from types import SimpleNamespace
from typing import Any

from dpsur.cli.parsing import flag
from dpsur.methods import METHODS
from dpsur.tasks import DEFAULT_TASK, TASKS


def _add_tasks(commands: Any) -> None:
    parser = commands.add_parser("tasks", help="list the tasks that can be trained")
    parser.set_defaults(run=_run_tasks)


def _run_tasks(options: argparse.Namespace) -> int:
    del options
    for name, task in TASKS.items():
        default = " (default)" if name == DEFAULT_TASK else ""
        print(f"{name:<12} {task.summary}{default}")
    return 0


def _add_methods(commands: Any) -> None:
    parser = commands.add_parser("methods", help="list the methods and their hyper-parameters")
    parser.set_defaults(run=_run_methods)


def _run_methods(options: argparse.Namespace) -> int:
    del options
    for name, method in METHODS.items():
        print(f"{name}: {method.summary}")
        for field in method.options():
            default = "" if field.default is None else f" (default: {field.default})"
            print(f"  {flag(field.name):<24} {field.metadata['help']}{default}")
        print()
    return 0


tasks = SimpleNamespace(add_to=_add_tasks)
methods = SimpleNamespace(add_to=_add_methods)
