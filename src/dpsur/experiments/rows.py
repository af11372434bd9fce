"""Rows of results: JSON lines that say how they were made."""

import json
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dpsur._version import __version__


def provenance() -> dict[str, Any]:
    """The commit and the versions that a row was made with."""
    return {"commit": _commit(), "versions": _versions()}


def _versions() -> dict[str, str]:
    found = {"dpsur": __version__, "python": platform.python_version()}
    for package in ("torch", "dp-accounting", "numpy", "scipy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def _commit() -> str | None:
    folder = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        )
        return head.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            file.flush()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read rows back."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
