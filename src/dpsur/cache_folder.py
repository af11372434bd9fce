"""Where results are kept that can be made again."""

import os
from pathlib import Path

CACHE_VARIABLE = "DPSUR_CACHE"


def cache_folder() -> Path:
    """`$DPSUR_CACHE`, or `$XDG_CACHE_HOME/dpsur`, or `~/.cache/dpsur`."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dpsur"
