"""What the families of procedural images are drawn with: chance, coordinates, colours, shapes."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


class Random:
    """Random numbers of one chunk, from one generator."""

    def __init__(self, seed: int, number: int, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device)
        self.generator.manual_seed((seed * 1_000_003 + number) % (1 << 62))

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Uniform numbers in [low, high)."""
        numbers = torch.rand(shape, generator=self.generator, device=self.device)
        return numbers * (high - low) + low

    def log_uniform(self, *shape: int, low: float, high: float) -> Tensor:
        """Numbers whose logarithm is uniform."""
        return self.uniform(*shape, low=math.log(low), high=math.log(high)).exp()

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self.generator, device=self.device)

    def chance(self, probability: float, *shape: int) -> Tensor:
        """Ones with this probability, else zeros (float)."""
        return (self.uniform(*shape) < probability).float()

    def integers(self, *shape: int, low: int, high: int) -> Tensor:
        """Integers in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    def permutation(self, count: int) -> Tensor:
        """A random order."""
        return torch.randperm(count, generator=self.generator, device=self.device)


# Coordinates, colours, lighting


@dataclass(frozen=True)
class Frame:
    """Coordinates of every pixel of every image, (n, size, size), about -1 to 1."""

    x: Tensor
    y: Tensor

    def rotated(self, angle: Tensor) -> "Frame":
        """Turn by an angle per image."""
        cosine, sine = angle.cos(), angle.sin()
        return Frame(cosine * self.x + sine * self.y, cosine * self.y - sine * self.x)


def plain_frame(random: Random, n: int, size: int) -> Frame:
    """Coordinates without any distortion."""
    line = (torch.arange(size, device=random.device, dtype=torch.float32) + 0.5) * (2 / size) - 1
    return Frame(line.expand(n, size, size), line[:, None].expand(n, size, size))


def random_frame(random: Random, n: int, size: int, warp: float, tile: float, fold: float) -> Frame:
    """Random coordinates; `warp`, `tile`, `fold` are the shares of images these happen to."""
    frame = plain_frame(random, n, size).rotated(random.uniform(n, 1, 1, high=2 * math.pi))
    x, y = frame.x, frame.y
    # Perspective: one side is farther away.
    depth = 1 + 0.5 * random.uniform(n, 1, 1) * random.chance(0.3, n, 1, 1) * x
    x, y = x / depth, y / depth
    # Smooth displacement.
    bend = 0.25 * random.uniform(n, 1, 1) * random.chance(warp, n, 1, 1)
    for _ in range(2):
        rate = random.uniform(n, 1, 1, low=1.0, high=6.0)
        phase = random.uniform(n, 1, 1, high=2 * math.pi)
        x, y = x + bend * torch.sin(rate * y + phase), y + bend * torch.sin(rate * x - phase)
    # Copies on a grid, every second one mirrored in half of the images.
    period = random.log_uniform(n, 1, 1, low=0.35, high=1.2)
    tiled, mirrored = random.chance(tile, n, 1, 1) > 0, random.chance(0.5, n, 1, 1) > 0
    x, y = (torch.where(tiled, _tile(axis, period, mirrored), axis) for axis in (x, y))
    # Symmetry: mirrored at one line, or copies around the centre.
    folded = random.chance(fold, n, 1, 1) > 0
    around = random.chance(0.3, n, 1, 1) > 0
    turns = random.integers(n, 1, 1, low=3, high=9).float()
    wedge = 2 * math.pi / turns
    radius, angle = torch.hypot(x, y), torch.atan2(y, x)
    angle = ((angle / wedge) - (angle / wedge).round()).abs() * wedge
    x = torch.where(folded, torch.where(around, radius * angle.cos(), x.abs()), x)
    y = torch.where(folded & around, radius * angle.sin(), y)
    return Frame(x, y)


def _tile(axis: Tensor, period: Tensor, mirrored: Tensor) -> Tensor:
    place = axis / period
    copies = (place - place.round()) * 2
    triangle = (((place / 2 - (place / 2).round()).abs()) * 4) - 1
    return torch.where(mirrored, triangle, copies)


def random_palette(random: Random, n: int, colours: int) -> Tensor:
    """Colours of one image, (n, colours, 3): like each other, with little or much saturation."""
    grey = random.uniform(n, colours, 1)
    spread = random.uniform(n, 1, 1) ** 2 * random.chance(0.85, n, 1, 1)
    own = random.uniform(n, colours, 3) - 0.5
    shared = random.uniform(n, 1, 3) - 0.5
    mix = random.uniform(n, 1, 1)
    return (grey + 1.6 * spread * (mix * own + (1 - mix) * shared)).clamp(0, 1)


def _each(values: Tensor) -> Tensor:
    """One number per image: (n,) becomes (n, 1, 1)."""
    return values[:, None, None]


def _grating(random: Random, frame: Frame, n: int) -> Tensor:
    """Stripes, checks and squared-off stripes: (n, size, size) in [-1, 1]."""
    turned = frame.rotated(random.uniform(n, 1, 1, high=math.pi))
    rate = random.log_uniform(n, 1, 1, low=6, high=45)
    phase = random.uniform(n, 1, 1, high=2 * math.pi)
    wave = torch.sin(turned.x * rate + phase)
    across = torch.sin(turned.y * rate * random.uniform(n, 1, 1, low=0.5, high=1.5))
    wave = torch.where(random.chance(0.3, n, 1, 1) > 0, wave * across, wave)
    hard = (wave * random.uniform(n, 1, 1, low=3, high=9)).tanh()
    return torch.where(random.chance(0.4, n, 1, 1) > 0, hard, wave)


def _light(random: Random, n: int, size: int, share: float) -> Tensor:
    """A change of brightness across the image, (n, 1, size, size), around 1."""
    frame = plain_frame(random, n, size).rotated(random.uniform(n, 1, 1, high=2 * math.pi))
    slope = 0.6 * random.uniform(n, 1, 1) * random.chance(share, n, 1, 1)
    spot = random.uniform(n, 1, 1, low=-1) * random.chance(share / 2, n, 1, 1)
    glow = torch.exp(-2 * ((frame.x - 0.4) ** 2 + frame.y**2)) - 0.5
    return (1 + slope * frame.x + 0.5 * spot * glow)[:, None]


def blur(images: Tensor, passes: int) -> Tensor:
    """Average over 3 x 3 pixels, several times."""
    kernel = images.new_tensor([0.25, 0.5, 0.25])
    weight = (kernel[:, None] * kernel).expand(images.shape[1], 1, 3, 3)
    for _ in range(passes):
        images = F.conv2d(
            F.pad(images, (1, 1, 1, 1), mode="replicate"), weight, groups=images.shape[1]
        )
    return images


def finish(random: Random, images: Tensor, soft: float = 0.25, grain: float = 0.4) -> Tensor:
    """What a camera adds: light, exposure, contrast, a little blur, a little grain."""
    n, _, size, _ = images.shape
    images = images * _light(random, n, size, 0.4)
    blurred = blur(images, 1)
    images = torch.lerp(images, blurred, random.chance(soft, n, 1, 1, 1))
    strength = 0.05 * random.uniform(n, 1, 1, 1) ** 2 * random.chance(grain, n, 1, 1, 1)
    images = images + strength * random.normal(*images.shape)
    gamma = random.log_uniform(n, 1, 1, 1, low=0.6, high=1.6)
    return images.clamp(0, 1).pow(gamma)


def to_channels(random: Random, images: Tensor, channels: int) -> Tensor:
    """Colours to luminance, or to a random mixture of any other number of channels."""
    if channels == 3:
        return images
    if channels == 1:
        return (images * images.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(
            1, keepdim=True
        )
    mix = random.uniform(channels, 3)
    return torch.einsum("nchw,kc->nkhw", images, mix / mix.sum(1, keepdim=True))


# Shapes


@dataclass(frozen=True)
class Shape:
    """One shape per image: where it lies (0 to 1), and its own coordinates."""

    cover: Tensor
    radius: Tensor
    own: Frame


def random_shape(
    random: Random, frame: Frame, centre: Tensor, radius: Tensor, blobs: float
) -> Shape:
    """An ellipse, rectangle, diamond, polygon, star or blob per image, with soft edges."""
    n, size = len(centre), frame.x.shape[-1]
    aspect = random.log_uniform(n, 1, 1, low=0.4, high=2.5)
    moved = Frame(frame.x - _each(centre[:, 0]), frame.y - _each(centre[:, 1]))
    turned = moved.rotated(random.uniform(n, 1, 1, high=2 * math.pi))
    u, v = turned.x / (_each(radius) * aspect.sqrt()), turned.y * aspect.sqrt() / _each(radius)
    power = torch.where(
        random.chance(0.5, n, 1, 1) > 0, 2.0, random.log_uniform(n, 1, 1, low=1.0, high=12.0)
    )
    rounded = (u.abs().clamp(1e-4, 50) ** power + v.abs().clamp(1e-4, 50) ** power) ** (1 / power)
    angle = torch.atan2(v, u)
    corners = random.integers(n, 1, 1, low=3, high=7).float()
    step = 2 * math.pi / corners
    polygon = (
        torch.hypot(u, v) * torch.cos(angle - step * (angle / step).round()) / torch.cos(step / 2)
    )
    wobble = 1 + sum(
        0.35
        * random.uniform(n, 1, 1) ** 2
        * torch.cos(
            random.integers(n, 1, 1, low=2, high=9) * angle + random.uniform(n, 1, 1, high=7)
        )
        for _ in range(2)
    )
    kind = random.uniform(n, 1, 1)
    distance = torch.where(kind < 0.25, polygon, rounded)
    distance = torch.where(kind > 1 - blobs, rounded / wobble, distance)
    # Edges about a pixel wide, in some shapes much softer.
    edge = (2 / size) * torch.where(
        random.chance(0.15, n, 1, 1) > 0, random.uniform(n, 1, 1, low=1, high=6), 0.6
    )
    cover = torch.sigmoid((1 - distance) * _each(radius) / edge * 1.5)
    return Shape(cover, distance, Frame(u, v))


def paint_shape(
    random: Random,
    canvas: Tensor,
    shape: Shape,
    colour: Tensor,
    present: Tensor,
    texture: Tensor | None,
) -> Tensor:
    """Put one textured and lit shape over the canvas."""
    n = len(canvas)
    paint = colour[:, :, None, None]
    if texture is not None:
        # The texture keeps its own colours or takes that of the shape.
        tinted = paint * (0.4 + 1.2 * texture.mean(1, keepdim=True))
        choice = random.uniform(n, 1, 1, 1)
        paint = torch.where(choice < 0.35, texture, torch.where(choice < 0.75, tinted, paint))
    else:
        depth = 0.6 * random.uniform(n, 1, 1) * random.chance(0.5, n, 1, 1)
        paint = paint * (1 + depth * _grating(random, shape.own, n))[:, None]
    # Flat, shaded across, or round like a ball lit from one side.
    angle = random.uniform(n, 1, 1, high=2 * math.pi)
    across = angle.cos() * shape.own.x + angle.sin() * shape.own.y
    height = (1 - shape.radius.clamp(0, 1) ** 2).sqrt()
    ball = (0.35 + 0.55 * height - 0.4 * across).clamp(0.1, 1.4)
    slope = 1 + 0.4 * random.uniform(n, 1, 1) * across.clamp(-1.5, 1.5)
    kind = random.uniform(n, 1, 1)
    light = torch.where(kind < 0.25, ball, torch.where(kind < 0.6, slope, 1.0))
    cover = (shape.cover * present)[:, None]
    return torch.lerp(canvas, (paint * light[:, None]).clamp(0, 1), cover)


def cast_shadow(random: Random, canvas: Tensor, shape: Shape, present: Tensor) -> Tensor:
    """Darken what lies behind a shape, to one side of it."""
    n, size = len(canvas), canvas.shape[-1]
    shift = round(size * 0.05) + 1
    strength = 0.7 * random.uniform(n, 1, 1) * random.chance(0.6, n, 1, 1) * present
    cover = torch.roll(F.avg_pool2d(shape.cover[:, None], 5, 1, 2), (shift, shift // 2), (2, 3))
    return canvas * (1 - strength[:, None] * cover)


def cut_textures(random: Random, textures: Tensor, n: int) -> Tensor:
    """Random textures, mirrored at random."""
    picked = textures[random.integers(n, low=0, high=len(textures))]
    turned = torch.where(random.chance(0.5, n, 1, 1, 1) > 0, picked.flip(-1), picked)
    return torch.where(random.chance(0.5, n, 1, 1, 1) > 0, turned.transpose(-1, -2), turned)


def random_ground(
    random: Random, n: int, size: int, textures: Tensor, plain: float, dark: float
) -> Tensor:
    """Grounds: plain, graded or textured; a share of the plain ones is black or nearly so."""
    colours = random_palette(random, n, 2)
    grade = (random.uniform(n, 1) * random.chance(0.5, n, 1))[:, :, None, None]
    frame = plain_frame(random, n, size).rotated(random.uniform(n, 1, 1, high=2 * math.pi))
    mix = (0.5 + 0.5 * frame.x).clamp(0, 1)[:, None] * grade
    flat = torch.lerp(colours[:, 0, :, None, None], colours[:, 1, :, None, None], mix)
    black = random.chance(dark, n, 1, 1, 1) * 0.97
    flat = flat * (1 - black)
    picture = torch.lerp(
        cut_textures(random, textures, n), flat, random.uniform(n, 1, 1, 1, high=0.7)
    )
    soft = random.chance(0.5, n, 1, 1, 1) > 0
    picture = torch.where(soft, blur(picture, 3), picture)
    return torch.where(random.chance(plain, n, 1, 1, 1) > 0, flat, picture)
