"""Noise that was calibrated before, on disk: a search takes seconds, and most runs repeat one.

A stored number is a hint. Its epsilon is computed before it is used, and the search runs again
if it does not fit the budget. A damaged or forged file can cost accuracy or time, but never
privacy. Files hold public numbers only.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path

from dpsur.environment import cache_folder, versions
from dpsur.errors import DpsurError
from dpsur.privacy.search import MOST_NOISE, least_noise

_enabled: ContextVar[bool] = ContextVar("calibration_cache_enabled", default=True)


@contextmanager
def ignore_cache() -> Iterator[None]:
    """Search whatever is stored, as a check of somebody's figures should."""
    token = _enabled.set(False)
    try:
        yield
    finally:
        _enabled.reset(token)


def cached(
    question: object, search: Callable[[], float | None], fits: Callable[[float], bool]
) -> float | None:
    """What a search found before for the same question, if it fits; otherwise what it finds now."""
    if not _enabled.get():
        return search()
    try:
        path = cache_folder() / "calibrations" / f"{_digest(question)}.json"
    except DpsurError:  # there is no folder for caches
        return search()
    found = _read(path)
    if found is None or not fits(found):
        found = search()
        if found is not None:
            _write(path, found)
    return found


def cached_noise(
    question: object, epsilon_of: Callable[[float], float], target: float
) -> float | None:
    """The least noise whose epsilon is at most the target, looked up before it is searched for."""
    epsilon_of = cache(epsilon_of)
    return cached(
        question,
        lambda: least_noise(epsilon_of, target),
        lambda noise: epsilon_of(noise) <= target,
    )


def _digest(question: object) -> str:
    return hashlib.sha256(f"{code()}\n{question!r}".encode()).hexdigest()


@cache
def code() -> str:
    """What a search depends on beside its question: the code of this package, and versions."""
    digest = hashlib.sha256(json.dumps(versions(), sort_keys=True).encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> float | None:
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))["noise_multiplier"]
        if isinstance(found, float) and 0 < found <= MOST_NOISE:
            return found
    return None


def _write(path: Path, noise: float) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"noise_multiplier": noise}, file)
        Path(temporary).replace(path)
