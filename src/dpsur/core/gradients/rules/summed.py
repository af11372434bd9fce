"""The gradient of a convolution on small maps with few outputs, summed over examples, on a card.

Kernels that are usually chosen for such a gradient are an order of magnitude slower than reading
its inputs once. Here a block of threads goes through some of the examples, each in shared memory
while it lasts. A thread has one row of the kernel in one input channel, and keeps the sums for all
of its entries and sixteen output channels in registers. Blocks are added up at the end, always in
the same order.
"""

from math import prod

import torch
from torch import Tensor

from dpsur.core.gradients.rules import compiled as compiler
from dpsur.core.gradients.rules.window import Window

_THREADS, _OUTPUTS = 256, 16
# Rows of kernels over all input channels: a thread each. With few, most threads would idle.
_LEAST_ROWS, _MOST_ROWS = 96, _THREADS
_MOST_ENTRIES_IN_A_ROW, _MOST_OUTPUTS, _MOST_PLACES = 3, 32, 64
# Bytes of shared memory for one example.
_MOST_SHARED = 40_000
# Blocks: each leaves sums behind, which take memory, and has examples to go through.
_EXAMPLES_A_BLOCK, _MOST_BLOCKS = 16, 132
_SOURCE = """
extern "C" __global__ void __launch_bounds__(256) summed(
    const float* __restrict__ inputs, const float* __restrict__ outputs, float* __restrict__ sums,
    int examples)
{
    constexpr int map = IN_HIGH * IN_WIDE, places = HIGH * WIDE;
    __shared__ float seen[IN_CHANNELS * map];
    __shared__ __align__(16) float slopes[places][16];
    const int channel = threadIdx.x % IN_CHANNELS, row = threadIdx.x / IN_CHANNELS;
    const bool works = row < KERNEL_HIGH;
    const int out = blockIdx.y * 16;
    float mine[16][KERNEL_WIDE] = {};
    for (long long example = blockIdx.x; example < examples; example += gridDim.x) {
        const float* from = inputs + example * (IN_CHANNELS * map);
        for (int i = threadIdx.x; i < IN_CHANNELS * map; i += 256) seen[i] = from[i];
        const float* slope = outputs + (example * OUT_CHANNELS + out) * places;
        for (int i = threadIdx.x; i < 16 * places; i += 256)
            slopes[i % places][i / places] = slope[i];
        __syncthreads();
        if (works) {
            const float* pixels = seen + channel * map;
            #pragma unroll
            for (int y = 0; y < HIGH; ++y) {
                const int at = y * STRIDE_DOWN + row - TOP;
                if (at < 0 || at >= IN_HIGH) continue;
                #pragma unroll
                for (int x = 0; x < WIDE; ++x) {
                    float pixel[KERNEL_WIDE];
                    #pragma unroll
                    for (int b = 0; b < KERNEL_WIDE; ++b) {
                        const int column = x * STRIDE_ALONG + b - LEFT;
                        pixel[b] = column >= 0 && column < IN_WIDE
                            ? pixels[at * IN_WIDE + column] : 0.0f;
                    }
                    const float4* quads =
                        reinterpret_cast<const float4*>(slopes[y * WIDE + x]);
                    #pragma unroll
                    for (int q = 0; q < 4; ++q) {
                        const float4 four = quads[q];
                        #pragma unroll
                        for (int b = 0; b < KERNEL_WIDE; ++b) {
                            mine[4 * q][b] += four.x * pixel[b];
                            mine[4 * q + 1][b] += four.y * pixel[b];
                            mine[4 * q + 2][b] += four.z * pixel[b];
                            mine[4 * q + 3][b] += four.w * pixel[b];
                        }
                    }
                }
            }
        }
        __syncthreads();
    }
    if (!works) return;
    float* into = sums + (long long)blockIdx.x
        * (OUT_CHANNELS * IN_CHANNELS * KERNEL_HIGH * KERNEL_WIDE);
    #pragma unroll
    for (int o = 0; o < 16; ++o)
        #pragma unroll
        for (int b = 0; b < KERNEL_WIDE; ++b)
            into[(((out + o) * IN_CHANNELS + channel) * KERNEL_HIGH + row) * KERNEL_WIDE + b] =
                mine[o][b];
}
"""


def summed(inputs: Tensor, outputs: Tensor, window: Window) -> Tensor | None:
    """The gradient of the kernel, summed over examples, (out, in, *kernel), or None.

    None stands for shapes, devices and versions for which there is no such kernel.
    """
    if not _suits(inputs, outputs, window):
        return None
    constants = compiler.shapes(inputs, outputs, window)
    kernel = compiler.compiled(_SOURCE, "summed", constants, inputs.device.index)
    if kernel is None:
        return None
    inputs, outputs = inputs.contiguous(), outputs.contiguous()
    examples, channels, height = len(inputs), inputs.shape[1], outputs.shape[1]
    blocks = max(1, min(_MOST_BLOCKS, examples // _EXAMPLES_A_BLOCK))
    sums = inputs.new_empty(blocks, height, channels, *window.sizes)
    with torch.cuda.device(inputs.device):
        kernel(
            grid=(blocks, height // _OUTPUTS, 1),
            block=(_THREADS, 1, 1),
            args=[inputs, outputs, sums, examples],
        )
    return sums.sum(0)


def _suits(inputs: Tensor, outputs: Tensor, window: Window) -> bool:
    """Whether the kernel fits, and pays: by shapes that were measured on an H200."""
    if inputs.device.type != compiler.DEVICE or inputs.dim() != 4 or not 0 < len(inputs) < 2**31:
        return False
    if {inputs.dtype, outputs.dtype} != {torch.float32} or max(window.dilations) > 1:
        return False
    rows, height = inputs.shape[1] * window.sizes[0], outputs.shape[1]
    places = prod(outputs.shape[2:])
    shared = 4 * (inputs[0].numel() + _OUTPUTS * places)
    return (
        _LEAST_ROWS <= rows <= _MOST_ROWS
        and window.sizes[1] <= _MOST_ENTRIES_IN_A_ROW
        and height % _OUTPUTS == 0
        and height <= _MOST_OUTPUTS
        and 0 < places <= _MOST_PLACES
        and shared <= _MOST_SHARED
    )
