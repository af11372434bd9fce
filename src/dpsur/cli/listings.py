"""Commands that print a list or a page: `dpsur methods`, `dpsur tasks`, `dpsur proof`."""

import argparse
import json
import textwrap
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpsur.methods import Method

PROOF = """\
  dpsur proof | less
  dpsur proof --path

Print the page that a release cites: the theorem behind each accounting, its proof, its assumptions
and what is not covered (docs/privacy.md, Markdown).
"""


def set_up_methods(parser: argparse.ArgumentParser) -> None:
    """Describe `dpsur methods`."""
    parser.description = (
        "List the methods, or the hyper-parameters of one.\n\n"
        "  dpsur methods\n  dpsur methods dpsur\n  dpsur methods --json\n"
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="show the options of this method")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with options")
    parser.set_defaults(run=print_methods)


def print_methods(options: argparse.Namespace) -> int:
    """Print a line per method, or the options of one under their headings."""
    from dpsur.methods import METHODS, method_named  # torch, which the proof does not need

    if options.name is not None:
        methods = {options.name: method_named(options.name)}
    else:
        methods = dict(METHODS)
    if options.json:
        print(json.dumps({name: _as_json(method) for name, method in methods.items()}))
    elif options.name is not None:
        _print_options(methods[options.name])
    else:
        for name, method in methods.items():
            print(f"{name:<12}{method.summary}")
        print("\noptions of one: dpsur methods NAME")
    return 0


def _print_options(method: type["Method"]) -> None:
    """The hyper-parameters of a method by heading."""
    from dpsur.cli.run_options import default_of
    from dpsur.options import by_heading, declared

    print(f"{method.name}: {method.summary}")
    for heading, options in by_heading(declared(method).values()).items():
        print(f"\n{heading}:")
        for found in options:
            text = f"{found.help}{default_of(found.field)}"
            lines = textwrap.wrap(text, 72, break_on_hyphens=False)
            lead = f"  {found.flag:<24}"
            if len(lead) > 26:
                print(lead)
                lead = " " * 26
            print(f"\n{'':<26}".join([lead + lines[0], *lines[1:]]))


def _as_json(method: type["Method"]) -> dict[str, Any]:
    from dpsur.options import declared

    return {
        "summary": method.summary,
        "options": {
            one.flag: {"help": one.help, "default": _plain(one.field.default), "group": one.group}
            for one in declared(method).values()
        },
    }


def _plain(value: Any) -> Any:
    """A default as JSON has it; None where there is none."""
    return value if isinstance(value, (bool, int, float, str)) else None


def set_up_tasks(parser: argparse.ArgumentParser) -> None:
    """Describe `dpsur tasks`."""
    parser.description = (
        "List the tasks that can be trained, and the features that they have networks for.\n\n"
        "  dpsur tasks\n  dpsur tasks --json"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=print_tasks)


def print_tasks(options: argparse.Namespace) -> int:
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
    page = files("dpsur") / "privacy" / "privacy.md"
    print(page if options.path else page.read_text(encoding="utf-8"))
    return 0
