"""One named random stream per purpose.

Separate streams keep purposes independent: evaluating a model, or skipping a test, cannot shift the
noise that is drawn later. They are seeded from the operating system unless a seed is asked for, and
their positions can be saved and restored, so that an interrupted run continues with the draws it
would have made.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from dpsur.errors import CheckpointError
from dpsur.functional.process_settings import seeded_globally

INIT: Final = "init"
BATCH: Final = "batch"
NOISE: Final = "noise"
VAL_BATCH: Final = "val-batch"
VAL_NOISE: Final = "val-noise"
LAYERS: Final = "layers"
STEERING: Final = "steering"  # noisy figures that an adaptive method steers by
COINS: Final = "coins"  # who of a sample is kept
FEATURES: Final = "features"  # private statistics of the features
PURPOSES: Final = (
    INIT,
    BATCH,
    NOISE,
    VAL_BATCH,
    VAL_NOISE,
    LAYERS,
    STEERING,
    COINS,
    FEATURES,
)

# Layout of the state of torch's CPU generator, a Mersenne twister of 624 words: the seed (8 bytes),
# words left (4), a flag (4), the next word (8), then the words themselves, 8 bytes each.
_TWISTER_WORDS = 624
_TWISTER_OFFSET = 24
_TWISTER_LEFT = slice(8, 12)
_ENTROPY_BYTES = 4 * _TWISTER_WORDS


class Streams:
    """The random streams of one run."""

    def __init__(self, seed: int | None, device: torch.device, rank: int = 0) -> None:
        self.seeded = seed is not None
        self.device = device
        self._generators = {
            purpose: _generator(_entropy(seed, purpose, rank), device) for purpose in PURPOSES
        }

    def __getitem__(self, purpose: str) -> torch.Generator:
        return self._generators[purpose]

    def at(self, step: int | Tensor) -> "Streams":  # noqa: ARG002
        """The draws of one step."""
        return self

    def positions(self) -> dict[str, Tensor]:
        """Where every stream stands. Private: positions determine all later draws."""
        return {purpose: g.get_state() for purpose, g in self._generators.items()}

    def restore(self, positions: Mapping[str, Tensor]) -> None:
        """Continue every stream from saved positions."""
        if set(positions) != set(self._generators):
            raise CheckpointError(f"expected the streams {PURPOSES}, got {sorted(positions)}")
        for purpose, generator in self._generators.items():
            try:
                generator.set_state(positions[purpose])
            except (RuntimeError, TypeError) as error:
                raise CheckpointError(
                    f"stream {purpose!r} cannot continue from its saved position on device "
                    f"{self.device}: resume on the kind of device the run was started on"
                ) from error

    @contextmanager
    def global_randomness(self, purpose: str) -> Iterator[None]:
        """Let code that only knows torch's global generator (dropout, initialisers) draw from here.

        The global generators are put back afterwards.
        """
        seed = torch.randint(
            2**62, (), generator=self[purpose], device=self.device, dtype=torch.int64
        ).item()
        with seeded_globally(int(seed), self.device):
            yield


def _entropy(seed: int | None, purpose: str, rank: int) -> bytes:
    if seed is None:
        return os.urandom(_ENTROPY_BYTES)
    return hashlib.shake_256(f"dpsur/{seed}/{purpose}/{rank}".encode()).digest(_ENTROPY_BYTES)


def _generator(entropy: bytes, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(entropy[:8], "little") >> 1)
    if device.type != "cpu":
        return generator
    # manual_seed keeps 32 bits of a seed on the CPU, few enough to try them all against released
    # weights. Filling the whole state takes all the entropy instead.
    state = generator.get_state().numpy().copy()
    words = state[_TWISTER_OFFSET : _TWISTER_OFFSET + 8 * _TWISTER_WORDS].reshape(-1, 8)
    words[:, :4] = torch.frombuffer(bytearray(entropy), dtype=torch.uint8).numpy().reshape(-1, 4)
    words[:, 4:] = 0
    # One word left makes the next draw refill the whole state.
    state[_TWISTER_LEFT] = (1, 0, 0, 0)
    generator.set_state(torch.from_numpy(state))
    return generator


Draws = Streams
