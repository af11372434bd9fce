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

A block of 8 words (Philox: 4) belongs to one counter; a word gives one uniform number of 53 bits, a
pair of them one pair of the Box-Muller transform. The bits are the same on a CPU and on CUDA: on a
CPU OpenSSL and NumPy compute the words, on CUDA a kernel, and integer operations of PyTorch where
no kernel can be compiled.
"""

import hashlib
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Barrier
from typing import Final

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from dpsur.distributed import ALONE, Ranks
from dpsur.errors import CheckpointError
from dpsur.functional.process_settings import seeded_globally
from dpsur.per_example.kernels import nvrtc

Address = tuple[int, int, int]  # purpose, rank, offset in words
SECRET_KEY_BYTES: Final = 32
SEEDED_KEY_BYTES: Final = 16
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_INCREMENTS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10  # of Philox; of ChaCha20 as many double rounds
_CONSTANTS = struct.unpack("<4I", b"expand 32-byte k")
# Which words of the state a quarter round of ChaCha20 mixes: first columns, then diagonals.
_QUARTERS = (
    *((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)),
    *((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)),
)
_HALF = 0xFFFFFFFF
_UNIT = 2.0**-53
# Words that are worked on at once on a CPU: what fits its caches is faster.
_AT_ONCE = 2**16
_ZEROS = bytes(8 * _AT_ONCE)
_MOST_WORKERS = 8  # more would wait for each other's Python
# Normal numbers that are in memory at once where they are added to a vector on a device.
_ADDED_AT_ONCE = 2**19
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
__device__ void uniform(const word* key, const word* step, int purpose, int rank, word block,
                        double* u) {
    word found[WORDS];
    draw_words(key, step, purpose, rank, block, found);
    for (int j = 0; j < WORDS; ++j) u[j] = (found[j] >> 11) * (1.0 / 9007199254740992.0);
}
__device__ void normal(const word* key, const word* step, int purpose, int rank, word block,
                       double* u) {
    uniform(key, step, purpose, rank, block, u);
    for (int j = 0; j < WORDS; j += 2) {
        const double radius = sqrt(-2.0 * log1p(-u[j])), angle = 6.283185307179586 * u[j + 1];
        u[j] = radius * cos(angle);
        u[j + 1] = radius * sin(angle);
    }
}
extern "C" __global__ void draw(
    const word* key, const word* step, double* out, int purpose, int rank, int first_low,
    int first_high, int blocks, int gaussian)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= blocks) return;
    const word first = ((word)(unsigned)first_high << 32) | (unsigned)first_low;
    double u[WORDS];
    if (gaussian) normal(key, step, purpose, rank, first + i, u);
    else uniform(key, step, purpose, rank, first + i, u);
    for (int j = 0; j < WORDS; ++j) out[(long long)WORDS * i + j] = u[j];
}
// Rounded step by step, so that results have the bits of separate operations.
extern "C" __global__ void add_noise(
    const word* key, const word* step, const float* values, const double* scale, float* out,
    int purpose, int rank, int first_low, int first_high, int count)
{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (WORDS * i >= count) return;
    const word first = ((word)(unsigned)first_high << 32) | (unsigned)first_low;
    double u[WORDS];
    normal(key, step, purpose, rank, first + i, u);
    for (int j = 0; j < WORDS && WORDS * i + j < count; ++j)
        out[WORDS * i + j] = __double2float_rn(
            __dadd_rn(__dmul_rn(u[j], *scale), (double)values[WORDS * i + j]));
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
        double u[WORDS];
        uniform(key, &step, purpose, rank, i, u);
        for (int j = 0; j < WORDS && WORDS * i + j < count; ++j) found += u[j] < *bound;
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
        """A kernel with this key's generator."""
        return nvrtc.compile_kernel(_SOURCE, name, _constants(self.secret), _index(device))


def prepare_kernels(device: torch.device, *, secret: bool) -> None:
    """Begin to compile the kernels for a GPU, in another thread."""
    if device.type == "cuda":
        nvrtc.compile_ahead(_SOURCE, _constants(secret), _index(device))


def _constants(secret: bool) -> nvrtc.Constants:
    return (("CHACHA", int(secret)),)


def draw_uniform(
    key: Key, step: int | Tensor, address: Address, count: int, device: torch.device
) -> Tensor:
    """Uniform numbers in [0, 1), multiples of 2^-53: words `offset` to `offset + count`."""
    return _draw(key, step, address, count, device, normal=False)


def draw_normal(
    key: Key, step: int | Tensor, address: Address, count: int, device: torch.device
) -> Tensor:
    """Standard normal numbers by the Box-Muller transform, two for every two uniform ones.

    1 - u is exact and positive, so that the logarithm is finite.
    """
    return _draw(key, step, address, count, device, normal=True)


def add_normal(
    key: Key,
    step: int | Tensor,
    address: Address,
    values: Tensor,
    scale: float | Tensor,
    *,
    in_place: bool = False,
) -> Tensor:
    """A vector plus a scale times standard normal numbers, computed in double precision.

    The vector of the noise is never whole in memory: on CUDA one kernel draws and adds, elsewhere
    parts of it are drawn one after the other. `in_place` writes into `values`, which must be
    contiguous.
    """
    purpose, rank, offset = address
    first, skipped = divmod(offset, key.block)
    device, count = values.device, values.numel()
    kernel = None
    if (
        device.type == "cuda"
        and values.dtype == torch.float32
        and not skipped
        and 0 < count < 2**31
    ):
        kernel = key.kernel("add_noise", device)
    values = values.contiguous()
    found = values if in_place else torch.empty_like(values)
    if kernel is None:

        def add(some: slice) -> None:
            where = (purpose, rank, offset + some.start)
            noise = draw_normal(key, step, where, some.stop - some.start, device)
            found[some] = noise.mul_(scale).add_(values[some])

        _in_parts(add, count, device)
        return found
    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=torch.float64, device=device)
    threads = -(-count // key.block)
    _check_blocks(key, first + threads)
    with torch.cuda.device(device):
        kernel(
            grid=(-(-threads // _THREADS), 1, 1),
            block=(_THREADS, 1, 1),
            args=[
                key.on(device),
                _on_device(step, device),
                values,
                scale.to(device, torch.float64),
                found,
                purpose,
                rank,
                *_two_halves(first),
                count,
            ],
        )
    return found


def count_below(
    key: Key, steps: range, address: Address, count: int, bound: float, device: torch.device
) -> list[int]:
    """How many of the first `count` uniform numbers are below a bound, in each of several steps.

    On CUDA by one kernel, which writes none of the numbers to memory.
    """
    purpose, rank, _ = address
    kernel = None
    if device.type == "cuda" and 0 < count < 2**31:
        kernel = key.kernel("count_below", device)
    if kernel is None:
        found = [draw_uniform(key, step, address, count, device) < bound for step in steps]
        return [int(each) for each in torch.stack([one.sum() for one in found]).tolist()]
    counts = torch.zeros(len(steps), dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        kernel(
            grid=(-(-count // (key.block * _THREADS)), len(steps), 1),
            block=(_THREADS, 1, 1),
            args=[
                key.on(device),
                _on_device(steps.start, device),
                torch.full((), bound, dtype=torch.float64, device=device),
                counts,
                purpose,
                rank,
                count,
            ],
        )
    return [int(each) for each in counts.tolist()]


def _draw(
    key: Key,
    step: int | Tensor,
    address: Address,
    count: int,
    device: torch.device,
    *,
    normal: bool,
) -> Tensor:
    purpose, rank, offset = address
    first, skipped = divmod(offset, key.block)
    blocks = -(-(skipped + count) // key.block)
    _check_blocks(key, first + blocks)
    if device.type == "cuda":
        found = _on_cuda(key, step, (purpose, rank, first), blocks, device, normal=normal)
    else:
        found = _on_cpu(key, int(step), (purpose, rank, first), blocks, normal=normal).to(device)
    return found[skipped : skipped + count]


def _check_blocks(key: Key, end: int) -> None:
    """The counter of ChaCha20 has 32 bits; beyond them words would be used twice."""
    if key.secret and end > 2**32:
        raise OverflowError(f"a draw of {end * key.block:,} numbers is longer than its counter")


def _in_parts(work: Callable[[slice], None], count: int, device: torch.device) -> None:
    """Part by part; on a CPU by as many threads as PyTorch has, in none of which it starts more."""
    most = _AT_ONCE if device.type == "cpu" else _ADDED_AT_ONCE
    some = [slice(start, min(start + most, count)) for start in range(0, count, most)]
    # as many parts as one thread has taken anyway; one of `add_normal` is not divided again
    threads = min(torch.get_num_threads(), _MOST_WORKERS, count // most)
    if device.type != "cpu" or threads < 2:
        for one in some:
            work(one)
        return
    inference = torch.is_inference_mode_enabled()  # a thread has a mode of its own

    def work_alike(one: slice) -> None:
        with torch.inference_mode(inference):
            work(one)

    # drawing and PyTorch's functions both leave the interpreter to other threads
    list(_workers(threads).map(work_alike, some))


@cache
def _workers(threads: int) -> ThreadPoolExecutor:
    """Threads that stay, each with one thread for PyTorch's functions."""
    pool = ThreadPoolExecutor(threads, "dpsur-noise", torch.set_num_threads, (1,))
    usual, met = torch.get_num_threads(), Barrier(threads)
    list(pool.map(lambda _: met.wait(), range(threads)))
    torch.set_num_threads(usual)  # what threads that are started from now on begin with
    return pool


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.cache_clear)  # where they do not exist


def _on_cpu(key: Key, step: int, address: Address, blocks: int, *, normal: bool) -> Tensor:
    """In parts, whose bits do not depend on who draws them."""
    found = torch.empty(key.block * blocks, dtype=torch.float64, device="cpu")
    fill = _fill_by_cipher if key.secret else _fill_by_philox

    def work(some: slice) -> None:
        piece = found[some]
        numbers, unit = fill(key, step, address, some.start // key.block, piece)
        if normal:
            _box_muller(numbers, unit, piece)
        else:
            torch.mul(numbers.double(), unit, out=piece)

    _in_parts(work, len(found), found.device)
    return found


def _fill_by_cipher(
    key: Key, step: int, address: Address, block: int, place: Tensor
) -> tuple[Tensor, float]:
    """The key stream of ChaCha20, what it makes of zeros: 53 bits of each word, and their unit."""
    purpose, rank, first = address
    counter = struct.pack("<IIQ", first + block, purpose | rank << 16, step)
    cipher = Cipher(algorithms.ChaCha20(key.content, counter), mode=None).encryptor()
    content = place.numpy()
    cipher.update_into(_ZEROS[: content.nbytes], content.view(np.uint8).data)
    words = content.view("<u8")
    np.right_shift(words, np.uint64(11), out=words)
    return place.view(torch.int64), _UNIT


def _fill_by_philox(
    key: Key, step: int, address: Address, block: int, place: Tensor
) -> tuple[Tensor, float]:
    """Uniform numbers, and their unit."""
    purpose, rank, first = address
    counter = np.array([first + block, rank, purpose, step], dtype=np.uint64)
    words = np.frombuffer(key.content, dtype="<u8")
    np.random.Generator(np.random.Philox(counter=counter, key=words)).random(out=place.numpy())
    return place, 1.0


def _box_muller(numbers: Tensor, unit: float, out: Tensor) -> None:
    """Pairs of normal numbers from pairs of uniform ones, which are in units of a power of two.

    `out` may be the memory of the numbers.
    """
    pairs, normal = numbers.view(-1, 2), out.view(-1, 2)
    radius = pairs[:, 0].double() * -unit
    angle = pairs[:, 1].double() * (2 * math.pi * unit)
    radius.log1p_().mul_(-2.0).sqrt_()
    torch.mul(torch.cos(angle), radius, out=normal[:, 0])
    torch.mul(angle.sin_(), radius, out=normal[:, 1])


def _on_cuda(
    key: Key,
    step: int | Tensor,
    address: Address,
    blocks: int,
    device: torch.device,
    *,
    normal: bool,
) -> Tensor:
    """By a kernel; nothing waits for the device, and a step on the device can be replayed."""
    purpose, rank, first = address
    step, words = _on_device(step, device), key.on(device)
    kernel = key.kernel("draw", device)
    if kernel is None:
        find = cipher_numbers if key.secret else philox_numbers
        found = find(words, step, address, blocks)
        if normal:
            _box_muller(found, 1.0, found)
        return found
    found = torch.empty(key.block * blocks, dtype=torch.float64, device=device)
    if blocks:
        low, high = _two_halves(first)
        with torch.cuda.device(device):
            kernel(
                grid=(-(-blocks // _THREADS), 1, 1),
                block=(_THREADS, 1, 1),
                args=[words, step, found, purpose, rank, low, high, blocks, int(normal)],
            )
    return found


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _on_device(step: int | Tensor, device: torch.device) -> Tensor:
    if isinstance(step, Tensor):
        return step
    return torch.full((), step, dtype=torch.int64, device=device)


def _two_halves(word: int) -> tuple[int, int]:
    """The lower and the upper 32 bits, as a kernel takes them."""
    return _signed(word & _HALF), _signed(word >> 32)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def cipher_numbers(key: Tensor, step: Tensor, address: Address, blocks: int) -> Tensor:
    """The uniform numbers of ChaCha20 by integer operations of PyTorch, on any device.

    Halves of words are kept in int64, which has no sign to mind.
    """
    purpose, rank, first = address
    block = torch.arange(blocks, device=key.device, dtype=torch.int64) + first
    halves = torch.stack([key & _HALF, (key >> 32) & _HALF], dim=1).view(-1)
    last = [block, purpose | rank << 16, step & _HALF, (step >> 32) & _HALF]
    start = [torch.zeros_like(block) + half for half in (*_CONSTANTS, *halves, *last)]
    state = list(start)
    for _ in range(_ROUNDS):
        for a, b, c, d in _QUARTERS:
            for x, y, z, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                state[x] = (state[x] + state[y]) & _HALF
                turned = state[z] ^ state[x]
                state[z] = ((turned << by) | (turned >> (32 - by))) & _HALF
    ends = [(one + other) & _HALF for one, other in zip(state, start, strict=True)]
    words = [low | high << 32 for low, high in zip(ends[::2], ends[1::2], strict=True)]
    return _as_uniform(torch.stack(words, dim=1).view(-1))


def philox_numbers(key: Tensor, step: Tensor, address: Address, blocks: int) -> Tensor:
    """The uniform numbers of Philox by integer operations of PyTorch, on any device."""
    purpose, rank, first = address
    c0 = torch.arange(blocks, device=key.device, dtype=torch.int64) + (first + 1)
    c1, c2 = torch.full_like(c0, rank), torch.full_like(c0, purpose)
    c3 = torch.zeros_like(c0) + step
    k0, k1 = key[0], key[1]
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _as_int64(_INCREMENTS[0]), k1 + _as_int64(_INCREMENTS[1])
    return _as_uniform(torch.stack([c0, c1, c2, c3], dim=1).view(-1))


def _as_uniform(words: Tensor) -> Tensor:
    return ((words >> 11) & (2**53 - 1)).double() * _UNIT


def _multiply(value: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower half of a product of two words."""
    mask = _HALF
    low, high = value & mask, (value >> 32) & mask
    by_low, by_high = by & mask, by >> 32
    first, second, third = low * by_low, high * by_low, low * by_high
    middle = ((first >> 32) & mask) + (second & mask) + (third & mask)
    upper = high * by_high + ((second >> 32) & mask) + ((third >> 32) & mask) + (middle >> 32)
    return upper, value * _as_int64(by)


def _as_int64(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


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
        return self._streams.device

    @property
    def ranks(self) -> Ranks:
        return self._streams.ranks

    def uniform(self, count: int) -> Tensor:
        offset = self._advance(count)
        address = (PURPOSES[self.purpose], self._rank, offset)
        return draw_uniform(self._streams.key, self._step, address, count, self.device)

    def normal(self, count: int, offset: int | None = None) -> Tensor:
        """Standard normal numbers; with an offset, that part of a longer draw."""
        if offset is None:
            offset = self._advance(count)
        address = (PURPOSES[self.purpose], self._rank, offset)
        return draw_normal(self._streams.key, self._step, address, count, self.device)

    def add_normal(
        self, values: Tensor, scale: float | Tensor, *, in_place: bool = False
    ) -> Tensor:
        """A vector plus a scale times as many standard normal numbers, in double precision."""
        offset = self._advance(values.numel())
        address = (PURPOSES[self.purpose], self._rank, offset)
        return add_normal(self._streams.key, self._step, address, values, scale, in_place=in_place)

    @property
    def step(self) -> int | Tensor:
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
        prepare_kernels(device, secret=self.key.secret)

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
