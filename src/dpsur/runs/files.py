"""Files that are either whole or absent, and the split between what is released and what is not."""

import fcntl
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpsur.errors import InvalidInputError

RELEASE, PRIVATE = "release", "private"
# Far beyond every file that is written here.
LARGEST_JSON, DEEPEST_JSON = 2**27, 32
TOO_DEEP = "values that are nested too deep"
WEIGHTS, STATEMENT, PAGE = "model.safetensors", "privacy.json", "PRIVACY.md"


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
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
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finite(values: Any) -> Any:
    """The same values with null for what JSON has no word for: NaN and the infinities."""
    if isinstance(values, Mapping):
        return {key: finite(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def to_json(values: Any) -> bytes:
    """JSON as it is written to files here."""
    return (json.dumps(finite(values), indent=2, sort_keys=False, allow_nan=False) + "\n").encode()


def from_json(content: bytes) -> Any:
    """Values of a JSON file that may come from anywhere; ValueError where it is not plain JSON."""
    if len(content) > LARGEST_JSON:
        raise ValueError(f"more than {LARGEST_JSON} bytes of JSON")
    try:
        values = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    level = [values] if isinstance(values, (dict, list)) else []
    for _ in range(DEEPEST_JSON):
        if not level:
            return values
        inner = [part.values() if isinstance(part, dict) else part for part in level]
        level = [one for part in inner for one in part if isinstance(one, (dict, list))]
    raise ValueError(TOO_DEEP)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"the word {name}, which is not JSON")


def release_folder(path: str | os.PathLike[str]) -> Path:
    """The release folder that is meant by a path to it or to its run."""
    folder = Path(path)
    return folder / RELEASE if (folder / RELEASE).is_dir() else folder


def sha256(content: bytes) -> str:
    """Hex digest of some bytes."""
    return hashlib.sha256(content).hexdigest()


class RunFolder:
    """The output folder of one run: `release/` to publish, `private/` to keep."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.release = self.root / RELEASE
        self.private = self.root / PRIVATE

    def check_new(self) -> None:
        """Refuse a folder that cannot be made, or holds something already. Writes nothing."""
        if self.root.exists():
            if not self.root.is_dir():
                raise InvalidInputError(f"output {self.root} is not a folder; choose another path")
            if any(self.root.iterdir()):
                raise InvalidInputError(
                    f"output folder {self.root} is not empty; choose another one, or continue the "
                    f"run in it with --resume {self.root}"
                )
        ancestor = self.root.absolute()
        while not ancestor.exists() and not ancestor.is_symlink():
            ancestor = ancestor.parent
        if not ancestor.is_dir() or not os.access(ancestor, os.W_OK | os.X_OK):
            raise InvalidInputError(
                f"output folder {self.root} cannot be written ({ancestor} is not a writable "
                "folder); choose another path with --out"
            )

    def create(self) -> None:
        """Make the folder and its private part."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.private.mkdir(mode=0o700, exist_ok=True)
            self.private.chmod(0o700)
        except OSError as error:
            raise InvalidInputError(
                f"output folder {self.root} cannot be made ({error.strerror}); "
                "choose another path with --out"
            ) from error

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep a second process from continuing the same run at the same time."""
        with (self.private / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InvalidInputError(
                    f"another process is running in {self.root}; wait for it to end"
                ) from None
            yield

    @property
    def finished(self) -> bool:
        """Whether the run in this folder has made its release."""
        return self.release.exists()
