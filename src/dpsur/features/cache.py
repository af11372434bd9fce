"""Features on disk, by the content of the records that they were computed from.

The files hold features of private records: they are readable by their owner only (files 0600,
folder 0700), and not a part of any release. Losing or damaging one costs time, never correctness.
"""

import contextlib
import hmac
import io
import json
import os
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsur.environment import cache_folder

Array = NDArray[Any]
KEY, KEY_BYTES = "key", 32


def path_for(transform: Mapping[str, Any], inputs: Tensor) -> Path:
    """Where the features of these very inputs under this transform are stored.

    A plain hash of the records would let anyone who sees a list of files try out what the records
    are. So the hash has a key, which stays in the folder.
    """
    values = np.ascontiguousarray(inputs.detach().cpu().numpy())
    about = {**transform, "shape": values.shape, "type": values.dtype.str}
    folder = cache_folder() / "features"
    digest = hmac.new(_key(folder), json.dumps(about, sort_keys=True).encode(), "sha256")
    digest.update(_bytes(values))
    return folder / f"{digest.hexdigest()}.npy"


def _key(folder: Path) -> bytes:
    """The key of this folder, made when it is first asked for; a fresh one if it cannot be kept."""
    path, fresh = folder / KEY, os.urandom(KEY_BYTES)
    with contextlib.suppress(OSError):
        if not path.exists():
            _write(path, [fresh])
        kept = path.read_bytes() if path.is_file() else b""
        return kept if len(kept) == KEY_BYTES else fresh
    return fresh


def read(path: Path, shape: tuple[int, ...]) -> Tensor | None:
    """Map a file into memory; None if it is missing, damaged or of another shape.

    Pages are copied when written to, so that nobody changes the file by changing the tensor.
    """
    if not path.is_file():  # to open a pipe would wait for ever
        return None
    try:
        values = np.lib.format.open_memmap(path, mode="c")
        known = values.dtype in (np.float32, np.float16) and values.flags.c_contiguous
        if values.shape != shape or not known:
            return None
        with path.open("rb") as file:
            file.seek(values.offset + values.nbytes)
            stored = file.read()
    except Exception:  # numpy raises anything about a damaged header; the features are recomputed
        return None
    return torch.from_numpy(values).float() if stored == _checksum(values) else None


def write(path: Path, features: Tensor) -> None:
    """Write a file, whole or not at all; a folder that cannot be written is no error.

    Features that 16 bits hold exactly, as those of the encoder, are stored in 16 bits: 60,000 rows
    of 8,192 numbers take 1 GB instead of 2.
    """
    small = features.detach().half()
    stored = small if torch.equal(small.to(features.dtype), features) else features.detach()
    values = np.ascontiguousarray(stored.cpu().numpy())
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(values))
    # the checksum lies behind the array, where readers of .npy do not look
    _write(path, [head.getvalue(), _bytes(values), _checksum(values)])


def _write(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    folder = path.parent
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        descriptor, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def _checksum(values: Array) -> bytes:
    return zlib.crc32(_bytes(values)).to_bytes(4, "little")


def _bytes(values: Array) -> memoryview:
    return values.reshape(-1).view(np.uint8).data
