"""Philox4x64-10 (Salmon et al. 2011): 256 random bits for a key of 128 and a counter of 256 bits.

The counter is (block, rank, purpose, step). A block holds four words of 64 bits: four uniform
numbers of 53 bits, or two pairs for the Box-Muller transform. Three ways to compute it give the
same words: NumPy on a CPU, a kernel on CUDA, and integer arithmetic of PyTorch where no kernel can
be compiled.
"""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from dpsur.per_example.kernels import nvrtc

Address = tuple[int, int, int]  # purpose, rank, offset in words
_WORDS = 4
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_INCREMENTS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10
_UNIT = 2.0**-53
# Words that are worked on at once on a CPU: what fits its caches is faster.
_AT_ONCE = 2**16
# Normal numbers that are in memory at once where they are added to a vector without a kernel.
_ADDED_AT_ONCE = 2**19
_THREADS = 256
_SOURCE = """
typedef unsigned long long word;
__device__ void philox(const word* key, const word* step, int purpose, int rank, word block,
                       double* out) {
    word c0 = block + 1, c1 = rank, c2 = purpose, c3 = *step, k0 = key[0], k1 = key[1];
    #pragma unroll
    for (int round = 0; round < 10; ++round) {
        const word h0 = __umul64hi(0xD2E7470EE14C6C93ULL, c0), l0 = 0xD2E7470EE14C6C93ULL * c0;
        const word h1 = __umul64hi(0xCA5A826395121157ULL, c2), l1 = 0xCA5A826395121157ULL * c2;
        c0 = h1 ^ c1 ^ k0; c1 = l1; c2 = h0 ^ c3 ^ k1; c3 = l0;
        k0 += 0x9E3779B97F4A7C15ULL; k1 += 0xBB67AE8584CAA73BULL;
    }
    const double unit = 1.0 / 9007199254740992.0;
    out[0] = (c0 >> 11) * unit; out[1] = (c1 >> 11) * unit;
    out[2] = (c2 >> 11) * unit; out[3] = (c3 >> 11) * unit;
}
__device__ void normal(const word* key, const word* step, int purpose, int rank, word block,
                       double* u) {
    philox(key, step, purpose, rank, block, u);
    const double turn = 6.283185307179586;
    const double r0 = sqrt(-2.0 * log1p(-u[0])), r1 = sqrt(-2.0 * log1p(-u[2]));
    const double a0 = turn * u[1], a1 = turn * u[3];
    u[0] = r0 * cos(a0); u[1] = r0 * sin(a0); u[2] = r1 * cos(a1); u[3] = r1 * sin(a1);
}
extern "C" __global__ void draw(
    const word* key, const word* step, double* out, int purpose, int rank, int first_low,
    int first_high, int blocks, int gaussian)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= blocks) return;
    const word first = ((word)(unsigned)first_high << 32) | (unsigned)first_low;
    double u[4];
    if (gaussian) normal(key, step, purpose, rank, first + i, u);
    else philox(key, step, purpose, rank, first + i, u);
    for (int j = 0; j < 4; ++j) out[4LL * i + j] = u[j];
}
// Rounded step by step, so that results have the bits of separate operations.
extern "C" __global__ void add_noise(
    const word* key, const word* step, const float* values, const double* scale, float* out,
    int purpose, int rank, int first_low, int first_high, int count)
{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (4 * i >= count) return;
    const word first = ((word)(unsigned)first_high << 32) | (unsigned)first_low;
    double u[4];
    normal(key, step, purpose, rank, first + i, u);
    for (int j = 0; j < 4 && 4 * i + j < count; ++j)
        out[4 * i + j] = __double2float_rn(
            __dadd_rn(__dmul_rn(u[j], *scale), (double)values[4 * i + j]));
}
// The second dimension of the grid is the step.
extern "C" __global__ void count_below(
    const word* key, const word* first_step, const double* bound, int* out, int purpose, int rank,
    int count)
{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const word step = *first_step + blockIdx.y;
    int found = 0;
    if (4 * i < count) {
        double u[4];
        philox(key, &step, purpose, rank, i, u);
        for (int j = 0; j < 4 && 4 * i + j < count; ++j) found += u[j] < *bound;
    }
    for (int lanes = 16; lanes; lanes /= 2) found += __shfl_down_sync(0xffffffffu, found, lanes);
    if (threadIdx.x % 32 == 0) atomicAdd(out + blockIdx.y, found);
}
"""


def prepare_kernels(device: torch.device) -> None:
    """Begin to compile the kernels for a GPU, in another thread."""
    if device.type == "cuda":
        nvrtc.compile_ahead(_SOURCE, (), _index(device))


class Key:
    """A secret key of 128 bits, copied to a device once, so that a captured trial can read it."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self._places: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """The key as two words on a device. They stay there as long as the key is in use."""
        if device not in self._places:
            words = np.frombuffer(self.content, dtype="<i8").copy()
            self._places[device] = torch.from_numpy(words).to(device)
        return self._places[device]


def philox_uniform(
    key: Key, step: int | Tensor, address: Address, count: int, device: torch.device
) -> Tensor:
    """Uniform numbers in [0, 1), multiples of 2^-53: words `offset` to `offset + count`."""
    return _draw(key, step, address, count, device, normal=False)


def philox_normal(
    key: Key, step: int | Tensor, address: Address, count: int, device: torch.device
) -> Tensor:
    """Standard normal numbers by the Box-Muller transform, two for every two uniform ones.

    1 - u is exact and positive, so that the logarithm is finite.
    """
    return _draw(key, step, address, count, device, normal=True)


def add_philox_normal(
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
    first, skipped = divmod(offset, _WORDS)
    device, count = values.device, values.numel()
    kernel = None
    if (
        device.type == "cuda"
        and values.dtype == torch.float32
        and not skipped
        and 0 < count < 2**31
    ):
        kernel = nvrtc.compile_kernel(_SOURCE, "add_noise", (), _index(device))
    values = values.contiguous()
    found = values if in_place else torch.empty_like(values)
    if kernel is None:
        for start in range(0, count, _ADDED_AT_ONCE):
            some = slice(start, min(start + _ADDED_AT_ONCE, count))
            where = (purpose, rank, offset + start)
            noise = philox_normal(key, step, where, some.stop - start, device)
            found[some] = noise.mul_(scale).add_(values[some])
            del noise  # before the next part is drawn
        return found
    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=torch.float64, device=device)
    threads = -(-count // _WORDS)
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


def count_philox_below(
    key: Key, steps: range, address: Address, count: int, bound: float, device: torch.device
) -> list[int]:
    """How many of the first `count` uniform numbers are below a bound, in each of several steps.

    On CUDA by one kernel, which writes none of the numbers to memory.
    """
    purpose, rank, _ = address
    kernel = None
    if device.type == "cuda" and 0 < count < 2**31:
        kernel = nvrtc.compile_kernel(_SOURCE, "count_below", (), _index(device))
    if kernel is None:
        found = [philox_uniform(key, step, address, count, device) < bound for step in steps]
        return [int(each) for each in torch.stack([one.sum() for one in found]).tolist()]
    counts = torch.zeros(len(steps), dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        kernel(
            grid=(-(-count // (_WORDS * _THREADS)), len(steps), 1),
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
    first, skipped = divmod(offset, _WORDS)
    blocks = -(-(skipped + count) // _WORDS)
    if device.type == "cuda":
        found = _on_cuda(key, step, (purpose, rank, first), blocks, device, normal=normal)
    else:
        found = _on_cpu(key, int(step), (purpose, rank, first), blocks, normal=normal).to(device)
    return found[skipped : skipped + count]


def _on_cpu(key: Key, step: int, address: Address, blocks: int, *, normal: bool) -> Tensor:
    """Piece by piece, by as many threads as PyTorch has; bits do not depend on their number."""
    purpose, rank, first = address
    words = np.frombuffer(key.content, dtype="<u8")
    found = np.empty(_WORDS * blocks)

    def fill(start: int) -> None:
        counter = np.array([first + start // _WORDS, rank, purpose, step], dtype=np.uint64)
        generator = np.random.Generator(np.random.Philox(counter=counter, key=words))
        piece = found[start : start + _AT_ONCE]
        generator.random(out=piece)
        if normal:
            _box_muller_(torch.from_numpy(piece))

    starts = range(0, len(found), _AT_ONCE)
    threads = min(torch.get_num_threads(), len(starts))
    if threads > 1:
        # drawing and PyTorch's functions both leave the interpreter to other threads
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, starts))
    else:
        for start in starts:
            fill(start)
    return torch.from_numpy(found)


def _box_muller_(uniform: Tensor) -> None:
    """Replace pairs of uniform numbers by pairs of normal numbers."""
    pairs = uniform.view(-1, 2)
    radius = pairs[:, 0].neg().log1p_().mul_(-2.0).sqrt_()
    angle = pairs[:, 1] * (2 * math.pi)
    torch.mul(torch.cos(angle), radius, out=pairs[:, 0])
    torch.mul(torch.sin(angle), radius, out=pairs[:, 1])


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
    kernel = nvrtc.compile_kernel(_SOURCE, "draw", (), _index(device))
    if kernel is None:
        found = philox_words(words, step, address, blocks)
        if normal:
            _box_muller_(found)
        return found
    found = torch.empty(_WORDS * blocks, dtype=torch.float64, device=device)
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
    return _signed(word & 0xFFFFFFFF), _signed(word >> 32)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def philox_words(key: Tensor, step: Tensor, address: Address, blocks: int) -> Tensor:
    """The same uniform numbers by integer operations of PyTorch, on any device."""
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
    words = torch.stack([c0, c1, c2, c3], dim=1).view(-1)
    return ((words >> 11) & (2**53 - 1)).double() * _UNIT


def _multiply(value: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower half of a product of two words."""
    mask = 0xFFFFFFFF
    low, high = value & mask, (value >> 32) & mask
    by_low, by_high = by & mask, by >> 32
    first, second, third = low * by_low, high * by_low, low * by_high
    middle = ((first >> 32) & mask) + (second & mask) + (third & mask)
    upper = high * by_high + ((second >> 32) & mask) + ((third >> 32) & mask) + (middle >> 32)
    return upper, value * _as_int64(by)


def _as_int64(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
