"""Features on disk, by the content of the records that they were computed from.

The files hold features of private records: they are readable by their owner only (files 0600,
folder 0700), and not a part of any release. Losing or damaging one costs time, never correctness.
"""

import contextlib
import hmac
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from dpsur.environment import cache_folder, write_cache

KEY, KEY_BYTES = "key", 32


def path_for(transform: Mapping[str, Any], inputs: Tensor) -> Path:
    """Where the features of these very inputs under this transform are stored.

    A plain hash of the records would let anyone who sees a list of files try out what the records
    are. So the hash has a key, which stays in the folder.
    """
    values = inputs.detach().cpu()
    about = {**transform, "shape": values.shape, "type": str(values.dtype)}
    folder = cache_folder() / "features"
    digest = hmac.new(_key(folder), json.dumps(about, sort_keys=True).encode(), "sha256")
    digest.update(_bytes(values))
    return folder / f"{digest.hexdigest()}.safetensors"


def _key(folder: Path) -> bytes:
    """The key of this folder, made when it is first asked for; a fresh one if it cannot be kept."""
    path, fresh = folder / KEY, os.urandom(KEY_BYTES)
    with contextlib.suppress(OSError):
        if not path.exists():
            write_cache(path, fresh)
        kept = path.read_bytes() if path.is_file() else b""
        return kept if len(kept) == KEY_BYTES else fresh
    return fresh


def read(path: Path, shape: tuple[int, ...]) -> Tensor | None:
    """Map a file into memory; None if it is missing, damaged or of another shape."""
    if not path.is_file():  # to open a pipe would wait for ever
        return None
    try:
        with safe_open(path, "pt") as file:
            found: Tensor = file.get_tensor("features")
            checksum = file.metadata()["crc32"]
    except Exception:  # whatever is raised about a damaged header; the features are recomputed
        return None
    if found.shape != shape or not found.is_floating_point() or _checksum(found) != checksum:
        return None
    return found.float()


def write(path: Path, features: Tensor) -> None:
    """Write a file, whole or not at all; a folder that cannot be written is no error.

    Features that 16 bits hold exactly, as those of the encoder, are stored in 16 bits: 60,000 rows
    of 8,192 numbers take 1 GB instead of 2.
    """
    small = features.detach().half()
    stored = small if torch.equal(small.to(features.dtype), features) else features.detach()
    stored = stored.cpu().contiguous()
    write_cache(path, save({"features": stored}, {"crc32": _checksum(stored)}))


def _checksum(values: Tensor) -> str:
    return str(zlib.crc32(_bytes(values)))


def _bytes(values: Tensor) -> memoryview:
    return np.ascontiguousarray(values.numpy()).reshape(-1).view(np.uint8).data
