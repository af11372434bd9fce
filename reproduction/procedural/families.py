"""The seven families of procedural images, each a function of chance, a count and a size."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from reproduction.procedural.drawing import (
    Frame,
    Random,
    blur,
    cast_shadow,
    cut_textures,
    finish,
    paint_shape,
    plain_frame,
    random_frame,
    random_ground,
    random_palette,
    random_shape,
)

# Images that share the weights of an untrained network.
_SAME_WEIGHTS = 16


def leaves(random: Random, n: int, size: int, textures: Tensor, layers: int = 44) -> Tensor:
    """Shapes over shapes, from large to small, in [0, 1]."""
    frame = random_frame(random, n, size, warp=0.25, tile=0.15, fold=0.1)
    canvas = random_ground(random, n, size, textures, plain=0.6, dark=0.1)
    palette = random_palette(random, n, 6)
    largest = random.log_uniform(n, low=0.4, high=1.0)
    ratio = random.log_uniform(n, low=0.06, high=0.3)
    density = random.uniform(n, 1, 1, low=0.3, high=1.0)
    everyone = torch.arange(n, device=random.device)
    for layer in range(layers):
        share = (layer + random.uniform(n)) / layers
        radius = largest * ratio**share
        centre = random.uniform(n, 2, low=-1.15, high=1.15)
        shape = random_shape(random, frame, centre, radius, blobs=0.35)
        present = (random.uniform(n, 1, 1) < density).float()
        colour = palette[everyone, random.integers(n, low=0, high=6)]
        colour = (colour + 0.12 * random.normal(n, 3)).clamp(0, 1)
        if layer % 4 == 3:
            canvas = cast_shadow(random, canvas, shape, present)
        texture = cut_textures(random, textures, n) if layer % 3 == 0 else None
        canvas = paint_shape(random, canvas, shape, colour, present, texture)
        if layer == layers // 3:
            # What is far away is out of focus.
            canvas = torch.lerp(canvas, blur(canvas, 4), random.chance(0.35, n, 1, 1, 1))
    return finish(random, canvas)


def objects(random: Random, n: int, size: int, textures: Tensor, parts: int = 9) -> Tensor:
    """One thing made of a few shapes, mostly symmetric, on a ground, in [0, 1]."""
    canvas = random_ground(random, n, size, textures, plain=0.55, dark=0.35)
    # The axis of symmetry is upright in most images.
    lean = torch.where(
        random.chance(0.6, n, 1, 1) > 0,
        0.15 * random.normal(n, 1, 1),
        random.uniform(n, 1, 1, high=7),
    )
    frame = plain_frame(random, n, size).rotated(lean)
    zoom = random.uniform(n, 1, 1, low=0.7, high=1.4)
    bend = 0.2 * random.uniform(n, 1, 1) * random.chance(0.5, n, 1, 1)
    x = (frame.x + 0.2 * random.normal(n, 1, 1)) * zoom
    y = (frame.y + 0.2 * random.normal(n, 1, 1)) * zoom
    x = x + bend * torch.sin(3 * y + random.uniform(n, 1, 1, high=7))
    symmetric = random.chance(0.75, n, 1, 1) > 0
    frame = Frame(torch.where(symmetric, x.abs(), x), y)
    palette = random_palette(random, n, 3)
    everyone = torch.arange(n, device=random.device)
    wanted = random.integers(n, 1, 1, low=1, high=parts + 1)
    textured = random.chance(0.5, n, 1, 1, 1)
    for part in range(parts):
        # The body first, then smaller parts anywhere around it.
        body = part < 2
        low, high = (0.3, 0.7) if body else (0.08, 0.4)
        radius = random.log_uniform(n, low=low, high=high)
        centre = random.normal(n, 2) * (0.12 if body else 0.4)
        shape = random_shape(random, frame, centre, radius, blobs=0.3)
        present = (part < wanted).float()
        colour = palette[everyone, random.integers(n, low=0, high=3)]
        colour = (colour + 0.06 * random.normal(n, 3)).clamp(0, 1)
        if body:
            canvas = cast_shadow(random, canvas, shape, present)
        texture = None
        if part % 3 == 0:
            plain = colour[:, :, None, None].expand(n, 3, size, size)
            texture = torch.lerp(plain, cut_textures(random, textures, n), textured)
        canvas = paint_shape(random, canvas, shape, colour, present, texture)
    return finish(random, canvas)


def networks(random: Random, n: int, size: int, width: int = 24) -> Tensor:
    """Outputs of untrained upsampling networks, with new weights every few images, in [0, 1]."""
    start = max(3, size // 8)
    groups = -(-n // _SAME_WEIGHTS)
    rows = groups * width
    values = random.normal(_SAME_WEIGHTS, rows, start, start)
    for level in range(4):
        if level:
            mode = "nearest" if level == 1 else "bilinear"
            values = F.interpolate(values, scale_factor=2, mode=mode)
            # Detail is injected before the filters, which give it a direction.
            grain = random.uniform(1, rows, 1, 1) ** 2 * random.uniform(
                _SAME_WEIGHTS, 1, 1, 1, high=1.5
            )
            values = values + grain * random.normal(*values.shape)
        filters = _oriented_filters(random, rows)
        values = F.conv2d(F.pad(values, (2, 2, 2, 2), mode="reflect"), filters, groups=rows)
        mix = random.normal(rows, width, 1, 1) * random.chance(0.2, rows, width, 1, 1)
        values = F.conv2d(values, mix, groups=groups)
        values = values / (values.std((2, 3), keepdim=True) + 1e-3)
        # Every image has its own strength of every channel.
        strength = (0.8 * random.normal(_SAME_WEIGHTS, rows, 1, 1)).exp()
        values = F.leaky_relu(values + 0.7 * random.normal(1, rows, 1, 1), 0.1) * strength
    # Some channels saturate: flat areas with sharp borders.
    gain = random.log_uniform(1, rows, 1, 1, low=0.3, high=6.0)
    values = torch.tanh(gain * (values - values.mean((2, 3), keepdim=True)))
    colours = random.normal(groups * 3, width, 1, 1) * random.chance(0.25, groups * 3, width, 1, 1)
    images = F.conv2d(values, colours, groups=groups)
    images = images.reshape(_SAME_WEIGHTS * groups, 3, *images.shape[-2:])
    images = images[random.permutation(len(images))[:n]]
    if images.shape[-1] != size:
        images = F.interpolate(images, (size, size), mode="bilinear", align_corners=False)
    return _expose(random, images)


def _oriented_filters(random: Random, count: int, size: int = 5) -> Tensor:
    """Filters with a direction: Gaussians, edges and bars, (count, 1, size, size)."""
    line = torch.arange(size, device=random.device, dtype=torch.float32) - size // 2
    y, x = line[:, None], line[None, :]
    angle = random.uniform(count, 1, 1, high=2 * math.pi)
    along, across = x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()
    long = random.uniform(count, 1, 1, low=0.8, high=2.5)
    short = random.uniform(count, 1, 1, low=0.5, high=1.2)
    envelope = torch.exp(-0.5 * ((along / long) ** 2 + (across / short) ** 2))
    rate = random.uniform(count, 1, 1, low=0.0, high=1.6)
    wave = torch.cos(rate * across + random.uniform(count, 1, 1, high=2 * math.pi))
    filters = envelope * wave + 0.05 * random.normal(count, size, size)
    return (filters / filters.square().sum((1, 2), keepdim=True).sqrt())[:, None]


def _expose(random: Random, images: Tensor) -> Tensor:
    """Bring images of any range into [0, 1], with random contrast and saturation."""
    n = len(images)
    images = images - images.mean((2, 3), keepdim=True)
    images = images / (images.std((1, 2, 3), keepdim=True) + 1e-4)
    grey = images.mean(1, keepdim=True)
    images = grey + (images - grey) * random.uniform(n, 1, 1, 1, high=1.2)
    contrast = random.uniform(n, 1, 1, 1, low=0.08, high=0.32)
    colour = random_palette(random, n, 1).reshape(n, 3, 1, 1)
    return (0.25 + 0.5 * colour + contrast * images).clamp(0, 1)


def patterns(random: Random, n: int, size: int, width: int = 16, layers: int = 3) -> Tensor:
    """Random functions of the coordinates, in [0, 1]."""
    frame = random_frame(random, n, size, warp=0.4, tile=0.25, fold=0.3)
    x, y = frame.x.flatten(1), frame.y.flatten(1)
    scale = random.log_uniform(n, 1, low=0.3, high=2.0)
    x, y = x * scale, y * scale
    values = torch.stack([x, y, torch.hypot(x, y), torch.sin(2 * x), torch.sin(2 * y), x * y], 1)
    for _ in range(layers):
        weight = random.normal(n, width, values.shape[1]) * 1.2 / values.shape[1] ** 0.5
        weight = weight * random.chance(0.6, n, width, values.shape[1])
        gain = random.log_uniform(n, width, 1, low=0.4, high=2.2)
        values = gain * torch.baddbmm(random.normal(n, width, 1), weight, values)
        values = _activations(values)
    colours = random.normal(n, 3, width) * random.chance(0.4, n, 3, width)
    images = torch.bmm(colours, values).reshape(n, 3, size, size)
    return finish(random, _expose(random, images), grain=0.3)


def _activations(values: Tensor) -> Tensor:
    """A different function for each sixth of the units."""
    sine, wave, bump, kink, step, ramp = values.tensor_split(6, dim=1)
    return torch.cat(
        [
            torch.sin(2 * sine),
            (wave - wave.round()).abs() * 4 - 1,
            2 * torch.exp(-(bump**2)) - 1,
            kink.abs().sqrt() - 0.7,
            torch.tanh(4 * step),
            torch.sin(ramp) * torch.cos(1.7 * ramp),
        ],
        dim=1,
    )


def noise(random: Random, n: int, size: int) -> Tensor:
    """Coloured noise with random spectra, plain, folded, banded or thresholded, in [0, 1]."""
    spectrum = torch.fft.rfft2(random.normal(n, 3, size, size))
    fy = torch.fft.fftfreq(size, device=random.device)[:, None]
    fx = torch.fft.rfftfreq(size, device=random.device)[None, :]
    angle = random.uniform(n, 1, 1, high=math.pi)
    along, across = fx * angle.cos() + fy * angle.sin(), fy * angle.cos() - fx * angle.sin()
    stretch = random.log_uniform(n, 1, 1, low=1.0, high=6.0)
    frequency = torch.sqrt((along * stretch) ** 2 + (across / stretch) ** 2) + 0.5 / size
    slope = random.uniform(n, 1, 1, low=0.4, high=2.6)
    band = torch.exp(-((frequency.log() - random.uniform(n, 1, 1, low=-3, high=-1)) ** 2) * 3)
    amplitude = frequency**-slope * torch.where(random.chance(0.25, n, 1, 1) > 0, band, 1.0)
    fields = torch.fft.irfft2(spectrum * amplitude[:, None], s=(size, size))
    fields = fields / (fields.std((2, 3), keepdim=True) + 1e-4)
    kind = random.uniform(n, 1, 1, 1)
    folded = fields.abs()
    banded = torch.sin(random.uniform(n, 1, 1, 1, low=1.5, high=5) * fields)
    split = torch.tanh(8 * fields)
    fields = torch.where(kind < 0.2, folded, fields)
    fields = torch.where((kind >= 0.2) & (kind < 0.35), banded, fields)
    fields = torch.where((kind >= 0.35) & (kind < 0.5), split, fields)
    mix = random.normal(n, 3, 3) * random.uniform(n, 1, 1) + random.normal(n, 1, 3)
    images = torch.einsum("nchw,nkc->nkhw", fields, mix)
    return _expose(random, images)


def strokes(random: Random, n: int, size: int, textures: Tensor) -> Tensor:
    """One sign per image: one to four curves, most of them connected, in [0, 1]."""
    curves = 4
    points = random.normal(n, curves, 4, 2) * random.uniform(n, 1, 1, 1, low=0.25, high=0.6)
    connected = random.chance(0.65, n, curves, 1) > 0
    for curve in range(1, curves):
        start = torch.where(connected[:, curve], points[:, curve - 1, 3], points[:, curve, 0])
        points[:, curve, 0] = start
    straight = random.chance(0.3, n, curves, 1, 1) > 0
    third = torch.tensor([0, 1 / 3, 2 / 3, 1], device=random.device)[:, None]
    line = torch.lerp(points[:, :, :1], points[:, :, 3:], third)
    points = torch.where(straight, line, points)
    used = random.integers(n, 1, low=1, high=curves + 1) > torch.arange(
        curves, device=random.device
    )
    width = random.log_uniform(n, 1, low=0.04, high=0.16).expand(n, curves)
    ink = _draw(random, points, used, width, size, samples=20)
    ground = random_ground(random, n, size, textures, plain=0.85, dark=0.5)
    return _ink(random, ground, ink)


def glyphs(random: Random, n: int, size: int, textures: Tensor) -> Tensor:
    """Rows of small signs, in [0, 1]."""
    signs, curves = 10, 2
    points = random.normal(n, signs, curves, 4, 2) * 0.45
    upright = random.chance(0.5, n, signs, curves, 1, 1) > 0
    third = torch.tensor([0, 1 / 3, 2 / 3, 1], device=random.device)[:, None]
    line = torch.lerp(points[..., :1, :], points[..., 3:, :], third)
    points = torch.where(upright, line, points).clamp(-1, 1)
    # Two rows of five signs, at a random size, turned a little.
    place = torch.arange(signs, device=random.device)
    columns, rows = (place % 5) - 2.0, (place // 5) - 0.5
    pitch = random.uniform(n, 1, low=0.35, high=0.8)
    x = columns * pitch + 0.3 * random.normal(n, 1)
    y = rows * pitch * random.uniform(n, 1, low=1.1, high=1.6) + 0.3 * random.normal(n, 1)
    centre = torch.stack([x, y], -1)[:, :, None, None]
    points = centre + points * (pitch * 0.42)[:, :, None, None, None]
    angle = 0.2 * random.normal(n, 1, 1, 1)
    px, py = points[..., 0], points[..., 1]
    points = torch.stack(
        [px * angle.cos() - py * angle.sin(), px * angle.sin() + py * angle.cos()], -1
    )
    used = random.uniform(n, signs, curves) < torch.tensor([0.9, 0.7], device=random.device)
    width = (random.uniform(n, 1, low=0.07, high=0.18) * pitch).expand(n, signs * curves)
    ink = _draw(random, points.flatten(1, 2), used.flatten(1), width, size, samples=9)
    ground = random_ground(random, n, size, textures, plain=0.7, dark=0.25)
    return _ink(random, ground, ink)


def _draw(
    random: Random, points: Tensor, used: Tensor, width: Tensor, size: int, samples: int
) -> Tensor:
    """Draw cubic curves (n, curves, 4, 2) with a round pen: cover of the ink, (n, size, size)."""
    n, curves = points.shape[:2]
    frame = plain_frame(random, 1, size)
    place = torch.stack([frame.x[0], frame.y[0]], -1).reshape(1, -1, 2)
    t = torch.linspace(0, 1, samples, device=random.device)
    basis = torch.stack([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3], 1)
    path = torch.einsum("sk,nckd->ncsd", basis, points)
    ink = torch.zeros(n, size * size, device=random.device)
    soft = 1.0 / size
    for curve in range(curves):
        start, end = path[:, curve, :-1], path[:, curve, 1:]
        # Distance to the nearest segment of the curve.
        along = end - start
        offset = place[:, :, None] - start[:, None]
        t = (offset * along[:, None]).sum(-1) / (along.square().sum(-1)[:, None] + 1e-9)
        nearest = offset - t.clamp(0, 1)[..., None] * along[:, None]
        distance = nearest.square().sum(-1).amin(-1).sqrt()
        cover = torch.sigmoid((width[:, curve, None] / 2 - distance) / soft * 2)
        ink = torch.maximum(ink, cover * used[:, curve, None])
    return ink.reshape(n, size, size)


def _ink(random: Random, ground: Tensor, ink: Tensor) -> Tensor:
    n = len(ground)
    colour = random_palette(random, n, 1).reshape(n, 3, 1, 1)
    # Bright ink on dark grounds and dark ink on bright ones, most of the time.
    bright = (ground.mean((1, 2, 3), keepdim=True) < 0.5).float()
    clear = 0.15 * colour + 0.85 * bright
    colour = torch.where(random.chance(0.75, n, 1, 1, 1) > 0, clear, colour)
    images = torch.lerp(ground, colour, ink[:, None])
    grey = images.mean(1, keepdim=True).expand_as(images)
    images = torch.where(random.chance(0.5, n, 1, 1, 1) > 0, grey, images)
    return finish(random, images, grain=0.2)
