"""Where results are kept that can be made again."""

import os
from pathlib import Path

from dpsur.errors import InvalidInputError

CACHE_VARIABLE = "DPSUR_CACHE"


def cache_folder() -> Path:
    """`$DPSUR_CACHE`, or `$XDG_CACHE_HOME/dpsur`, or `~/.cache/dpsur`."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "dpsur"
    try:
        return Path.home() / ".cache" / "dpsur"
    except RuntimeError:
        raise InvalidInputError(
            f"there is no home folder to put the cache in; set {CACHE_VARIABLE} to a folder"
        ) from None
