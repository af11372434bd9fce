"""What is published: the weights, how to rebuild the model, and the privacy statement.

Signed releases: who vouches that a release is what came out of a run.

A statement can be recomputed, but whoever can change the weights can change the statement to match.
A signature ties every file of a release to a key (Ed25519), so that a reviewer who knows the
public key notices any later change. It says who signed, not that the run was made as stated.

`release/signature.json` lists the hash of every other file of the release, and signs that list:

    {"format": ..., "files": {name: sha256}, "public_key": hex, "signature": hex}

The signed bytes are the format and the list of files as JSON without spaces and with sorted keys.
"""

import copy
import getpass
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
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
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from dpsur.errors import CheckpointError, FileError, InvalidInputError, cause_of, describe_os_error
from dpsur.features import WithFeatures, build_layers
from dpsur.functional.tree import Params
from dpsur.networks import build_network, parameter_count
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.page import render_markdown, render_model_card
from dpsur.privacy.statement import current
from dpsur.runs.files import (
    CARD,
    PAGE,
    STATEMENT,
    WEIGHTS,
    finite,
    from_json,
    holds_release,
    partial_release,
    release_folder,
    sha256,
    sync_folder,
    to_json,
    write_atomically,
)

FORMAT = "dpsur-release/1"
# What reading a damaged file raises where a value is missing or of another kind.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, MemoryError)
# Of the description of a network: values in it, and the largest of them.
MOST_VALUES, LARGEST_SIZE = 1000, 2**24
# What a model predicts: one of several classes, any number of labels, or numbers.
CLASSES, LABELS, NUMBERS = "classes", "labels", "numbers"


@dataclass(frozen=True)
class Origin:
    """Where a model comes from, as far as it can be rebuilt by name.

    `public` is what the user declared about the records, which the statement lists. `features` are
    the layers that a custom model was trained behind; a described network has its own. `predicts`
    is what the outputs mean, None where that is not known.
    """

    task: str | None = None
    network: Mapping[str, Any] | None = None
    public: Mapping[str, Any] = field(default_factory=dict)
    features: Sequence[Mapping[str, Any]] = ()
    predicts: str | None = None

    def behind(self, layers: Sequence[Mapping[str, Any]]) -> "Origin":
        """The same for a model that was trained behind layers of features."""
        if self.network is None:
            return replace(self, features=layers)
        if not layers:
            return self
        described = [dict(layer) for layer in layers]
        network = {"name": "with-features", "features": described, "network": self.network}
        return replace(self, network=network)


NO_ORIGIN = Origin()


def released_model(original: nn.Module, layers: nn.Sequential, released: Params) -> nn.Module:
    """The original network with the released weights, behind the layers that make its features.

    In evaluation mode: a user who predicts with it must not meet dropout.

    Not the network that was trained: that one may have kept something of the records it has seen,
    such as the last batch, in an attribute.
    """
    network = copy.deepcopy(original).cpu()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name in released:
                parameter.copy_(released[name])
    if not len(layers):
        return network.eval()
    return WithFeatures(layers.cpu(), network).eval()


def write_release(
    folder: Path,
    model: nn.Module,
    statement: Mapping[str, Any],
    origin: Origin,
    *,
    trained_only: bool = False,
) -> None:
    """Write a release folder, whole or not at all; the same release is not written twice.

    With `trained_only` it holds no frozen weights, which are public and may be many: whoever loads
    it brings a model that has them.
    """
    held = dict(model.state_dict())
    if trained_only:
        trained = [name for name, value in model.named_parameters() if value.requires_grad]
        held = {name: held[name] for name in trained}
    tensors = {name: value.detach().cpu().clone() for name, value in held.items()}
    described: dict[str, Any] = {
        "format": FORMAT,
        "task": origin.task,
        "network": None if origin.network is None else dict(origin.network),
        "model": type(model).__name__,
    }
    if trained_only:
        described["trained_only"] = True
    if origin.features:
        described["features"] = [dict(layer) for layer in origin.features]
    if origin.predicts is not None:
        described["predicts"] = origin.predicts
    weights = save_tensors(tensors, {"dpsur": json.dumps(described)})
    statement = {**finite(statement), "weights": {"file": WEIGHTS, "sha256": sha256(weights)}}
    if holds_release(folder) and (folder / WEIGHTS).read_bytes() == weights:
        return
    partial = partial_release(folder)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write_atomically(partial / WEIGHTS, weights)
        write_atomically(partial / STATEMENT, to_json(statement))
        write_atomically(partial / PAGE, render_markdown(statement).encode())
        write_atomically(partial / CARD, render_model_card(statement).encode())
        partial.rename(folder)  # takes the place of an empty folder, but of nothing else
        sync_folder(folder.parent)
    except OSError as error:
        raise FileError(
            f"the release cannot be written to {folder} ({describe_os_error(error)}); make room "
            "for it there, or choose another folder"
        ) from error


def check_release(path: str | os.PathLike[str]) -> None:
    """Refuse a folder that holds no release: `path` is that of a run, or the release in it."""
    folder = release_folder(path)
    for name in (WEIGHTS, STATEMENT):
        if not (folder / name).is_file():
            raise InvalidInputError(
                f"{folder} holds no release ({name} is missing); "
                "give the folder of a run that has finished",
                code="no-release",
            )


def read_release(
    path: str | os.PathLike[str], model: nn.Module | None = None
) -> tuple[nn.Module, dict[str, Any], Origin]:
    """Load a release: the model, its privacy statement and its origin.

    `path` is a run folder or the release folder in it. A model that is not one of this package's
    networks must be passed in, built as it was for training; the layers of its features are added.
    """
    folder = release_folder(path)
    weights, statement_file = folder / WEIGHTS, folder / STATEMENT
    check_release(folder)
    try:
        content = weights.read_bytes()
        statement = _checked_statement(current(from_json(statement_file.read_bytes())))
        tensors = load_tensors(content)
        header = from_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
        described = from_json(header["__metadata__"]["dpsur"].encode())
        origin = _described_origin(described)
    except (OSError, SafetensorError, *MALFORMED) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{folder} holds a damaged release: {reason or type(error).__name__}",
            code="damaged-release",
        ) from error
    if sha256(content) != statement["weights"]["sha256"]:
        raise CheckpointError(
            f"{weights} are not the weights that {statement_file.name} was written for (their "
            "SHA-256 differs), so its guarantee does not hold for them; restore both files",
            code="other-weights",
        )
    if model is None:
        if origin.network is None:
            raise InvalidInputError(
                f"{folder} holds weights of a custom model ({described.get('model')}); "
                "build that model and pass it in: dpsur.load(folder, model)",
                code="custom-model",
            )
        model = _built(folder, origin.network, sum(value.numel() for value in tensors.values()))
    elif origin.features and not isinstance(model, WithFeatures):
        model = WithFeatures(_built_layers(folder, origin.features), model)
    try:
        others = model.load_state_dict(tensors, strict=not described.get("trained_only"))
        if others.unexpected_keys:
            raise RuntimeError(f"it has no {others.unexpected_keys[0]}")
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"the weights in {folder} do not fit the model: {reason}") from error
    return model, statement, origin


def _checked_statement(statement: dict[str, Any]) -> dict[str, Any]:
    """Refuse a statement that lacks, or has in another form, what is read from it here."""
    guarantee = statement["guarantee"]
    accounting_named(guarantee["accounting"])
    figures = (guarantee["epsilon"], statement["epsilon"]["proven"])
    sound = (
        all(figure is None or _is_number(figure) for figure in figures)
        and _is_number(guarantee["delta"])
        and isinstance(guarantee["proved"], bool)
        and isinstance(statement["weights"]["sha256"], str)
        and isinstance(statement["public"], dict)
    )
    if not sound:
        raise ValueError(f"{STATEMENT} holds a value of the wrong type")
    return statement


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e300


def _described_origin(described: Any) -> Origin:
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        raise ValueError(f"{WEIGHTS} was not written by this program")
    task, network = described["task"], described["network"]
    if not isinstance(task, (str, type(None))) or not isinstance(network, (dict, type(None))):
        raise ValueError(f"{WEIGHTS} names its task or network in an unknown way")
    features = described.get("features", [])
    if not isinstance(features, list) or not all(isinstance(one, dict) for one in features):
        raise ValueError(f"{WEIGHTS} names its features in an unknown way")
    predicts = described.get("predicts")
    if predicts not in (None, CLASSES, LABELS, NUMBERS):
        raise ValueError(f"{WEIGHTS} names what it predicts in an unknown way")
    return Origin(task, network, features=features, predicts=predicts)


def _built(folder: Path, network: Mapping[str, Any], held: int) -> nn.Module:
    """The network that a release names, if it is no larger than the weights beside it."""
    try:
        _check_sizes(network)
        count = parameter_count(network)
        if count > held:
            raise ValueError(f"it has {count} parameters, and the file holds {held} numbers")
        return build_network(network)
    except (*MALFORMED, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"the network that the weights in {folder} name cannot be built: {reason}"
        ) from error


def _built_layers(folder: Path, features: Sequence[Mapping[str, Any]]) -> nn.Sequential:
    try:
        _check_sizes(list(features))
        return build_layers(features)
    except (*MALFORMED, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"the features that the weights in {folder} name cannot be built: {reason}"
        ) from error


def _check_sizes(description: Any) -> None:
    """Refuse a description that no network of this package has, before anything is built."""
    values, count = [description], 0
    while values:
        value, count = values.pop(), count + 1
        if count > MOST_VALUES or (isinstance(value, int) and abs(value) > LARGEST_SIZE):
            raise ValueError("its description holds too many or too large numbers")
        if isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, list):
            values += value


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
    secret = _secret_key(Path(key))
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
        if content["format"] != SIGNATURE_FORMAT:
            raise ValueError(f"format {content['format']!r} instead of {SIGNATURE_FORMAT!r}")
        self.files = dict(content["files"])
        self.key = bytes.fromhex(content["public_key"])
        self.signature = bytes.fromhex(content["signature"])


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
