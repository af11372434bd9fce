"""Checkpoints of a run, and the fingerprints that tell whether a run may resume from one."""

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from dpsur.distributed import ALONE, Ranks
from dpsur.errors import CheckpointError, FileError, describe_os_error
from dpsur.functional.problem import LossFunction
from dpsur.functional.tree import flatten, unflatten
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.trial import Progress
from dpsur.privacy.events import Ledger
from dpsur.runs.files import CHECKPOINT, sha256, write_atomically

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# What comes from these counts by its name: another version of them is not another loss.
_KNOWN = ("torch", "builtins", "math", "numpy")


def model_identity(model: nn.Module) -> str:
    """A digest of a network's modules, their settings and their code, but not of its weights."""
    return sha256(repr(_Description().module(model)).encode())


def loss_identity(loss: LossFunction) -> str:
    """A digest of a loss: its name, its code and what that refers to, and a module's weights."""
    return sha256(repr(_Description().of(loss, inside=True)).encode())


class _Description:
    """Describes values by what is equal for equal ones; each of them once, so that it ends."""

    def __init__(self) -> None:
        self._bare = set(vars(nn.Module()))
        self._seen: dict[int, object] = {}  # holds on to them, or a number would be used again

    def of(self, value: Any, *, inside: bool = False) -> Any:
        """A value; what an object of some class holds only where `inside` asks for it."""
        if isinstance(value, _PLAIN):
            return repr(value)
        if id(value) in self._seen:
            return "seen"
        self._seen[id(value)] = value
        if isinstance(value, nn.Parameter):
            return "parameter"  # of a network: trained, and in the checkpoint
        if isinstance(value, Tensor):
            return digest_of({"": value})
        if isinstance(value, nn.Module):
            return self.module(value), digest_of(value.state_dict())
        if isinstance(value, (list, tuple)):
            return [self.of(item) for item in value]
        if isinstance(value, (set, frozenset)):
            return sorted(repr(self.of(item)) for item in value)
        if isinstance(value, Mapping):
            return sorted((repr(key), repr(self.of(item))) for key, item in value.items())
        return self._callable(value, inside=inside)

    def module(self, module: nn.Module) -> Any:
        return _ADDRESS.sub("", repr(module)), [
            (
                *(name, _name(type(part)), self._class(type(part))),
                [(n, self.of(v)) for n, v in sorted(vars(part).items()) if n not in self._bare],
            )
            for name, part in module.named_modules(remove_duplicate=False)
        ]

    def _callable(self, value: Any, *, inside: bool) -> Any:
        if isinstance(value, functools.partial):
            return [self.of(part) for part in (value.func, value.args, value.keywords)]
        if isinstance(value, MethodType):
            return self.of(value.__func__), self.of(value.__self__, inside=inside)
        if isinstance(value, FunctionType):
            return _name(value), self._function(value)
        if isinstance(value, type) or not hasattr(value, "__dict__"):
            return _name(value)
        return _name(type(value)), self._class(type(value)), self.of(vars(value)) if inside else ""

    def _class(self, kind: type) -> Any:
        if _is_known(kind):
            return []
        own = [(name, getattr(part, "__func__", part)) for name, part in sorted(vars(kind).items())]
        functions = [(n, self._function(f)) for n, f in own if isinstance(f, FunctionType)]
        plain = [(n, repr(v)) for n, v in own if isinstance(v, _PLAIN) and not n.startswith("__")]
        return functions, plain, [self._class(base) for base in kind.__bases__]

    def _function(self, function: FunctionType) -> Any:
        if _is_known(function):
            return []
        code, named = function.__code__, function.__globals__
        referred = [
            *(function.__defaults__ or ()),
            *(function.__kwdefaults__ or {}).values(),
            *(_content(cell) for cell in function.__closure__ or ()),
            *(named[name] for name in code.co_names if name in named),
        ]
        return self._code(code), [self.of(value) for value in referred]

    def _code(self, code: CodeType) -> Any:
        """Instructions, names and constants, without the lines of the file that they come from."""
        constants = [
            self._code(c) if isinstance(c, CodeType) else _constant(c) for c in code.co_consts
        ]
        return code.co_code.hex(), constants, code.co_names, code.co_varnames


def _constant(value: Any) -> str:
    # The order of a set of words differs from process to process.
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _is_known(part: Any) -> bool:
    return (getattr(part, "__module__", None) or "").split(".")[0] in _KNOWN


def _name(part: Any) -> str:
    """The name of a thing, with its module only where its code is not looked at."""
    found = str(getattr(part, "__qualname__", None) or type(part).__qualname__)
    return f"{part.__module__}.{found}" if _is_known(part) else found


FORMAT = "dpsur-checkpoint/2"  # /1 held positions of generators in place of the key
FILE_NAME = CHECKPOINT
_ANY_FORMAT = re.compile(r"dpsur-(checkpoint|engine)/\d+")
_DIGEST = re.compile("[0-9a-f]{64}")
NOT_WHOLE = "{} is not a whole checkpoint of this program; it cannot be resumed from"
FIXED_PARTS = "frozen parameters or buffers"
STATE, STREAM, _STATISTICS = "state/", "stream/", "statistics/"

# Statistics of the records that were released, with noise, before the first trial.
Statistics = Mapping[str, Tensor]


@dataclass(frozen=True)
class Fingerprint:
    """Tells one run from another: a digest of all, and of the parts that can be named."""

    total: str
    parts: Mapping[str, str]

    @staticmethod
    def of(parts: Mapping[str, Any]) -> "Fingerprint":
        shown = {name: str(value) for name, value in parts.items()}
        return Fingerprint(sha256(json.dumps(shown, sort_keys=True).encode()), shown)

    def differences(self, stored: Any) -> str:
        known = stored if isinstance(stored, Mapping) else {}
        found = [name for name, part in self.parts.items() if known.get(name, part) != part]
        if found == [FIXED_PARTS]:
            return f"{FIXED_PARTS} (seed torch before you build the network, or load its weights)"
        shown = (
            name if _DIGEST.fullmatch(self.parts[name]) else f"{name} ({known[name]}, here {own})"
            for name in found
            for own in [self.parts[name]]
        )
        return " and ".join(shown) or "settings, model, loss or records"


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """What was saved. The names of tensors begin with `state/`, `stream/` or `statistics/`.

    `more` are plain values of a custom loop. Its weights and its optimizer are not among the
    tensors: the loop saves them itself.
    """

    fingerprint: Fingerprint
    ledger: Ledger
    tensors: Mapping[str, Tensor]
    more: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return "Checkpoint(ledger, state and key of random numbers; private)"

    def under(self, prefix: str) -> dict[str, Tensor]:
        found = self.tensors.items()
        return {name.removeprefix(prefix): one for name, one in found if name.startswith(prefix)}

    def progress(self, initial: Progress) -> Progress:
        """Where the run was, in the form that it has at its beginning."""
        return Progress(unflatten(initial.state, self.under(STATE)), self.ledger)

    def to_plain(self) -> dict[str, Any]:
        return {
            **self.more,
            "format": FORMAT,
            "fingerprint": self.fingerprint.total,
            "parts": dict(self.fingerprint.parts),
            "ledger": self.ledger.to_json(),
            "tensors": dict(self.tensors),
        }

    @staticmethod
    def from_plain(
        values: Mapping[str, Any], fingerprint: Fingerprint | None, where: str, remedy: str
    ) -> "Checkpoint":
        """Read what `to_plain` wrote; refuse another format, or what belongs to another run."""
        check_format(values.get("format"), where)
        if fingerprint is None:
            fingerprint = Fingerprint(str(values.get("fingerprint")), values.get("parts", {}))
        if values.get("fingerprint") != fingerprint.total:
            differing = fingerprint.differences(values.get("parts"))
            raise CheckpointError(
                f"{where} belongs to another run, with other {differing}; {remedy}",
                code="other-run",
            )
        try:
            ledger = Ledger.from_json(values["ledger"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{where} is damaged: its ledger cannot be read") from error
        known = ("format", "fingerprint", "parts", "ledger", "tensors")
        more = {name: value for name, value in values.items() if name not in known}
        return Checkpoint(fingerprint, ledger, values["tensors"], more)


def check_format(written: Any, where: str) -> None:
    if written == FORMAT:
        return
    if isinstance(written, str) and _ANY_FORMAT.fullmatch(written):
        raise CheckpointError(
            f"{where} was written by another version of dpsur (format {written}; this one reads "
            f"{FORMAT}); resume with the version that wrote it",
            code="unknown-format",
        )
    raise CheckpointError(NOT_WHOLE.format(where))


def save_checkpoint(
    path: Path,
    progress: Progress,
    streams: Streams,
    fingerprint: Fingerprint,
    statistics: Statistics | None = None,
) -> None:
    """Write a checkpoint; an interruption leaves the previous one in place."""
    tensors = {STATE + name: value for name, value in flatten(progress.state).items()}
    tensors |= {STREAM + name: value for name, value in streams.positions().items()}
    tensors |= {_STATISTICS + name: value for name, value in (statistics or {}).items()}
    tensors = {name: value.detach().cpu().clone() for name, value in tensors.items()}
    facts = Checkpoint(fingerprint, progress.ledger, tensors).to_plain()
    del facts["tensors"]
    content = json.dumps(facts, sort_keys=True)
    metadata = {"dpsur": content, "digest": digest_of(tensors, content)}
    write_atomically(path, save_tensors(tensors, metadata), mode=0o600)


def load_checkpoint(
    path: Path, fingerprint: Fingerprint | None, ranks: Ranks = ALONE
) -> Checkpoint:
    """Read a checkpoint; refuse one that is damaged or belongs to another run than the fingerprint.

    Of several ranks the first reads the file for all of them.
    """
    tensors, facts = _parse(path, ranks.from_main(lambda: read_checkpoint(path)))
    remedy = (
        "resume with the same, or start a new run in another folder. One run must never be resumed "
        "from two copies of its folder: they would share their noise"
    )
    return Checkpoint.from_plain({**facts, "tensors": tensors}, fingerprint, str(path), remedy)


def load_statistics(path: Path, ranks: Ranks = ALONE) -> Statistics:
    """The statistics that a run has released already, so that it never draws them a second time.

    Whether they belong to the run at hand is checked when its checkpoint is loaded: inputs that
    were prepared with others have another fingerprint.
    """
    return load_checkpoint(path, None, ranks).under(_STATISTICS)


def read_checkpoint(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist, so there is nothing to resume; start the run without resume"
        ) from None
    except OSError as error:
        raise FileError(describe_os_error(error)) from error


def _parse(path: Path, content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    damaged = NOT_WHOLE.format(path)
    try:
        tensors = load_tensors(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        metadata = header["__metadata__"]
        text = metadata["dpsur"]
        facts: dict[str, Any] = dict(json.loads(text))
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(damaged) from error
    check_format(facts.get("format"), str(path))
    if metadata.get("digest") != digest_of(tensors, text):
        raise CheckpointError(damaged)
    return tensors, facts


def digest_of(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """A digest of named tensors: their names, types, shapes and bytes."""
    total = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().to_dense().contiguous()
        total.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)  # without a copy
    return total.hexdigest()
