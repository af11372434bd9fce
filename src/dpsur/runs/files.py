"""Files that are either whole or absent, and the split between what is released and what is not.

Signed releases: who vouches that a release is what came out of a run.

A statement can be recomputed, but who can change the weights can change the statement to match.
A signature ties every file of a release to a key (Ed25519), so that a reviewer who knows the
public key notices any later change. It says who signed, not that the run was made as stated.

`release/signature.json` lists the hash of every other file of the release, and signs that list:

    {"format": ..., "files": {name: sha256}, "public_key": hex, "signature": hex}

The signed bytes are the format and the list of files as JSON without spaces and with sorted keys.
"""

import fcntl
import getpass
import hashlib
import json
import math
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from dpsur.environment import write_whole
from dpsur.errors import FileError, InvalidInputError, cause_of, describe_os_error

RELEASE, PRIVATE = "release", "private"
# Far beyond every file that is written here.
LARGEST_JSON, DEEPEST_JSON = 2**27, 32
TOO_DEEP = "values that are nested too deep"
# What reading a file raises where a value in it is missing or of another kind; every refusal of
# this package is a ValueError.
MALFORMED = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    MemoryError,
)
WEIGHTS, STATEMENT, PAGE = "model.safetensors", "privacy.json", "PRIVACY.md"
CARD = "README.md"
CHECKPOINT, CONFIG, LOCK = "checkpoint.safetensors", "config.json", "lock"
METRICS = "metrics.jsonl"
BOOKING = "booking"  # the run's id in the ledger of its data
UPDATES = "updates"
PRIVATE_FILES = (CHECKPOINT, CONFIG, LOCK, METRICS, BOOKING)


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file whole, so that it survives a power cut."""
    try:
        write_whole(path, content, mode=mode)
        sync_folder(path.parent)
    except OSError as error:
        raise FileError(f"{path} cannot be written ({cause_of(error)})") from error


def sync_folder(folder: Path) -> None:
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
    return (json.dumps(finite(values), indent=2, sort_keys=False, allow_nan=False) + "\n").encode()


def from_json(content: bytes) -> Any:
    """Values of a JSON file that may come from anywhere; ValueError where it is not plain JSON."""
    if len(content) > LARGEST_JSON:
        raise ValueError(f"more than {LARGEST_JSON} bytes of JSON")
    try:
        values = json.loads(
            content.decode("utf-8"),
            parse_constant=_refuse_constant,
            object_pairs_hook=_without_repeats,
        )
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


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Readers differ in which of two equal keys counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {repeated!r} is given twice")
    return found


def release_folder(path: str | os.PathLike[str]) -> Path:
    folder = Path(path)
    return folder / RELEASE if (folder / RELEASE).is_dir() else folder


def check_release(path: str | os.PathLike[str], *names: str) -> Path:
    """The release folder of a run, if it has these files (weights and statement by default)."""
    folder = release_folder(path)
    for name in names or (WEIGHTS, STATEMENT):
        if not (folder / name).is_file():
            raise InvalidInputError(
                f"{folder} holds no release ({name} is missing); give the folder of a run that "
                "has finished",
                code="no-release",
            )
    return folder


def holds_release(folder: Path) -> bool:
    """Whether a folder holds a whole release: weights, and the statement with their hash."""
    try:
        named = json.loads((folder / STATEMENT).read_bytes())["weights"]["sha256"]
        return bool(named == sha256((folder / WEIGHTS).read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def partial_release(folder: Path) -> Path:
    """Where a release is put together before it gets its name."""
    return folder.with_name(f".{folder.name}.partial")


def numbered(name: str) -> Iterator[str]:
    """A name, and the names to take where it is taken: run, run-2, run-3 ..."""
    yield name
    for number in count(2):
        yield f"{name}-{number}"


def resume_command(root: Path) -> str:
    return command_in(root, "--resume")


def command_in(root: Path, option: str) -> str:
    """The beginning of a command that names the folder of a run by this option."""
    name = str(root)
    return f"dpsur train {option} {shlex.quote(f'./{name}' if name.startswith('-') else name)}"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class RunFolder:
    """The output folder of one run: `release/` to publish, `private/` to keep."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.release = self.root / RELEASE
        self.private = self.root / PRIVATE

    @property
    def checkpoint(self) -> Path:
        return self.private / CHECKPOINT

    def update(self, number: int) -> Path:
        """Where a replayable run keeps its state after this many steps; 0 is before the first."""
        return self.private / UPDATES / f"{number:08d}.safetensors"

    @property
    def config(self) -> Path:
        """The settings of a run that was started from the command line."""
        return self.private / CONFIG

    def check_new(self) -> None:
        """Refuse a folder that cannot be made, or holds something already. Writes nothing.

        A run that was killed before its first checkpoint has trained nothing: another one may
        start in its folder.
        """
        try:
            if self.root.exists() and not self.root.is_dir():
                raise InvalidInputError(f"output {self.root} is not a folder; choose another path")
            if self.root.exists() and not self.unstarted:
                resumed = self.checkpoint.exists() and not self.finished
                more = f", or resume the run in it with: {self.how_to_resume()}" if resumed else ""
                raise InvalidInputError(
                    f"output folder {self.root} is not empty; choose another one{more}",
                    code="folder-not-empty",
                )
            ancestor = self.root.absolute()
            while not ancestor.exists() and not ancestor.is_symlink():
                ancestor = ancestor.parent
            writable = ancestor.is_dir() and os.access(ancestor, os.W_OK | os.X_OK)
        except OSError as error:
            raise self._unusable(error) from error
        if not writable:
            raise InvalidInputError(
                f"output folder {self.root} cannot be written ({ancestor} is not a writable "
                "folder); choose another path with --out"
            )

    def how_to_resume(self) -> str:
        if self.config.exists():
            return resume_command(self.root)
        return f"dpsur.fit(..., out={str(self.root)!r}, resume=True)"

    @property
    def unstarted(self) -> bool:
        """Whether there is nothing here, or what a run leaves before its first checkpoint."""
        names = {path.name for path in self.root.iterdir()}
        partial = partial_release(self.release).name
        if not names <= {PRIVATE, RELEASE, partial} or not _is_empty(self.release):
            return False
        private = self.private.iterdir() if self.private.is_dir() else ()
        return all(path.name in (CONFIG, LOCK, BOOKING) or _is_temporary(path) for path in private)

    @property
    def booking(self) -> str | None:
        try:
            return (self.private / BOOKING).read_text(encoding="utf-8").strip()
        except OSError:
            return None

    def create(self) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.private.mkdir(mode=0o700, exist_ok=True)
            self.private.chmod(0o700)
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> InvalidInputError:
        return InvalidInputError(
            f"output folder {self.root} cannot be made ({cause_of(error)}); "
            "choose another path with --out"
        )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep a second process from continuing the same run at the same time."""
        path = self.private / LOCK
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise FileError(describe_os_error(error)) from error
        with os.fdopen(descriptor, "wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InvalidInputError(
                    f"another process is running in {self.root}; wait for it to end"
                ) from None
            except OSError as error:
                raise FileError(f"{path} cannot be locked ({cause_of(error)})") from error
            yield

    def clean(self) -> None:
        """Remove what a killed process left half-written, and keep others from reading the rest.

        Only for the process that holds the lock. Refuses to train towards a release that could not
        be put in its place.
        """
        shutil.rmtree(partial_release(self.release), ignore_errors=True)
        try:
            for path in self.private.iterdir():
                # Diagnostics cannot keep a run from its release; the folder is closed to others.
                ignored = (OSError,) if path.name == METRICS else ()
                with suppress(*ignored):
                    if _is_temporary(path):
                        path.unlink()
                    elif path.name in PRIVATE_FILES:
                        path.chmod(0o600)
        except OSError as error:
            raise FileError(describe_os_error(error)) from error
        if not self.finished and not _is_empty(self.release):
            raise InvalidInputError(
                f"{self.release} is not a whole release of this program; move it away, then "
                f"resume with: {self.how_to_resume()}"
            )

    @property
    def finished(self) -> bool:
        return holds_release(self.release)


def _is_temporary(path: Path) -> bool:
    """Whether a file is one that `write_atomically` had no time to rename or remove."""
    return any(path.name.startswith(f".{name}.") for name in PRIVATE_FILES)


def _is_empty(folder: Path) -> bool:
    """Whether a folder is absent or has nothing in it, so that another can take its place."""
    if not os.path.lexists(folder):
        return True
    return folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir())


SIGNATURE: Final = "signature.json"
SIGNATURE_FORMAT: Final = "dpsur-signature/1"


def new_key(path: str | os.PathLike[str]) -> Path:
    """Write a new secret key, readable by its owner alone, and its public key beside it.

    Returns the path of the public key: the same name with `.pub`. Existing files are left alone.
    """
    secret, public = Path(path), Path(f"{os.fspath(path)}.pub")
    for one in (secret, public):
        if one.exists():
            raise InvalidInputError(f"{one} exists; give another name for the new key")
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    shared = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    write_atomically(secret, pem, mode=0o600)
    write_atomically(public, shared)
    return public


def sign(folder: str | os.PathLike[str], key: str | os.PathLike[str]) -> Path:
    """Sign the release in a folder with a secret key in PEM; returns the file of the signature.

    A release that was signed before is signed anew.
    """
    release = release_folder(folder)
    if not holds_release(release):
        raise InvalidInputError(
            f"{release} holds no whole release; `dpsur verify` says what is wrong",
            code="no-release",
        )

    def load(content: bytes) -> object:
        encrypted = b"ENCRYPTED" in content
        password = getpass.getpass(f"passphrase of {key}: ").encode() if encrypted else None
        return load_pem_private_key(content, password)

    remedy = "make one: dpsur sign --new-key FILE"
    secret = _key(Path(key), load, Ed25519PrivateKey, f"secret key in PEM; {remedy}")
    files = _hashes(release)
    public = secret.public_key().public_bytes_raw()
    signed = {
        "format": SIGNATURE_FORMAT,
        "files": files,
        "public_key": public.hex(),
        "signature": secret.sign(_signed_bytes(files)).hex(),
    }
    write_atomically(release / SIGNATURE, to_json(signed))
    return release / SIGNATURE


def signature_faults(
    folder: str | os.PathLike[str], key: str | os.PathLike[str] | None = None
) -> tuple[list[str], str | None]:
    """What is wrong with the signature of a release, and the public key that signed it.

    Without a `key`, an unsigned release is fine, and a signed one only has to be what was signed.
    With a public key in PEM it must be signed by that key.
    """
    release = release_folder(folder)
    wanted = None
    if key is not None:
        remedy = "give the file that `dpsur sign --new-key` wrote with the ending .pub"
        kind = f"public key in PEM; {remedy}"
        wanted = _key(Path(key), load_pem_public_key, Ed25519PublicKey, kind).public_bytes_raw()
    try:
        content = from_json((release / SIGNATURE).read_bytes())
        if set(content) != {"format", "files", "public_key", "signature"}:
            raise ValueError("other keys than a signature has")
        if content["format"] != SIGNATURE_FORMAT:
            raise ValueError(f"format {content['format']!r} instead of {SIGNATURE_FORMAT!r}")
        files = dict(content["files"])
        signer, signature = (bytes.fromhex(content[name]) for name in ("public_key", "signature"))
    except FileNotFoundError:
        missing = f"the release is not signed: {SIGNATURE} is missing"
        return ([] if wanted is None else [missing]), None
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        return [f"{SIGNATURE} is not what `dpsur sign` writes ({error})"], None
    faults = []
    try:
        Ed25519PublicKey.from_public_bytes(signer).verify(signature, _signed_bytes(files))
    except (InvalidSignature, ValueError):
        faults.append(f"{SIGNATURE}: the signature does not belong to its list of files")
    if wanted is not None and signer != wanted:
        faults.append(f"the release is signed by another key, {signer.hex()}")
    present = _hashes(release)
    for name in sorted(present.keys() | files.keys()):
        if name not in present:
            faults.append(f"{name} was signed and is missing")
        elif name not in files:
            faults.append(f"{name} is not among the signed files")
        elif present[name] != files[name]:
            faults.append(f"{name} is not the file that was signed")
    return faults, signer.hex()


def _signed_bytes(files: dict[str, str]) -> bytes:
    named = {"format": SIGNATURE_FORMAT, "files": files}
    return json.dumps(named, sort_keys=True, separators=(",", ":")).encode()


def _hashes(release: Path) -> dict[str, str]:
    """The hash of every file of a release but its signature, by its path within."""
    try:
        found = sorted(path for path in release.rglob("*") if path.is_file() or path.is_symlink())
        names = {path.relative_to(release).as_posix(): path for path in found}
        return {
            name: sha256(path.read_bytes()) for name, path in names.items() if name != SIGNATURE
        }
    except OSError as error:
        raise FileError(f"{release} cannot be read ({cause_of(error)})") from error


def _key(path: Path, load: Callable[[bytes], object], kind: type[Any], wanted: str) -> Any:
    try:
        key = load(path.read_bytes())
    except OSError as error:
        raise FileError(f"the key {path} cannot be read ({cause_of(error)})") from error
    except (ValueError, TypeError) as error:
        raise InvalidInputError(f"{path} holds no {wanted} ({error})") from None
    if not isinstance(key, kind):
        raise InvalidInputError(f"{path} holds a {type(key).__name__}; releases need Ed25519")
    return key
