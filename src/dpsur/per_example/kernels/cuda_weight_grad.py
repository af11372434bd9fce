"""The gradient of a convolution on small maps, summed over examples, on a GPU.

Kernels that are usually chosen for such a gradient are far slower than its arithmetic. Here a block
of threads goes through some of the examples, with some channels of each in shared memory while it
lasts. A thread has one row of the kernel in one input channel, and keeps the sums for all of its
entries and sixteen output channels in registers. Blocks are added up at the end, always in the same
order.
"""

from math import prod

import torch
from torch import Tensor

from dpsur.per_example.kernels import nvrtc as compiler
from dpsur.per_example.rules.patches import Window

_WARP, _OUTPUTS = 32, 16
# Between the outputs of one place and the next, in shared memory: fewer meet in one bank.
_SLOPES_APART = 20
# Rows of kernels over the input channels of a block: a thread each. With few it has little to do.
_LEAST_ROWS, _MOST_ROWS = 96, 256
_MOST_ENTRIES_IN_A_ROW, _MOST_PLACES = 3, 64
# Outputs of layers for which it pays: few, or more if inputs are many.
_FEW_OUTPUTS, _MANY_OUTPUTS, _MANY_INPUTS = 32, 128, 128
# Bytes of shared memory for one example.
_MOST_SHARED = 40_000
# Blocks: each has examples to go through, and leaves sums behind.
_EXAMPLES_A_BLOCK, _MOST_BLOCKS = 16, 132
_SOURCE = """
extern "C" __global__ void __launch_bounds__(THREADS, HIGH * WIDE > 16 ? 3 : 2) summed(
    const float* __restrict__ inputs, const float* __restrict__ outputs, float* __restrict__ sums,
    int examples)
{
    constexpr int map = IN_HIGH * IN_WIDE, places = HIGH * WIDE, rows = places > 16 ? 1 : HIGH;
    // an odd distance, so that the channels of a warp lie in different banks
    constexpr int apart = map | 1;
    __shared__ float seen[TOGETHER * apart];
    __shared__ __align__(16) float slopes[places][SLOPES_APART];
    const int channel = threadIdx.x % TOGETHER, row = threadIdx.x / TOGETHER;
    const bool works = row < KERNEL_HIGH;
    const int out = blockIdx.y * 16, in = blockIdx.z * TOGETHER;
    float mine[16][KERNEL_WIDE] = {};
    for (long long example = blockIdx.x; example < examples; example += gridDim.x) {
        const float* from = inputs + (example * IN_CHANNELS + in) * map;
        for (int i = threadIdx.x; i < TOGETHER * map; i += THREADS)
            seen[i / map * apart + i % map] = from[i];
        const float* slope = outputs + (example * OUT_CHANNELS + out) * places;
        for (int i = threadIdx.x; i < 16 * places; i += THREADS)
            slopes[i % places][i / places] = slope[i];
        __syncthreads();
        if (works) {
            const float* pixels = seen + channel * apart;
            #pragma unroll rows
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
            into[(((out + o) * IN_CHANNELS + in + channel) * KERNEL_HIGH + row) * KERNEL_WIDE
                + b] = mine[o][b];
}
"""


def summed_gradient(inputs: Tensor, outputs: Tensor, window: Window) -> Tensor | None:
    """The gradient of the kernel, summed over examples, (out, in, *kernel), or None.

    None stands for shapes, devices and versions for which there is no such kernel.
    """
    if not summing_pays(inputs, outputs, window):
        return None
    together = _channels_together(inputs, outputs, window)
    threads = -(-together * window.sizes[0] // _WARP) * _WARP
    constants = (
        ("IN_CHANNELS", inputs.shape[1]),
        ("IN_HIGH", inputs.shape[2]),
        ("IN_WIDE", inputs.shape[3]),
        ("OUT_CHANNELS", outputs.shape[1]),
        ("HIGH", outputs.shape[2]),
        ("WIDE", outputs.shape[3]),
        ("KERNEL_HIGH", window.sizes[0]),
        ("KERNEL_WIDE", window.sizes[1]),
        ("STRIDE_DOWN", window.strides[0]),
        ("STRIDE_ALONG", window.strides[1]),
        ("TOP", window.margins[0]),
        ("LEFT", window.margins[1]),
        ("TOGETHER", together),
        ("THREADS", threads),
        ("SLOPES_APART", _SLOPES_APART),
    )
    kernel = compiler.compile_kernel(_SOURCE, "summed", constants, inputs.device.index)
    if kernel is None:
        return None
    inputs, outputs = inputs.contiguous(), outputs.contiguous()
    examples, channels, height = len(inputs), inputs.shape[1], outputs.shape[1]
    blocks = blocks_for(inputs, height * channels * prod(window.sizes))
    sums = inputs.new_empty(blocks, height, channels, *window.sizes)
    with torch.cuda.device(inputs.device):
        kernel(
            grid=(blocks, height // _OUTPUTS, channels // together),
            block=(threads, 1, 1),
            args=[inputs, outputs, sums, examples],
        )
    return sums.sum(0)


def blocks_for(inputs: Tensor, entries: int) -> int:
    """How many blocks share the examples: what they leave takes no more memory than the inputs."""
    most = min(_MOST_BLOCKS, len(inputs) // _EXAMPLES_A_BLOCK, inputs.numel() // entries)
    return max(1, most)


def summing_pays(inputs: Tensor, outputs: Tensor, window: Window) -> bool:
    """Whether the kernel fits, and pays: by shapes that were measured on an H200."""
    if inputs.device.type != compiler.DEVICE or inputs.dim() != 4 or not 0 < len(inputs) < 2**31:
        return False
    if {inputs.dtype, outputs.dtype} != {torch.float32} or max(window.dilations) > 1:
        return False
    channels, height = inputs.shape[1], outputs.shape[1]
    most = _MANY_OUTPUTS if channels >= _MANY_INPUTS else _FEW_OUTPUTS
    return (
        window.sizes[1] <= _MOST_ENTRIES_IN_A_ROW
        and height % _OUTPUTS == 0
        and height <= most
        and 0 < prod(outputs.shape[2:]) <= _MOST_PLACES
        and _channels_together(inputs, outputs, window) * window.sizes[0] >= _LEAST_ROWS
    )


def _channels_together(inputs: Tensor, outputs: Tensor, window: Window) -> int:
    """Input channels of one block: as many as fit, in equal parts; 0 where one is too large."""
    channels, side = inputs.shape[1], prod(inputs.shape[2:])
    slopes = _SLOPES_APART * prod(outputs.shape[2:])
    for together in (channels // parts for parts in range(1, channels + 1) if not channels % parts):
        shared = 4 * (together * (side | 1) + slopes)
        if together * window.sizes[0] <= _MOST_ROWS and shared <= _MOST_SHARED:
            return together
    return 0
