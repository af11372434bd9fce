"""Checkpoints: everything a run needs to continue exactly as if it had not stopped.

A checkpoint is one safetensors file, so reading it can run no code. It is private: it holds the key
of all random numbers of the run and the number of rejected trials.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
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
from dpsur.mechanism.loop import Progress
from dpsur.mechanism.streams import Streams
from dpsur.privacy.ledger import Ledger
from dpsur.runs.files import CHECKPOINT, write_atomically

FORMAT = "dpsur-checkpoint/2"  # /1 held positions of generators in place of the key
FILE_NAME = CHECKPOINT
_ANY_FORMAT = re.compile(r"dpsur-checkpoint/\d+")
FIXED_PARTS = "frozen parameters or buffers"
_STATE, _STREAM, _STATISTICS = "state/", "stream/", "statistics/"

# Statistics of the records that were released, with noise, before the first trial.
Statistics = Mapping[str, Tensor]


@dataclass(frozen=True)
class Fingerprint:
    """Tells one run from another: a digest of all, and of the parts that can be named."""

    total: str
    parts: Mapping[str, str]

    def differences(self, stored: Any) -> str:
        """Which parts differ from stored ones, in words."""
        known = stored if isinstance(stored, Mapping) else {}
        found = [name for name, digest in self.parts.items() if known.get(name, digest) != digest]
        if found == [FIXED_PARTS]:
            return f"{FIXED_PARTS} (seed torch before you build the network, or load its weights)"
        return " and ".join(found) or "settings, model, loss or records"


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """What was saved."""

    ledger: Ledger
    state: Mapping[str, Tensor]
    streams: Mapping[str, Tensor]

    def __repr__(self) -> str:
        return "Checkpoint(ledger, state and key of random numbers; private)"


def save_checkpoint(
    path: Path,
    progress: Progress,
    streams: Streams,
    fingerprint: Fingerprint,
    statistics: Statistics | None = None,
) -> None:
    """Write a checkpoint; an interruption leaves the previous one in place."""
    tensors = {_STATE + name: value for name, value in flatten(progress.state).items()}
    tensors |= {_STREAM + name: value for name, value in streams.positions().items()}
    tensors |= {_STATISTICS + name: value for name, value in (statistics or {}).items()}
    tensors = {name: value.detach().cpu().clone() for name, value in tensors.items()}
    facts = {
        "format": FORMAT,
        "fingerprint": fingerprint.total,
        "parts": dict(fingerprint.parts),
        "ledger": progress.ledger.to_json(),
    }
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
    if facts.get("fingerprint") != fingerprint.total:
        differing = fingerprint.differences(facts.get("parts"))
        raise CheckpointError(
            f"{path} belongs to another run, with other {differing}; resume with the same, or "
            "start a new run in another folder. One run must never be resumed from two copies of "
            "its folder: they would share their noise",
            code="other-run",
        )
    try:
        ledger = Ledger.from_json(facts["ledger"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: its ledger cannot be read") from error
    return Checkpoint(ledger, _under(_STATE, tensors), _under(_STREAM, tensors))


def load_statistics(path: Path, ranks: Ranks = ALONE) -> Statistics:
    """The statistics that a run has released already, so that it never draws them a second time.

    Whether they belong to the run at hand is checked by `load_checkpoint`: inputs that were
    prepared with others have another fingerprint. Of several ranks the first reads the file.
    """
    content = ranks.from_main(lambda: read_checkpoint(path))
    return _under(_STATISTICS, _parse(path, content)[0])


def restore(checkpoint: Checkpoint, initial: Progress, streams: Streams) -> Progress:
    """Put a run back to where the checkpoint was written."""
    state = unflatten(initial.state, checkpoint.state)
    streams.restore(checkpoint.streams)
    return Progress(state, checkpoint.ledger)


def read_checkpoint(path: Path) -> bytes:
    """The content of a checkpoint file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist, so there is nothing to resume; start the run without resume"
        ) from None
    except OSError as error:
        raise FileError(describe_os_error(error)) from error


def _parse(path: Path, content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    damaged = f"{path} is not a whole checkpoint of this program; it cannot be resumed from"
    try:
        tensors = load_tensors(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        metadata = header["__metadata__"]
        text = metadata["dpsur"]
        facts: dict[str, Any] = dict(json.loads(text))
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(damaged) from error
    written = facts.get("format")
    if written != FORMAT and isinstance(written, str) and _ANY_FORMAT.fullmatch(written):
        raise CheckpointError(
            f"{path} was written by another version of dpsur (format {written}; this one reads "
            f"{FORMAT}); resume with the version that wrote it",
            code="unknown-format",
        )
    if written != FORMAT or metadata.get("digest") != _digest(text, tensors):
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
