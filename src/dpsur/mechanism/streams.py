"""Random numbers by address: a draw depends on the key, the step, the purpose and the offset only.

All random numbers of a run come from Philox4x64-10, a counter-based generator (Salmon et al. 2011),
under one secret key of 128 bits. The counter is the address: the step of the run, the purpose (see
below), the rank, and the position within the draw. So a purpose cannot shift the draws of another,
an interrupted run continues with the draws it would have made, and every process of a distributed
run can draw its own part of one noise vector. The step never goes back: a rejected trial is never
drawn again.

The key comes from the operating system unless a seed is given. On a CPU NumPy computes the
generator, on CUDA a kernel, with the same bits.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from dpsur.distributed import ALONE, Ranks
from dpsur.errors import CheckpointError
from dpsur.functional.process_settings import seeded_globally
from dpsur.mechanism.philox import (
    Key,
    add_philox_normal,
    count_philox_below,
    philox_normal,
    philox_uniform,
    prepare_kernels,
)

INIT: Final = "init"
BATCH: Final = "batch"
NOISE: Final = "noise"
VAL_BATCH: Final = "val-batch"
VAL_NOISE: Final = "val-noise"
LAYERS: Final = "layers"
STEERING: Final = "steering"  # noisy figures that an adaptive method steers by
COINS: Final = "coins"  # which records of a sample are kept
FEATURES: Final = "features"  # private statistics of the features
HOLDOUT: Final = "holdout"  # noisy figures on held-out records
# The number of a purpose is part of every address, so it must never change. SHARED draws are the
# same on all ranks, or different parts of one draw; PER_RANK draws belong to one rank's records.
SHARED: Final = {
    INIT: 1,
    BATCH: 2,
    NOISE: 3,
    VAL_BATCH: 4,
    VAL_NOISE: 5,
    STEERING: 7,
    COINS: 8,
    FEATURES: 9,
    HOLDOUT: 10,
}
PER_RANK: Final = {LAYERS: 6}
PURPOSES: Final = {**SHARED, **PER_RANK}

KEY_BYTES: Final = 16
SETUP: Final = 0  # the step before the first trial


class Stream:
    """The random numbers of one purpose in one step.

    Draws without an offset follow one another. They are in double precision: uniform numbers are
    multiples of 2^-53 in [0, 1), and normal numbers come from them by the Box-Muller transform, so
    that they end at 8.57 standard deviations (docs/privacy.md).
    """

    def __init__(self, streams: "Streams", purpose: str, step: int | Tensor) -> None:
        self._streams, self.purpose, self._step = streams, purpose, step
        self._rank = streams.ranks.rank + 1 if purpose in PER_RANK else 0
        self._next = 0

    @property
    def device(self) -> torch.device:
        """Where draws are made."""
        return self._streams.device

    @property
    def ranks(self) -> Ranks:
        """The processes that make the same draws."""
        return self._streams.ranks

    def uniform(self, count: int) -> Tensor:
        """Uniform numbers in [0, 1)."""
        offset = self._advance(count)
        address = (PURPOSES[self.purpose], self._rank, offset)
        return philox_uniform(self._streams.key, self._step, address, count, self.device)

    def normal(self, count: int, offset: int | None = None) -> Tensor:
        """Standard normal numbers; with an offset, that part of a longer draw."""
        if offset is None:
            offset = self._advance(count)
        address = (PURPOSES[self.purpose], self._rank, offset)
        return philox_normal(self._streams.key, self._step, address, count, self.device)

    def add_normal(
        self, values: Tensor, scale: float | Tensor, *, in_place: bool = False
    ) -> Tensor:
        """A vector plus a scale times as many standard normal numbers, in double precision."""
        offset = self._advance(values.numel())
        address = (PURPOSES[self.purpose], self._rank, offset)
        return add_philox_normal(
            self._streams.key, self._step, address, values, scale, in_place=in_place
        )

    @property
    def step(self) -> int | Tensor:
        """The step that the numbers belong to."""
        return self._step

    def skip(self, count: int) -> int:
        """Leave out as many numbers as a draw would take; return where the first one stands."""
        return self._advance(count)

    def ahead(self) -> "Stream":
        """The same purpose in the next step."""
        return Stream(self._streams, self.purpose, self._step + 1)

    def _advance(self, count: int) -> int:
        offset = self._next
        self._next = -4 * (-(offset + count) // 4)  # whole blocks, so that no word is used twice
        return offset


class Draws:
    """The random numbers of one step."""

    def __init__(self, streams: "Streams", step: int | Tensor) -> None:
        self._streams, self.step = streams, step
        self._found: dict[str, Stream] = {}

    def __getitem__(self, purpose: str) -> Stream:
        if purpose not in self._found:
            self._found[purpose] = Stream(self._streams, purpose, self.step)
        return self._found[purpose]

    @property
    def ranks(self) -> Ranks:
        """The processes that make the same draws."""
        return self._streams.ranks

    @contextmanager
    def global_randomness(self, purpose: str) -> Iterator[None]:
        """Let code that only knows torch's global generator (dropout, initialisers) draw from here.

        The global generators are put back afterwards.
        """
        with seeded_globally(self._streams.seed_for(purpose, int(self.step)), self._streams.device):
            yield


class Streams:
    """The random numbers of one run, all of them under one secret key."""

    def __init__(self, seed: int | None, device: torch.device, ranks: Ranks = ALONE) -> None:
        self.seeded = seed is not None
        self.device, self.ranks = device, ranks
        prepare_kernels(device)
        # rank 0 draws the key: all ranks must make the same draws
        drawn = ranks.from_main(lambda: os.urandom(KEY_BYTES)) if seed is None else None
        self.key = Key(_seeded_key(seed) if seed is not None else drawn or b"")

    def at(self, step: int | Tensor) -> Draws:
        """The draws of a step: `SETUP`, or the number of the trial from 1."""
        return Draws(self, step)

    def counts_below(self, bound: float, count: int, purpose: str, steps: range) -> list[int]:
        """How many of the first so many uniform draws of each step are below a bound.

        For a purpose whose draws are the same on all ranks.
        """
        address = (SHARED[purpose], 0, 0)
        return count_philox_below(self.key, steps, address, count, bound, self.device)

    def on(self, device: torch.device) -> "Streams":
        """The same random numbers, drawn on another device."""
        other = Streams(0, device, self.ranks)
        other.seeded, other.key = self.seeded, self.key
        return other

    def spawn(self, index: int) -> "Streams":
        """Independent streams for one of several runs that share a seed."""
        child = Streams(0, self.device, self.ranks)
        digest = hashlib.blake2b(f"run {index}".encode(), key=self.key.content, digest_size=16)
        child.seeded, child.key = self.seeded, Key(digest.digest())
        return child

    def seed_for(self, purpose: str, step: int) -> int:
        """A seed of 63 bits for a generator that is not ours."""
        rank = self.ranks.rank + 1 if purpose in PER_RANK else 0
        address = f"{PURPOSES[purpose]}/{rank}/{step}".encode()
        digest = hashlib.blake2b(address, key=self.key.content, digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def positions(self) -> dict[str, Tensor]:
        """What a checkpoint keeps. Private: the key determines all draws."""
        return {"key": torch.frombuffer(bytearray(self.key.content), dtype=torch.uint8)}

    def restore(self, positions: Mapping[str, Tensor]) -> None:
        """Continue with the draws of a saved run."""
        saved = positions.get("key")
        if set(positions) != {"key"} or saved is None or saved.shape != (KEY_BYTES,):
            raise CheckpointError("the checkpoint holds no key of random numbers")
        self.key = Key(bytes(saved.to(torch.uint8).tolist()))


def _seeded_key(seed: int) -> bytes:
    return hashlib.shake_256(f"dpsur/{seed}".encode()).digest(KEY_BYTES)
