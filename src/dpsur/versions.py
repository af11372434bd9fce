"""Versions of what computes: they go into privacy statements and rows of results."""

import platform
from importlib.metadata import PackageNotFoundError, version

from dpsur._version import __version__


def versions() -> dict[str, str]:
    """This package, Python, and the packages that figures depend on."""
    found = {"dpsur": __version__, "python": platform.python_version()}
    for package in ("torch", "dp-accounting", "numpy", "scipy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found
