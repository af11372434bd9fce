"""Random numbers by address: a draw depends on the key, the step, the purpose and the offset only.

The address is the step of the run, the purpose (see `PURPOSES`), the rank, and the offset within
the draw. So a purpose cannot shift the draws of another, an interrupted run continues with the
draws it would have made, and every process of a distributed run can draw its own part of one noise
vector. The step never goes back: a rejected trial is never drawn again.

The key comes from the operating system unless a seed is given. Its length says which generator
turns an address into 64-bit words:

- 256 bits: ChaCha20 (RFC 8439), a stream cipher. Every run without a seed uses it, so that its
  noise cannot be told from random without the key.
- 128 bits: Philox4x64-10 (Salmon et al. 2011), which is fast and not cryptographically secure. It
  is for seeded runs, which are rehearsals: anyone who has the seed can subtract the noise.

A block of 8 words (Philox: 4) belongs to one counter; a word gives one uniform number of 53 bits or
one number of noise, an integer (`mechanism/noise_table.py`). The bits are the same on a CPU and on
CUDA: on a CPU OpenSSL and NumPy compute the words, on CUDA a kernel. Where none can be compiled, as
by torch before 2.8, the CPU draws for the GPU.
"""

import hashlib
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from dpsur.distributed import ALONE, Ranks
from dpsur.errors import CheckpointError
from dpsur.functional.process_settings import seeded_globally
from dpsur.mechanism.noise_table import (
    BITS,
    CENTRE,
    COLUMNS,
    DEVIATION,
    FACTOR,
    LIMIT_BITS,
    table,
    table_on,
)
from dpsur.per_example.kernels import nvrtc

Address = tuple[int, int, int]  # purpose, rank, offset in words
SECRET_KEY_BYTES: Final = 32
SEEDED_KEY_BYTES: Final = 16

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


class Streams:
    """The random numbers of one run, all of them under one secret key."""

    def __init__(
        self,
        seed: int | None,
        device: torch.device,
        ranks: Ranks = ALONE,
        *,
        key: "Key | None" = None,
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
        prepare_kernels(device, secret=self.key.secret)

    @property
    def seeded(self) -> bool:
        """Whether the key follows from a seed; the generator is then not a secure one."""
        return not self.key.secret

    def at(self, step: int | Tensor) -> "Draws":
        """The draws of a step: `SETUP`, or the number of the trial from 1."""
        return Draws(self, step)

    @property
    def on_device(self) -> bool:
        """Whether the device itself draws, as a captured trial must."""
        return self.device.type != "cuda" or self.key.kernel("draw", self.device) is not None

    def counts_below(
        self, bound: float, count: int, purpose: str, steps: range, offset: int = 0
    ) -> list[int]:
        """How many of so many uniform draws of each step are below a bound.

        For a purpose whose draws are the same on all ranks.
        """
        address = (SHARED[purpose], 0, offset)
        return count_below(self.key, steps, address, count, bound, self.device)

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


class Draws:
    """The random numbers of one step."""

    def __init__(self, streams: Streams, step: int | Tensor) -> None:
        self._streams, self.step, self.ranks = streams, step, streams.ranks
        self._found: dict[str, Stream] = {}

    def __getitem__(self, purpose: str) -> "Stream":
        if purpose not in self._found:
            self._found[purpose] = Stream(self._streams, purpose, self.step)
        return self._found[purpose]

    @contextmanager
    def global_randomness(self, purpose: str) -> Iterator[None]:
        """Let code that only knows torch's global generator (dropout, initialisers) draw from here.

        The global generators are put back afterwards.
        """
        with seeded_globally(self._streams.seed_for(purpose, int(self.step)), self._streams.device):
            yield


class Stream:
    """The random numbers of one purpose in one step.

    Draws without an offset follow one another. They are in double precision: uniform numbers are
    multiples of 2^-53 in [0, 1), and noise is an integer over `DEVIATION`, a discrete Gaussian that
    ends at 12.9 standard deviations (docs/privacy.md).
    """

    def __init__(self, streams: Streams, purpose: str, step: int | Tensor) -> None:
        self._streams, self.purpose, self.step = streams, purpose, step
        self.device, self.ranks = streams.device, streams.ranks
        self._rank = streams.ranks.rank + 1 if purpose in PER_RANK else 0
        self._next = 0

    def uniform(self, count: int) -> Tensor:
        address = self._address(count, None)
        return draw(self._streams.key, self.step, address, count, self.device, normal=False)

    def normal(self, count: int, offset: int | None = None) -> Tensor:
        """Noise of standard deviation 1; with an offset, that part of a longer draw."""
        address = self._address(count, offset)
        noise = draw(self._streams.key, self.step, address, count, self.device, normal=True)
        return noise.div_(DEVIATION)

    def add_normal(
        self,
        values: Tensor,
        scale: float | Tensor,
        offset: int | None = None,
        *,
        in_place: bool = False,
    ) -> Tensor:
        """A vector on the grid of its noise, plus the noise; the bits are the same everywhere."""
        address = self._address(values.numel(), offset)
        return add_normal(self._streams.key, self.step, address, values, scale, in_place=in_place)

    def skip(self, count: int) -> int:
        """Leave out as many numbers as a draw would take; return where the first one stands."""
        offset, block = self._next, self._streams.key.block
        self._next = -block * (-(offset + count) // block)  # no counter serves two draws
        return offset

    def ahead(self) -> "Stream":
        """The same purpose in the next step."""
        return Stream(self._streams, self.purpose, self.step + 1)

    def _address(self, count: int, offset: int | None) -> Address:
        offset = self.skip(count) if offset is None else offset
        return PURPOSES[self.purpose], self._rank, offset


# --- draws by address ---------------------------------------------------------------------------

_UNIT = 2.0**-53
_EXPONENT = 0x433 << 52  # of 2^52: with it, the bits of an integer n are those of 2^52 + n
# Words that are worked on at once on a CPU: what fits its caches is faster.
_AT_ONCE = 2**15
_ZEROS = memoryview(bytes(8 * (_AT_ONCE + 8)))  # and where a piece begins within a block
_MOST_WORKERS = 8  # more would wait for each other's Python
_LEAST_OF_A_WORKER = 2**16
# Numbers of noise that are in memory at once where they are added to a vector without a kernel.
_ADDED_AT_ONCE = 2**19
# Added to a purpose: where the further bits of a number of noise come from, one block for each.
_FURTHER = 2**15
_THREADS = 256
_SOURCE = """
typedef unsigned long long word;
#if CHACHA
#define WORDS 8
#define MIX(x, y, z, by) x += y; z ^= x; z = (z << by) | (z >> (32 - by));
#define QUARTER(a, b, c, d) MIX(s[a], s[b], s[d], 16) MIX(s[c], s[d], s[b], 12) \\
    MIX(s[a], s[b], s[d], 8) MIX(s[c], s[d], s[b], 7)
__device__ void draw_words(const word* key, const word* step, int purpose, int rank, word block,
                           word* out) {
    unsigned start[16] = {0x61707865u, 0x3320646eu, 0x79622d32u, 0x6b206574u}, s[16];
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        start[4 + 2 * i] = (unsigned)key[i];
        start[5 + 2 * i] = (unsigned)(key[i] >> 32);
    }
    start[12] = (unsigned)block;
    start[13] = (unsigned)purpose | (unsigned)rank << 16;
    start[14] = (unsigned)*step;
    start[15] = (unsigned)(*step >> 32);
    #pragma unroll
    for (int i = 0; i < 16; ++i) s[i] = start[i];
    #pragma unroll
    for (int round = 0; round < 10; ++round) {
        QUARTER(0, 4, 8, 12) QUARTER(1, 5, 9, 13) QUARTER(2, 6, 10, 14) QUARTER(3, 7, 11, 15)
        QUARTER(0, 5, 10, 15) QUARTER(1, 6, 11, 12) QUARTER(2, 7, 8, 13) QUARTER(3, 4, 9, 14)
    }
    #pragma unroll
    for (int i = 0; i < WORDS; ++i)
        out[i] = (word)(s[2 * i] + start[2 * i])
            | (word)(s[2 * i + 1] + start[2 * i + 1]) << 32;
}
#else
#define WORDS 4
__device__ void draw_words(const word* key, const word* step, int purpose, int rank, word block,
                           word* out) {
    word c0 = block + 1, c1 = rank, c2 = purpose, c3 = *step, k0 = key[0], k1 = key[1];
    #pragma unroll
    for (int round = 0; round < 10; ++round) {
        const word h0 = __umul64hi(0xD2E7470EE14C6C93ULL, c0), l0 = 0xD2E7470EE14C6C93ULL * c0;
        const word h1 = __umul64hi(0xCA5A826395121157ULL, c2), l1 = 0xCA5A826395121157ULL * c2;
        c0 = h1 ^ c1 ^ k0; c1 = l1; c2 = h0 ^ c3 ^ k1; c3 = l0;
        k0 += 0x9E3779B97F4A7C15ULL; k1 += 0xBB67AE8584CAA73BULL;
    }
    out[0] = c0; out[1] = c1; out[2] = c2; out[3] = c3;
}
#endif
__device__ double uniform(word drawn) { return (drawn >> 11) * (1.0 / 9007199254740992.0); }
// Whether a draw stays in its column where the bits that are compared first do not tell.
__device__ __noinline__ bool stays_by_further_bits(
    const word* key, const word* step, int purpose, int rank, word number, int part,
    const word* rest)
{
    word found[WORDS];
    draw_words(key, step, purpose | FURTHER, rank, number, found);
    const word high = found[2 * part], low = found[2 * part + 1];
    return high < rest[0] || (high == rest[0] && low < rest[1]);
}
__device__ int noise(const word* key, const word* step, int purpose, int rank, word number,
                     word drawn, const unsigned* entries, const word* rest) {
    int found = 0;
    #pragma unroll
    for (int part = 0; part < 2; ++part) {
        const unsigned half = (unsigned)(part ? drawn : drawn >> 32);
        const unsigned column = half >> LIMIT_BITS, bits = half & ((1u << LIMIT_BITS) - 1);
        const unsigned entry = entries[column], limit = entry >> BITS;
        bool stays = bits < limit;
        if (bits == limit)
            stays = stays_by_further_bits(key, step, purpose, rank, number, part,
                                          rest + 2 * column);
        found = FACTOR * found + (int)(stays ? column : entry & ((1u << BITS) - 1)) - CENTRE;
    }
    return found;
}
extern "C" __global__ void draw(
    const word* key, const word* step, double* out, const unsigned* entries, const word* rest,
    int purpose, int rank, int first_low, int first_high, int blocks, int gaussian)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= blocks) return;
    const word block = (((word)(unsigned)first_high << 32) | (unsigned)first_low) + i;
    word found[WORDS];
    draw_words(key, step, purpose, rank, block, found);
    #pragma unroll
    for (int j = 0; j < WORDS; ++j)
        out[(long long)WORDS * i + j] = gaussian
            ? noise(key, step, purpose, rank, WORDS * block + j, found[j], entries, rest)
            : uniform(found[j]);
}
extern "C" __global__ void add_noise(
    const word* key, const word* step, const float* values, const double* grid, float* out,
    const unsigned* entries, const word* rest, int purpose, int rank, int first_low,
    int first_high, int count)
{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (WORDS * i >= count) return;
    const word block = (((word)(unsigned)first_high << 32) | (unsigned)first_low) + i;
    const double spacing = *grid;
    word found[WORDS];
    draw_words(key, step, purpose, rank, block, found);
    #pragma unroll
    for (int j = 0; j < WORDS; ++j) {
        const long long at = WORDS * i + j;
        if (at >= count) return;
        const double steps = rint(__ddiv_rn((double)values[at], spacing));
        const int more = noise(
            key, step, purpose, rank, WORDS * block + j, found[j], entries, rest);
        out[at] = __double2float_rn(__dmul_rn(__dadd_rn(steps, (double)more), spacing));
    }
}
// The second dimension of the grid is the step.
extern "C" __global__ void count_below(
    const word* key, const word* first_step, const double* bound, int* out, int purpose, int rank,
    int count)
{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const word step = *first_step + blockIdx.y;
    int found = 0;
    if (WORDS * i < count) {
        word drawn[WORDS];
        draw_words(key, &step, purpose, rank, i, drawn);
        #pragma unroll
        for (int j = 0; j < WORDS; ++j)
            found += WORDS * i + j < count && uniform(drawn[j]) < *bound;
    }
    for (int lanes = 16; lanes; lanes /= 2) found += __shfl_down_sync(0xffffffffu, found, lanes);
    if (threadIdx.x % 32 == 0) atomicAdd(out + blockIdx.y, found);
}
"""


class Key:
    """A secret key, copied to a device once, so that a captured trial can read it."""

    def __init__(self, content: bytes) -> None:
        if len(content) not in (SECRET_KEY_BYTES, SEEDED_KEY_BYTES):
            raise ValueError(f"a key has 16 or 32 bytes, not {len(content)}")
        self.content = content
        self._places: dict[torch.device, Tensor] = {}

    @property
    def secret(self) -> bool:
        """Whether the generator is ChaCha20, as for every key that the operating system drew."""
        return len(self.content) == SECRET_KEY_BYTES

    @property
    def block(self) -> int:
        """Words that one counter gives."""
        return 8 if self.secret else 4

    def on(self, device: torch.device) -> Tensor:
        """The key in words of 64 bits on a device. They stay there as long as it is in use."""
        if device not in self._places:
            words = np.frombuffer(self.content, dtype="<i8").copy()
            self._places[device] = torch.from_numpy(words).to(device)
        return self._places[device]

    def kernel(self, name: str, device: torch.device) -> nvrtc.Kernel | None:
        return nvrtc.compile_kernel(_SOURCE, name, _constants(self.secret), _index(device))


def prepare_kernels(device: torch.device, *, secret: bool) -> None:
    """Begin to compile the kernels for a GPU, in another thread, and copy the table of noise."""
    if device.type == "cuda":
        nvrtc.compile_ahead(_SOURCE, _constants(secret), _index(device))
        table_on(device)


def _constants(secret: bool) -> nvrtc.Constants:
    return (
        ("CHACHA", int(secret)),
        ("BITS", BITS),
        ("LIMIT_BITS", LIMIT_BITS),
        ("CENTRE", CENTRE),
        ("FACTOR", FACTOR),
        ("FURTHER", _FURTHER),
    )


def add_normal(
    key: Key,
    step: int | Tensor,
    address: Address,
    values: Tensor,
    scale: float | Tensor,
    *,
    in_place: bool = False,
) -> Tensor:
    """A vector, rounded to a grid, plus discrete Gaussian noise of a standard deviation.

    The grid has the deviation over `DEVIATION` between its points. Integers are added; what is
    returned is the point that they name. The vector of the noise is never whole in memory: on CUDA
    one kernel draws and adds, elsewhere parts of it are drawn one after the other. `in_place`
    writes into `values`, which must be contiguous.
    """
    purpose, rank, offset = address
    first, skipped = divmod(offset, key.block)
    device, count = values.device, values.numel()
    blocks = -(-(skipped + count) // key.block)
    _check_blocks(key, first + blocks, normal=True)
    values = values.contiguous()
    found = values if in_place else torch.empty_like(values)
    if device.type == "cpu":
        grid = float(scale) / DEVIATION
        numbers, places = values.numpy(), found.numpy()

        def work(some: slice, words: _Words) -> None:
            noise = _noise(key, int(step), (purpose, rank, offset + some.start), words)
            steps = numbers[some].astype(np.float64)
            steps /= grid
            np.rint(steps, out=steps)
            steps += noise
            steps *= grid
            places[some] = steps

        _in_pieces(key, int(step), address, count, work)
        return found
    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=torch.float64, device=device)
    spacing, kernel = scale.to(device, torch.float64) / DEVIATION, None
    if values.dtype == torch.float32 and not skipped and 0 < count < 2**31:
        kernel = key.kernel("add_noise", device)
    if kernel is None:
        for start in range(0, count, _ADDED_AT_ONCE):
            some = slice(start, min(start + _ADDED_AT_ONCE, count))
            where = (purpose, rank, offset + start)
            noise = draw(key, step, where, some.stop - start, device, normal=True)
            steps = values[some].double().div_(spacing).round_()
            found[some] = noise.add_(steps).mul_(spacing)
            del noise  # before the next part is drawn
        return found
    place = (purpose, rank, *_two_halves(first))
    given = [key.on(device), _on_device(step, device), values, spacing, found, *table_on(device)]
    _launch(kernel, blocks, [*given, *place, count], device)
    return found


def count_below(
    key: Key, steps: range, address: Address, count: int, bound: float, device: torch.device
) -> list[int]:
    """How many of `count` uniform numbers are below a bound, in each of several steps.

    On CUDA by one kernel, which writes none of the numbers to memory.
    """
    purpose, rank, offset = address
    kernel = None
    if device.type == "cuda" and 0 < count < 2**31 and not offset:
        kernel = key.kernel("count_below", device)
    if kernel is None:
        found = [draw(key, step, address, count, device, normal=False) < bound for step in steps]
        return [int(each) for each in torch.stack([one.sum() for one in found]).tolist()]
    counts = torch.zeros(len(steps), dtype=torch.int32, device=device)
    below = torch.full((), bound, dtype=torch.float64, device=device)
    given = [key.on(device), _on_device(steps.start, device), below, counts, purpose, rank, count]
    _launch(kernel, -(-count // key.block), given, device, rows=len(steps))
    return [int(each) for each in counts.tolist()]


def _launch(
    kernel: nvrtc.Kernel, threads: int, args: list[Any], device: torch.device, rows: int = 1
) -> None:
    with torch.cuda.device(device):
        kernel(grid=(-(-threads // _THREADS), rows, 1), block=(_THREADS, 1, 1), args=args)


def draw(
    key: Key,
    step: int | Tensor,
    address: Address,
    count: int,
    device: torch.device,
    *,
    normal: bool,
) -> Tensor:
    """Uniform numbers in [0, 1), multiples of 2^-53, or integers of noise.

    They are the words `offset` to `offset + count` of their address.
    """
    purpose, rank, offset = address
    first, skipped = divmod(offset, key.block)
    blocks = -(-(skipped + count) // key.block)
    _check_blocks(key, first + blocks, normal=normal)
    kernel = key.kernel("draw", device) if device.type == "cuda" and blocks else None
    if kernel is not None:  # nothing waits for the device, and a step there can be replayed
        drawn = torch.empty(key.block * blocks, dtype=torch.float64, device=device)
        place = (purpose, rank, *_two_halves(first))
        given = [key.on(device), _on_device(step, device), drawn, *table_on(device)]
        _launch(kernel, blocks, [*given, *place, blocks, int(normal)], device)
        return drawn[skipped : skipped + count]
    found = np.empty(count)

    def work(some: slice, words: _Words) -> None:
        if normal:
            found[some] = _noise(key, int(step), (purpose, rank, offset + some.start), words)
        else:
            np.multiply(words >> np.uint64(11), _UNIT, out=found[some])

    _in_pieces(key, int(step), address, count, work)
    return torch.from_numpy(found).to(device)


def _check_blocks(key: Key, end: int, *, normal: bool) -> None:
    """The counter of ChaCha20 has 32 bits; beyond them words would be used twice.

    Every number of noise has a block of further bits.
    """
    if key.secret and (end * key.block if normal else end) > 2**32:
        raise OverflowError(f"a draw of {end * key.block:,} numbers is longer than its counter")


_Words = np.ndarray[tuple[int], np.dtype[np.uint64]]
_Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]


def _in_pieces(
    key: Key, step: int, address: Address, count: int, work: Callable[[slice, _Words], None]
) -> None:
    """Give out words piece by piece, to as many threads as PyTorch has.

    Bits do not depend on their number, nor on where a draw is cut.
    """
    purpose, rank, offset = address

    def give(start: int) -> None:
        some = slice(start, min(start + _AT_ONCE, count))
        first, skipped = divmod(offset + start, key.block)
        size = skipped + some.stop - start
        words = _words(key, step, (purpose, rank, first), -(-size // key.block))
        work(some, words[skipped:size])

    starts = iter(range(0, count, _AT_ONCE))

    def give_all() -> None:
        for start in starts:
            give(start)

    # drawing and NumPy's functions both leave the interpreter to other threads
    threads = min(torch.get_num_threads(), _MOST_WORKERS, count // _LEAST_OF_A_WORKER)
    others = [_workers().submit(give_all) for _ in range(threads - 1)]
    try:
        give_all()
    finally:  # an interruption leaves nobody at work
        for other in others:
            other.result()


@cache
def _workers() -> ThreadPoolExecutor:
    """Threads that stay."""
    return ThreadPoolExecutor(_MOST_WORKERS, "dpsur-noise")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.cache_clear)  # where they do not exist


def _words(key: Key, step: int, address: Address, blocks: int) -> _Words:
    """The words of so many blocks from one on, on the host."""
    purpose, rank, first = address
    if key.secret:  # the key stream of ChaCha20 is what it makes of zeros
        counter = struct.pack("<IIQ", first, purpose | rank << 16, step)
        cipher = Cipher(algorithms.ChaCha20(key.content, counter), mode=None).encryptor()
        return np.frombuffer(cipher.update(_ZEROS[: 64 * blocks]), dtype="<u8")
    counter_words = np.array([first, rank, purpose, step], dtype=np.uint64)
    philox = np.random.Philox(counter=counter_words, key=np.frombuffer(key.content, dtype="<u8"))
    return philox.random_raw(4 * blocks)


def _noise(key: Key, step: int, address: Address, words: _Words) -> _Numbers:
    """A number of noise for each word; the offset of the first one is that of the address.

    Nothing here depends on what the noise is added to.
    """
    purpose, rank, offset = address
    entries, rest = table()
    halves = words.view(np.uint32)  # the lower one of each word first
    columns = halves >> LIMIT_BITS
    limits = entries.take(columns, mode="wrap")  # and, in the last bits, the aliases
    bits = halves << BITS
    bits |= columns
    # The lesser one ends with what is drawn: the column where its bits are below the limit's.
    found = np.minimum(bits, limits)
    bits ^= limits
    found &= np.uint32(COLUMNS - 1)
    while bits[place := int(bits.argmin())] < COLUMNS:  # equal bits, in one of 2^17
        bits[place] = COLUMNS
        number, part = place // 2, 1 - place % 2  # the upper half is drawn first
        further = _words(key, step, (purpose | _FURTHER, rank, offset + number), 1)
        high, low = further[2 * part : 2 * part + 2]
        column = columns[place]
        stays = (high, low) < tuple(rest[column])
        found[place] = column if stays else limits[place] & (COLUMNS - 1)
    # Upper half times `FACTOR` plus lower half, in the upper half of a product; then the bits of
    # a number of double precision.
    whole = found.view(np.int64)
    whole *= 2**32 + FACTOR
    whole >>= 32
    whole |= _EXPONENT
    noise: _Numbers = whole.view(np.float64)
    noise -= 2.0**52 + CENTRE * (FACTOR + 1)
    return noise


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _on_device(step: int | Tensor, device: torch.device) -> Tensor:
    if isinstance(step, Tensor):
        return step
    return torch.full((), step, dtype=torch.int64, device=device)


def _two_halves(word: int) -> tuple[int, int]:
    """The lower and the upper 32 bits, as a kernel takes them: with a sign."""
    low, high = struct.unpack("<ii", struct.pack("<Q", word))
    return low, high
