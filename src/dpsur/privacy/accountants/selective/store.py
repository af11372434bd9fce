"""Results on disk: one small JSON file per setting. Losing or damaging it costs time, never
correctness.
"""

import contextlib
import hashlib
import json
import os
from pathlib import Path

from dpsur.environment import write_cache
from dpsur.privacy.accountants.selective.divergence import VERSION, Interval

# Files of a few kilobytes each. Beyond this number those that were longest unused go.
MOST_FILES = 1000


class Store:
    """Intervals of one setting by label. `folder=None` keeps them in memory only."""

    def __init__(self, setting: tuple[float, ...], folder: Path | None) -> None:
        self._key = [VERSION, *(float(x).hex() for x in setting)]
        name = hashlib.sha256(json.dumps(self._key).encode()).hexdigest()[:32]
        self._path = None if folder is None else folder / f"selective-{name}.json"
        self._known = self._read()
        self._fresh = False

    def get(self, label: str) -> Interval | None:
        return self._known.get(label)

    def put(self, label: str, value: Interval) -> None:
        self._known[label] = value
        self._fresh = True

    def flush(self) -> None:
        """Writes what is new, atomically; a folder that cannot be written is no error."""
        if self._path is None or not self._fresh:
            return
        merged = self._read() | self._known
        values = {k: [v.lower.hex(), v.upper.hex()] for k, v in sorted(merged.items())}
        text = json.dumps(
            {"key": self._key, "values": values, "digest": _digest(self._key, values)}
        )
        is_new = not self._path.exists()
        write_cache(self._path, text.encode())
        if is_new:
            _drop_oldest(self._path.parent)
        self._fresh = False

    def _read(self) -> dict[str, Interval]:
        if self._path is None:
            return {}
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
            values = data["values"]
            if data["key"] != self._key or data["digest"] != _digest(self._key, values):
                return {}
            with contextlib.suppress(OSError):
                os.utime(self._path)  # in use: the last to be dropped
            known = {
                k: Interval(float.fromhex(lo), float.fromhex(hi)) for k, (lo, hi) in values.items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}
        return {k: v for k, v in known.items() if 0.0 <= v.lower <= v.upper}


def _drop_oldest(folder: Path) -> None:
    files = list(folder.glob("selective-*.json"))
    if len(files) <= MOST_FILES:
        return
    ages = []
    for path in files:
        with contextlib.suppress(OSError):  # another process was faster
            ages.append((path.stat().st_mtime, path))
    for _, path in sorted(ages)[: len(ages) - MOST_FILES * 9 // 10]:
        with contextlib.suppress(OSError):
            path.unlink()


def _digest(key: list[str], values: object) -> str:
    return hashlib.sha256(json.dumps([key, values], sort_keys=True).encode()).hexdigest()
