"""Random numbers by address: a draw depends on the key, the step, the purpose and the offset only.

All random numbers of a run come from a counter-based generator under one secret key: ChaCha20 under
256 bits from the operating system, or, where a seed is given, Philox4x64-10 under 128 bits that
follow from the seed (`random_numbers.py`). The counter is the address: the step of the run, the
purpose (see below), the rank, and the position within the draw. So a purpose cannot shift the draws
of another, an interrupted run continues with the draws it would have made, and every process of a
distributed run can draw its own part of one noise vector. The step never goes back: a rejected
trial is never drawn again.
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
from dpsur.mechanism import random_numbers
from dpsur.mechanism.random_numbers import SECRET_KEY_BYTES, SEEDED_KEY_BYTES, Key

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
        return random_numbers.draw_uniform(
            self._streams.key, self._step, address, count, self.device
        )

    def normal(self, count: int, offset: int | None = None) -> Tensor:
        """Standard normal numbers; with an offset, that part of a longer draw."""
        if offset is None:
            offset = self._advance(count)
        address = (PURPOSES[self.purpose], self._rank, offset)
        return random_numbers.draw_normal(
            self._streams.key, self._step, address, count, self.device
        )

    def add_normal(
        self, values: Tensor, scale: float | Tensor, *, in_place: bool = False
    ) -> Tensor:
        """A vector plus a scale times as many standard normal numbers, in double precision."""
        offset = self._advance(values.numel())
        address = (PURPOSES[self.purpose], self._rank, offset)
        return random_numbers.add_normal(
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
        block = self._streams.key.block
        self._next = -block * (-(offset + count) // block)  # no counter serves two draws
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

    def __init__(
        self,
        seed: int | None,
        device: torch.device,
        ranks: Ranks = ALONE,
        *,
        key: Key | None = None,
    ) -> None:
        """With a `key`, the random numbers of another `Streams`; `seed` is then unused."""
        self.device, self.ranks = device, ranks
        if key is not None:
            self.key = key
        elif seed is None:
            # rank 0 draws the key: all ranks must make the same draws
            self.key = Key(ranks.from_main(lambda: os.urandom(SECRET_KEY_BYTES)))
        else:
            self.key = Key(hashlib.shake_256(f"dpsur/{seed}".encode()).digest(SEEDED_KEY_BYTES))
        random_numbers.prepare_kernels(device, secret=self.key.secret)

    @property
    def seeded(self) -> bool:
        """Whether the key follows from a seed; the generator is then not a secure one."""
        return not self.key.secret

    def at(self, step: int | Tensor) -> Draws:
        """The draws of a step: `SETUP`, or the number of the trial from 1."""
        return Draws(self, step)

    def counts_below(self, bound: float, count: int, purpose: str, steps: range) -> list[int]:
        """How many of the first so many uniform draws of each step are below a bound.

        For a purpose whose draws are the same on all ranks.
        """
        address = (SHARED[purpose], 0, 0)
        return random_numbers.count_below(self.key, steps, address, count, bound, self.device)

    def on(self, device: torch.device) -> "Streams":
        """The same random numbers, drawn on another device."""
        return Streams(None, device, self.ranks, key=self.key)

    def spawn(self, index: int) -> "Streams":
        """Independent streams for one of several runs that share a seed."""
        own, size = self.key.content, len(self.key.content)
        digest = hashlib.blake2b(f"run {index}".encode(), key=own, digest_size=size)
        return Streams(None, self.device, self.ranks, key=Key(digest.digest()))

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
        saved, size = positions.get("key"), len(self.key.content)
        if set(positions) != {"key"} or saved is None or saved.shape != (size,):
            raise CheckpointError(
                f"the checkpoint holds no key of random numbers of {size} bytes, which this run "
                "needs; continue it with the version of dpsur that began it"
            )
        self.key = Key(bytes(saved.to(torch.uint8).tolist()))
