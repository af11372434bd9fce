"""Rows of results: JSON lines that say how they were made."""

import json
import os
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpsur.environment import versions

ROOT = Path(__file__).parent.parent
SOURCES = ("src/dpsur", "reproduction")


def provenance() -> dict[str, Any]:
    """The commit and the versions that a row was made with, and when.

    The times of its rows say how long a grid took.
    """
    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    return {"commit": _commit(), "versions": versions(), "made_at": made_at}


def _commit() -> str | None:
    """What DPSUR_COMMIT says, for a copy without its history; else the commit of the source.

    It ends in `-changed` where the source is no longer what was committed.
    """
    stated = os.environ.get("DPSUR_COMMIT")
    if stated:
        return stated
    try:
        head = _git("rev-parse", "HEAD").strip()
        return f"{head}-changed" if _git("status", "--porcelain", "--", *SOURCES) else head
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    found = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return found.stdout


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            file.flush()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read rows back."""
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
    ]
