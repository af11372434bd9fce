"""Writes error details that hold private values to a log that only the user can read."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dpsur.environment import cache_folder
from dpsur.errors import InvalidInputError
from dpsur.runs.files import PRIVATE

LOG = "errors.log"


def logged_privately(error: InvalidInputError, arguments: Sequence[str]) -> str:
    """Write what an error holds back to a log, and return the words that say where it is.

    The log is in `private/` of the run that is resumed, else in `private/` of the cache: a run that
    never began has no folder.
    """
    if error.private is None:
        return ""
    path = _folder(arguments) / LOG
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{error}\n  {error.private}\n")
        return f" (the values are private: see {path})"
    return ""


def _folder(arguments: Sequence[str]) -> Path:
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, _, given = option.partition("=")
        private = Path(given or value) / PRIVATE
        if name == "--resume" and private.is_dir():
            return private
    return cache_folder() / PRIVATE
