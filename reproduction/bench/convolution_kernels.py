"""Time the kernels that a convolution can be built of, layer by layer.

    python -m reproduction.bench.convolution_kernels

The choices in `dpsur.per_example.rules.convolution`, and the costs beside it, come from this
table. Every figure is microseconds of a captured call on one GPU, for a whole batch. Without a
GPU the ways are only compared with each other, on a few examples.
"""

import sys
from collections.abc import Callable
from functools import partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from dpsur.mechanism.cuda_graphs import capture_graph
from dpsur.per_example.contributions import Factors
from dpsur.per_example.kernels.cuda_weight_grad import summed_gradient
from dpsur.per_example.rules.convolution import Geometry, _input_gradient, from_patches
from dpsur.per_example.rules.patches import Window, inner_products, instantiate, patches

# name, batch, channels, side, output channels, stride, padding, kernel: the paper's networks
LAYERS = (
    ("scattering-28 1", 4096, 81, 7, 16, 2, 1, 3),
    ("scattering-28 2", 4096, 16, 4, 32, 1, 1, 3),
    ("pixel-28 1", 1024, 1, 28, 16, 2, 2, 8),
    ("pixel-28 2", 1024, 16, 6, 32, 2, 0, 4),
    ("scattering-cifar 1", 8192, 243, 8, 64, 1, 1, 3),
    ("scattering-cifar 2", 8192, 64, 4, 64, 1, 1, 3),
    ("pixel-cifar 1", 2048, 3, 32, 32, 1, 1, 3),
    ("pixel-cifar 2", 2048, 32, 32, 32, 1, 1, 3),
    ("pixel-cifar 3", 2048, 32, 16, 64, 1, 1, 3),
    ("pixel-cifar 4", 2048, 64, 16, 64, 1, 1, 3),
    ("pixel-cifar 5", 2048, 64, 8, 128, 1, 1, 3),
    ("pixel-cifar 6", 2048, 128, 8, 128, 1, 1, 3),
)
# Examples worked on at once by the ways that copy: so many numbers.
SCRATCH = 2**24
Ways = dict[str, Callable[[], Tensor | None]]


def ways_of(
    inputs: Tensor, weight: Tensor, outputs: Tensor, geometry: Geometry, window: Window
) -> dict[str, Ways]:
    """Every way to the same result, under the name of the result."""
    ones = Factors(torch.ones(len(inputs), device=inputs.device), None)
    tall = weight.contiguous(memory_format=torch.channels_last)
    step = max(1, SCRATCH // (weight[0].numel() * prod(outputs.shape[2:])))
    found: dict[str, Ways] = {
        "forward": {"library": lambda: geometry.apply(inputs, weight, None)},
        "input gradient": {
            "library": lambda: geometry.backward(outputs, inputs, weight, [True, False, False])[0],
            "channels last": lambda: geometry.backward(outputs, inputs, tall, [True, False, False])[
                0
            ],
            "ours": lambda: _input_gradient(outputs, inputs, weight, geometry),
        },
        "weight gradient": {
            "library": lambda: geometry.backward(outputs, inputs, weight, [False, True, False])[1],
            "patches": lambda: from_patches(inputs, outputs, window, ones, finite=True),
            "summed": lambda: summed_gradient(inputs, outputs, window),
            "long patches": lambda: in_pieces_added(long_patches, inputs, outputs, window, step),
        },
        "per-example gradients": {
            "patches": lambda: instantiate(inputs, outputs, window, 1),
        },
    }
    if max(geometry.strides) == 1:
        found["per-example gradients"] |= {
            name: partial(in_pieces, way, inputs, outputs, window, step)
            for name, way in (
                ("shifts", shifts),
                ("offsets", offsets),
                ("offsets inside", inside),
                ("compiled", compiled_patches),
            )
        }
    if prod(outputs.shape[2:]) <= 64:
        places = prod(outputs.shape[2:])
        found["inner products"] = {
            "ours": lambda: inner_products(inputs[:step], window, places),
            "patches": lambda: _direct(inputs[:step], window),
        }
    return found


def _direct(inputs: Tensor, window: Window) -> Tensor:
    seen = patches(window.padded(inputs), window, inside=True)
    return torch.bmm(seen.mT, seen)


def in_pieces(
    way: Callable[..., object], inputs: Tensor, outputs: Tensor, window: Window, step: int
) -> Tensor:
    """Gradients of all examples, some at a time."""
    width = inputs.shape[1] * prod(window.sizes)
    rows = inputs.new_empty(len(inputs), outputs.shape[1], width)
    for start in range(0, len(inputs), step):
        some = slice(start, start + step)
        way(inputs[some], outputs[some], window, rows[some])
    ordered = rows.view(*rows.shape[:2], *window.sizes, inputs.shape[1])
    return ordered.movedim(-1, 2)


def in_pieces_added(
    way: Callable[..., Tensor], inputs: Tensor, outputs: Tensor, window: Window, step: int
) -> Tensor:
    """A sum over all examples, some at a time."""
    total = inputs.new_zeros(outputs.shape[1], inputs.shape[1], *window.sizes)
    for start in range(0, len(inputs), step):
        some = slice(start, start + step)
        total += way(inputs[some], outputs[some], window)
    return total


def long_patches(inputs: Tensor, outputs: Tensor, window: Window) -> Tensor:
    """Patches with examples and positions last, so that channels need not be moved."""
    views = window.padded(inputs)
    for dimension, (size, stride) in enumerate(zip(window.sizes, window.strides, strict=True)):
        views = views.unfold(2 + dimension, size, stride)
    width = inputs.shape[1] * prod(window.sizes)
    seen = views.permute(1, 4, 5, 0, 2, 3).reshape(width, -1)
    flat = outputs.flatten(2).transpose(0, 1).reshape(outputs.shape[1], -1)
    return (flat @ seen.mT).view(outputs.shape[1], inputs.shape[1], *window.sizes)


def _room(inputs: Tensor, outputs: Tensor, window: Window, multiple: int) -> tuple[int, int, int]:
    """Rows and columns of padded inputs, and the reach of the output gradients in them."""
    high, wide = (n + 2 * m for n, m in zip(inputs.shape[2:], window.margins, strict=True))
    wide = -(-wide // multiple) * multiple
    return high, wide, (outputs.shape[2] - 1) * wide + outputs.shape[3]


def _spread(outputs: Tensor, wide: int) -> Tensor:
    """Output gradients in rows as long as those of the padded inputs."""
    return F.pad(outputs, (0, wide - outputs.shape[3])).flatten(2)


def shifts(inputs: Tensor, outputs: Tensor, window: Window, rows: Tensor) -> None:
    """Inputs copied once per column of the kernel; its rows are offsets into the copies."""
    high, wide, reach = _room(inputs, outputs, window, 4)
    (top, left), channels = window.margins, inputs.shape[1]
    columns = window.sizes[1]
    copies = inputs.new_zeros(len(inputs), columns, channels, high, wide)
    for column in range(columns):
        first = left - column
        source = inputs[..., max(0, -first) :]
        place = max(0, first)
        copies[:, column, :, top : top + inputs.shape[2], place : place + source.shape[3]] = source
    flat = copies.view(len(inputs), columns * channels, high * wide)
    spread = _spread(outputs, wide)[:, :, :reach]
    kernel_rows = rows.view(*rows.shape[:2], window.sizes[0], -1)
    for row in range(window.sizes[0]):
        some = flat[:, :, row * wide : row * wide + reach]
        torch.bmm(spread, some.mT, out=kernel_rows[:, :, row])


def offsets(inputs: Tensor, outputs: Tensor, window: Window, rows: Tensor) -> None:
    """No copies at all: every entry of the kernel is an offset into the padded inputs."""
    _, wide, reach = _room(inputs, outputs, window, 1)
    flat = window.padded(inputs).flatten(2)
    spread = _spread(outputs, wide)[:, :, :reach]
    entries = rows.view(*rows.shape[:2], prod(window.sizes), -1)
    for entry in range(prod(window.sizes)):
        offset = entry // window.sizes[1] * wide + entry % window.sizes[1]
        torch.bmm(spread, flat[:, :, offset : offset + reach].mT, out=entries[:, :, entry])


def inside(inputs: Tensor, outputs: Tensor, window: Window, rows: Tensor) -> None:
    """The same with the channels innermost, so that every offset is aligned."""
    _, wide, reach = _room(inputs, outputs, window, 1)
    flat = window.padded(inputs).flatten(2).mT.contiguous()
    spread = _spread(outputs, wide)[:, :, :reach].mT.contiguous()
    entries = rows.view(*rows.shape[:2], prod(window.sizes), -1)
    for entry in range(prod(window.sizes)):
        offset = entry // window.sizes[1] * wide + entry % window.sizes[1]
        torch.bmm(spread.mT, flat[:, offset : offset + reach], out=entries[:, :, entry])


def compiled_patches(inputs: Tensor, outputs: Tensor, window: Window, rows: Tensor) -> None:
    """Patches copied by a kernel that the compiler makes for them."""
    seen = _compiled(window.padded(inputs), window, inside=True)
    torch.bmm(outputs.flatten(2), seen.mT, out=rows)


_compiled = torch.compile(patches, dynamic=False)


def microseconds(way: Callable[[], Tensor | None], device: torch.device, calls: int = 10) -> float:
    """Time of a captured call."""
    replay = capture_graph(lambda: (way(), None)[1], device)
    replay()
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    begin.record()
    for _ in range(calls):
        replay()
    end.record()
    torch.cuda.synchronize(device)
    return float(1e3 * begin.elapsed_time(end) / calls)


def measured(layer: tuple[str, int, int, int, int, int, int, int], device: torch.device) -> None:
    """Print a line for every result of one layer."""
    name, batch, channels, side, height, stride, margin, size = layer
    batch = batch if device.type == "cuda" else 5
    geometry = Geometry((stride,) * 2, (margin,) * 2, (1, 1), 1)
    window = Window((size,) * 2, (stride,) * 2, (1, 1), (margin,) * 2)
    inputs = torch.randn(batch, channels, side, side, device=device)
    weight = torch.randn(height, channels, size, size, device=device)
    outputs = torch.randn_like(geometry.apply(inputs, weight, None))
    for result, ways in ways_of(inputs, weight, outputs, geometry, window).items():
        expected = next(iter(ways.values()))()
        assert expected is not None  # PyTorch's own way is for every shape
        texts = []
        for way, call in ways.items():
            try:
                found = call()
                if found is None:  # a way that is not for this shape or device
                    texts.append(f"{way} none")
                    continue
                gap = float((found - expected).norm() / expected.norm())
                time = f"{microseconds(call, device):8.0f}" if device.type == "cuda" else ""
                texts.append(f"{way} {time}{'' if gap < 1e-4 else f' WRONG BY {gap:.1g}'}")
            except RuntimeError as error:
                texts.append(f"{way} failed ({str(error).splitlines()[0][:60]})")
        print(f"{name:<19} {result:<22} {'   '.join(texts)}", flush=True)


def main() -> None:
    """All layers, or those whose names begin as an argument does."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for layer in LAYERS:
        if len(sys.argv) == 1 or layer[0].startswith(tuple(sys.argv[1:])):
            with torch.no_grad():
                measured(layer, device)


if __name__ == "__main__":
    main()
