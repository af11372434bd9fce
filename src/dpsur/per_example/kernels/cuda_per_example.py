"""Per-example gradients of convolutions on a GPU, by a custom kernel that copies no patches.

With patches most of the time goes into copying every pixel once per entry of the kernel. Here a
block of threads takes one example and 32 by 32 channels, goes down the rows of the map with those
that a kernel sees in shared memory, and keeps its sums in registers. The kernel is compiled when it
is first needed; where that is not possible, patches remain.
"""

import torch
from torch import Tensor

from dpsur.per_example.kernels import nvrtc as compiler
from dpsur.per_example.rules.patches import Window

# A warp takes 32 input channels, one a thread, and 4 output channels; a block has 8 warps.
_TILE, _THREADS = 32, 256
# Maps of which sizes, and kernels of how many entries: sums are kept in registers, rows in shared
# memory. On smaller maps inner products are cheaper still.
_LEAST_SIDE, _MOST_SIDE, _MOST_ENTRIES = 12, 64, 9
# Shared memory that every GPU has for a block.
_SHARED_BYTES = 48 * 1024
# The first dimension of a grid; more examples are left to patches.
_MOST_BLOCKS = 2**31 - 1
_SOURCE = """
extern "C" __global__ void __launch_bounds__(256) per_example(
    const float* __restrict__ inputs, const float* __restrict__ outputs, float* __restrict__ rows)
{
    constexpr int reach = WIDE + KERNEL_WIDE - 1, unrolled = WIDE <= 32 ? WIDE : 4;
    __shared__ float seen[KERNEL_HIGH][reach][33];
    __shared__ __align__(16) float slopes[WIDE][36];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long example = blockIdx.x;
    const int out = blockIdx.y * 32, in = blockIdx.z * 32;
    inputs += (example * IN_CHANNELS + in) * (IN_HIGH * IN_WIDE);
    outputs += (example * OUT_CHANNELS + out) * (HIGH * WIDE);
    float sums[4][KERNEL_HIGH][KERNEL_WIDE] = {};
    for (int y = 0; y < HIGH; ++y) {
        // the first turn brings all rows that the kernel sees, every later one a new row
        for (int row = y == 0 ? 0 : y + KERNEL_HIGH - 1; row < y + KERNEL_HIGH; ++row) {
            const int from = row - TOP;
            for (int i = threadIdx.x; i < 32 * reach; i += 256) {
                const int channel = i / reach, column = i % reach, at = column - LEFT;
                const bool inside = from >= 0 && from < IN_HIGH && at >= 0 && at < IN_WIDE;
                seen[row % KERNEL_HIGH][column][channel] =
                    inside ? inputs[(channel * IN_HIGH + from) * IN_WIDE + at] : 0.0f;
            }
        }
        for (int i = threadIdx.x; i < 32 * WIDE; i += 256)
            slopes[i % WIDE][i / WIDE] = outputs[(i / WIDE * HIGH + y) * WIDE + i % WIDE];
        __syncthreads();
        float window[KERNEL_HIGH][KERNEL_WIDE];
        #pragma unroll
        for (int a = 0; a < KERNEL_HIGH; ++a)
            #pragma unroll
            for (int b = 1; b < KERNEL_WIDE; ++b)
                window[a][b] = seen[(y + a) % KERNEL_HIGH][b - 1][lane];
        #pragma unroll unrolled
        for (int x = 0; x < WIDE; ++x) {
            const float4 slope = *reinterpret_cast<const float4*>(&slopes[x][4 * warp]);
            #pragma unroll
            for (int a = 0; a < KERNEL_HIGH; ++a) {
                #pragma unroll
                for (int b = 0; b + 1 < KERNEL_WIDE; ++b) window[a][b] = window[a][b + 1];
                window[a][KERNEL_WIDE - 1] =
                    seen[(y + a) % KERNEL_HIGH][x + KERNEL_WIDE - 1][lane];
                #pragma unroll
                for (int b = 0; b < KERNEL_WIDE; ++b) {
                    sums[0][a][b] += slope.x * window[a][b];
                    sums[1][a][b] += slope.y * window[a][b];
                    sums[2][a][b] += slope.z * window[a][b];
                    sums[3][a][b] += slope.w * window[a][b];
                }
            }
        }
        __syncthreads();
    }
    // neighbours in memory are written by neighbouring threads
    constexpr int entries = KERNEL_HIGH * KERNEL_WIDE;
    __shared__ float staged[8][32 * entries];
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
        #pragma unroll
        for (int e = 0; e < entries; ++e)
            staged[warp][lane * entries + e] = sums[k][e / KERNEL_WIDE][e % KERNEL_WIDE];
        __syncwarp();
        const long long pair = (example * OUT_CHANNELS + out + 4 * warp + k) * IN_CHANNELS + in;
        #pragma unroll
        for (int e = 0; e < entries; ++e)
            rows[pair * entries + e * 32 + lane] = staged[warp][e * 32 + lane];
        __syncwarp();
    }
}
"""


def fused_gradients(inputs: Tensor, outputs: Tensor, window: Window) -> Tensor | None:
    """Gradient of the kernel for every example, (examples, out, in, *kernel), or None.

    None stands for shapes, devices and versions for which there is no such kernel.
    """
    if not _suits(inputs, outputs, window):
        return None
    constants = compiler.shapes(inputs, outputs, window)
    kernel = compiler.compile_kernel(_SOURCE, "per_example", constants, inputs.device.index)
    if kernel is None:
        return None
    inputs, outputs = inputs.contiguous(), outputs.contiguous()
    examples, channels, height = len(inputs), inputs.shape[1], outputs.shape[1]
    rows = inputs.new_empty(examples, height, channels, *window.sizes)
    with torch.cuda.device(inputs.device):
        kernel(
            grid=(examples, height // _TILE, channels // _TILE),
            block=(_THREADS, 1, 1),
            args=[inputs, outputs, rows],
        )
    return rows


def _suits(inputs: Tensor, outputs: Tensor, window: Window) -> bool:
    """Whether the kernel fits, and pays: by shapes that were measured on an H200."""
    if (
        inputs.device.type != compiler.DEVICE
        or inputs.dim() != 4
        or not 0 < len(inputs) <= _MOST_BLOCKS
    ):
        return False
    if {inputs.dtype, outputs.dtype} != {torch.float32}:
        return False
    if any(stride > 1 for stride in window.strides + window.dilations):
        return False
    sides = outputs.shape[2:]
    channels = inputs.shape[1], outputs.shape[1]
    whole = min(channels) > 0 and all(count % _TILE == 0 for count in channels)
    high, wide = window.sizes
    small = high * wide <= _MOST_ENTRIES
    shared = high * (sides[1] + wide - 1) * 33 + sides[1] * 36 + _THREADS * high * wide
    fits = min(sides) >= _LEAST_SIDE and max(sides) <= _MOST_SIDE and 4 * shared <= _SHARED_BYTES
    return whole and small and fits
