"""Signed releases: who vouches that a release is what came out of a run.

A statement can be recomputed, but whoever can change the weights can change the statement to match.
A signature ties every file of a release to a key (Ed25519), so that a reviewer who knows the
public key notices any later change. It says who signed, not that the run was made as stated.

`release/signature.json` lists the hash of every other file of the release, and signs that list:

    {"format": ..., "files": {name: sha256}, "public_key": hex, "signature": hex}

The signed bytes are the format and the list of files as JSON without spaces and with sorted keys.
"""

import getpass
import json
import os
from collections.abc import Callable
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

from dpsur.errors import FileError, InvalidInputError, cause_of
from dpsur.runs.files import (
    from_json,
    holds_release,
    release_folder,
    sha256,
    to_json,
    write_atomically,
)

SIGNATURE: Final = "signature.json"
FORMAT: Final = "dpsur-signature/1"


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
    secret = _secret_key(Path(key))
    files = _hashes(release)
    public = secret.public_key().public_bytes_raw()
    signed = {
        "format": FORMAT,
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
    wanted = None if key is None else _public_key(Path(key)).public_bytes_raw()
    try:
        content = from_json((release / SIGNATURE).read_bytes())
        found = _Signed(content)
    except FileNotFoundError:
        missing = f"the release is not signed: {SIGNATURE} is missing"
        return ([] if wanted is None else [missing]), None
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        return [f"{SIGNATURE} is not what `dpsur sign` writes ({error})"], None
    faults = []
    try:
        Ed25519PublicKey.from_public_bytes(found.key).verify(
            found.signature, _signed_bytes(found.files)
        )
    except (InvalidSignature, ValueError):
        faults.append(f"{SIGNATURE}: the signature does not belong to its list of files")
    if wanted is not None and found.key != wanted:
        faults.append(f"the release is signed by another key, {found.key.hex()}")
    present = _hashes(release)
    for name in sorted(present.keys() | found.files.keys()):
        if name not in present:
            faults.append(f"{name} was signed and is missing")
        elif name not in found.files:
            faults.append(f"{name} is not among the signed files")
        elif present[name] != found.files[name]:
            faults.append(f"{name} is not the file that was signed")
    return faults, found.key.hex()


class _Signed:
    """What a signature file says; anything else in it raises."""

    def __init__(self, content: Any) -> None:
        if set(content) != {"format", "files", "public_key", "signature"}:
            raise ValueError("other keys than a signature has")
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r} instead of {FORMAT!r}")
        self.files = dict(content["files"])
        self.key = bytes.fromhex(content["public_key"])
        self.signature = bytes.fromhex(content["signature"])


def _signed_bytes(files: dict[str, str]) -> bytes:
    named = {"format": FORMAT, "files": files}
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


def _secret_key(path: Path) -> Ed25519PrivateKey:
    def load(content: bytes) -> object:
        encrypted = b"ENCRYPTED" in content
        password = getpass.getpass(f"passphrase of {path}: ").encode() if encrypted else None
        return load_pem_private_key(content, password)

    remedy = "make one: dpsur sign --new-key FILE"
    key: Ed25519PrivateKey = _key(path, load, Ed25519PrivateKey, f"secret key in PEM; {remedy}")
    return key


def _public_key(path: Path) -> Ed25519PublicKey:
    remedy = "give the file that `dpsur sign --new-key` wrote with the ending .pub"
    wanted = f"public key in PEM; {remedy}"
    key: Ed25519PublicKey = _key(path, load_pem_public_key, Ed25519PublicKey, wanted)
    return key


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
