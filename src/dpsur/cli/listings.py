"""Commands that print a list or a page: `dpsur methods`, `dpsur tasks`, `dpsur proof`."""

import argparse
import json
from importlib.resources import files
from typing import Any

PROOF = """\
  dpsur proof | less
  dpsur proof --path

Print the page that a release cites: the theorem behind each accounting, its proof, its assumptions
and what is not covered (docs/privacy.md, Markdown).
"""


def set_up_methods(parser: argparse.ArgumentParser) -> None:
    """Describe `dpsur methods`."""
    parser.description = (
        "List the methods and their hyper-parameters.\n\n  dpsur methods\n  dpsur methods --json\n"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=print_methods)


def print_methods(options: argparse.Namespace) -> int:
    """Print the methods and their options."""
    from dpsur.cli.run_options import set_by_tasks  # with it torch, which the proof does not need
    from dpsur.methods import METHODS
    from dpsur.options import declared

    if options.json:
        everything = {
            name: {
                "summary": method.summary,
                "options": {
                    one.flag: {"help": one.help, "default": _plain(one.field.default)}
                    for one in declared(method).values()
                },
            }
            for name, method in METHODS.items()
        }
        print(json.dumps(everything))
        return 0
    for name, method in METHODS.items():
        print(f"{name}: {method.summary}")
        for found in declared(method).values():
            own = "the task's, else " if found.name in set_by_tasks() else ""
            value = found.field.default
            default = "" if value is None else f" (default: {own}{value})"
            print(f"  {found.flag:<24} {found.help}{default}")
        print()
    return 0


def _plain(value: Any) -> Any:
    """A default as JSON has it; None where there is none."""
    return value if isinstance(value, (bool, int, float, str)) else None


def set_up_tasks(parser: argparse.ArgumentParser) -> None:
    """Describe `dpsur tasks`."""
    parser.description = (
        "List the tasks that can be trained, and the features that they have networks for.\n"
        "`dpsur data list` shows which data sets are installed.\n\n"
        "  dpsur tasks\n  dpsur tasks --json"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=print_tasks)


def print_tasks(options: argparse.Namespace) -> int:
    """Print a line per task."""
    from dpsur.tasks import DEFAULT_TASK, TASKS
    from dpsur.tasks.tables import PREFIXES

    if options.json:
        found = {
            name: {"summary": t.summary, "features": [*t.networks]} for name, t in TASKS.items()
        }
        print(json.dumps(found))
        return 0
    for name, task in TASKS.items():
        default = " (default task)" if name == DEFAULT_TASK else ""
        print(f"{name:<13} {task.summary}{default}")
        print(f"{'':<13} features: {', '.join(task.networks)}")
    print(f"{'npz:FILE':<13} your arrays x and y, and optionally x_test and y_test")
    for prefix in PREFIXES:
        print(f"{prefix + 'FILE':<13} your table, with --schema (see: dpsur data schema --help)")
    return 0


def set_up_proof(parser: argparse.ArgumentParser) -> None:
    """Describe `dpsur proof`."""
    parser.description = PROOF
    parser.add_argument("--path", action="store_true", help="print the path of the page instead")
    parser.set_defaults(run=print_proof)


def print_proof(options: argparse.Namespace) -> int:
    """Print the page, or its path."""
    page = files("dpsur") / "privacy" / "privacy.md"
    print(page if options.path else page.read_text(encoding="utf-8"))
    return 0
