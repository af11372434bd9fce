"""Versions of what computes, and the folder for caches."""

import os
import platform
import tempfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dpsur._version import __version__
from dpsur.errors import InvalidInputError

ABSENT = "absent"


def package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ABSENT


def versions() -> dict[str, str]:
    found = {"dpsur": __version__, "python": platform.python_version()}
    return found | {package: package_version(package) for package in ("torch", "numpy", "scipy")}


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


def write_whole(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_cache(path: Path, content: bytes) -> None:
    """Write a file of the cache for its owner; a folder without room for it is no error."""
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        write_whole(path, content)
