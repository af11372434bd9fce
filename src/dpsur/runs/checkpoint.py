"""Checkpoints: everything a run needs to continue exactly as if it had not stopped.

There is one format for runs of `fit` and for custom loops: what tells the run from others, the
ledger, and tensors by name (`Checkpoint`). `fit` writes it as one safetensors file, so that reading
it can run no code. `PrivacyEngine.state_dict` gives it as plain values, for the loop to save beside
model and optimizer. It is private: it holds the key of the random numbers of a run of `fit`, saved
weights and the number of rejected trials.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from dpsur.distributed import ALONE, Ranks
from dpsur.errors import CheckpointError, FileError, describe_os_error
from dpsur.functional.tree import flatten, unflatten
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.trial import Progress
from dpsur.privacy.events import Ledger
from dpsur.runs.files import CHECKPOINT, sha256, write_atomically

FORMAT = "dpsur-checkpoint/2"  # /1 held positions of generators in place of the key
FILE_NAME = CHECKPOINT
_ANY_FORMAT = re.compile(r"dpsur-(checkpoint|engine)/\d+")
_DIGEST = re.compile("[0-9a-f]{64}")
NOT_WHOLE = "{} is not a whole checkpoint of this program; it cannot be resumed from"
FIXED_PARTS = "frozen parameters or buffers"
STATE, _STREAM, _STATISTICS = "state/", "stream/", "statistics/"

# Statistics of the records that were released, with noise, before the first trial.
Statistics = Mapping[str, Tensor]


@dataclass(frozen=True)
class Fingerprint:
    """Tells one run from another: a digest of all, and of the parts that can be named."""

    total: str
    parts: Mapping[str, str]

    @staticmethod
    def of(parts: Mapping[str, Any]) -> "Fingerprint":
        """Of settings by name, which can be shown."""
        shown = {name: str(value) for name, value in parts.items()}
        return Fingerprint(sha256(json.dumps(shown, sort_keys=True).encode()), shown)

    def differences(self, stored: Any) -> str:
        """Which parts differ from stored ones, in words."""
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
        """The tensors of which the names begin so, by the rest of their names."""
        return _under(prefix, self.tensors)

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
        values: Mapping[str, Any], fingerprint: Fingerprint, where: str, remedy: str
    ) -> "Checkpoint":
        """Read what `to_plain` wrote; refuse another format, or what belongs to another run."""
        check_format(values.get("format"), where)
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
    """Refuse what is no checkpoint of this version."""
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
    tensors |= {_STREAM + name: value for name, value in streams.positions().items()}
    tensors |= {_STATISTICS + name: value for name, value in (statistics or {}).items()}
    tensors = {name: value.detach().cpu().clone() for name, value in tensors.items()}
    facts = Checkpoint(fingerprint, progress.ledger, tensors).to_plain()
    del facts["tensors"]
    content = json.dumps(facts, sort_keys=True)
    metadata = {"dpsur": content, "digest": _digest(content, tensors)}
    write_atomically(path, save_tensors(tensors, metadata), mode=0o600)


def load_checkpoint(
    path: Path, fingerprint: Fingerprint, content: bytes | None = None
) -> Checkpoint:
    """Read a checkpoint; refuse one that is damaged or belongs to another run.

    `content` is that of the file, where it has been read already.
    """
    tensors, facts = _parse(path, read_checkpoint(path) if content is None else content)
    remedy = (
        "resume with the same, or start a new run in another folder. One run must never be resumed "
        "from two copies of its folder: they would share their noise"
    )
    return Checkpoint.from_plain({**facts, "tensors": tensors}, fingerprint, str(path), remedy)


def load_statistics(path: Path, ranks: Ranks = ALONE) -> Statistics:
    """The statistics that a run has released already, so that it never draws them a second time.

    Whether they belong to the run at hand is checked by `load_checkpoint`: inputs that were
    prepared with others have another fingerprint. Of several ranks the first reads the file.
    """
    content = ranks.from_main(lambda: read_checkpoint(path))
    return _under(_STATISTICS, _parse(path, content)[0])


def restore(checkpoint: Checkpoint, initial: Progress, streams: Streams) -> Progress:
    """Put a run back to where the checkpoint was written."""
    state = unflatten(initial.state, checkpoint.under(STATE))
    streams.restore(checkpoint.under(_STREAM))
    return Progress(state, checkpoint.ledger)


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
    if metadata.get("digest") != _digest(text, tensors):
        raise CheckpointError(damaged)
    return tensors, facts


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    return digest_of(tensors, text)


def digest_of(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """A digest of named tensors: their names, types, shapes and bytes."""
    total = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().to_dense().contiguous()
        total.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)  # without a copy
    return total.hexdigest()
