"""Procedural images: a corpus made of arithmetic and a seed, without any collected picture.

    images = generate(10_000, seed=0, device="cuda")     # uint8, (10000, 3, 48, 48)

Seven families, mixed in fixed shares:

- `leaves`    shapes painted over each other from large to small ("dead leaves"), with gratings,
              textures taken from the other families, shading, shadows and a blurred background;
- `objects`   a few shapes around the centre, mostly symmetric, on a plain or textured ground;
- `networks`  the output of untrained upsampling networks with random oriented filters;
- `patterns`  random functions of the coordinates (small networks with periodic, round and kinked
              activations);
- `noise`     coloured noise with random anisotropic spectra, also folded, banded or thresholded;
- `strokes`   one to four connected curves drawn with a round pen, as in a handwritten sign;
- `glyphs`    a row or two of small signs made of short strokes, as in a line of text.

`leaves`, `objects`, `patterns` and the strokes are drawn in the coordinates of a `Frame`, which are
rotated, scaled and, in some images, warped, tiled or folded into symmetric copies.

The images depend on the seed, the count, the size, the shares and the kind of device: the CPU and
CUDA have different random number generators. `CORPUS_VERSION` changes whenever the images do.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from dpsur.errors import InvalidInputError
from reproduction.procedural.drawing import Random, to_channels
from reproduction.procedural.families import (
    glyphs,
    leaves,
    networks,
    noise,
    objects,
    patterns,
    strokes,
)

CORPUS_VERSION = 1

#: The share of each family. They need not add up to 1.
SHARES: Mapping[str, float] = {
    "leaves": 0.34,
    "objects": 0.14,
    "networks": 0.22,
    "patterns": 0.09,
    "noise": 0.06,
    "strokes": 0.10,
    "glyphs": 0.05,
}

# Images made at once, unless fewer are wanted. Part of the corpus: another value, other images.
_CHUNK = 8192


def generate(
    count: int,
    *,
    seed: int = 0,
    size: int = 48,
    channels: int = 3,
    shares: Mapping[str, float] = SHARES,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Make `count` images: uint8 of shape (count, channels, size, size), in random order.

    With one channel the images are the luminance of the colour images. With any other number of
    channels than three, the colours are mixed into that many channels at random.
    """
    if count < 1:
        raise InvalidInputError(f"count must be at least 1, got {count}")
    images = torch.empty((count, channels, size, size), dtype=torch.uint8, device=device)
    made = 0
    for chunk in chunks(
        min(count, _CHUNK), seed=seed, size=size, channels=channels, shares=shares, device=device
    ):
        part = chunk[: count - made]
        images[made : made + len(part)] = part
        made += len(part)
        if made == count:
            break
    return images


def chunks(
    count: int,
    *,
    seed: int = 0,
    size: int = 48,
    channels: int = 3,
    shares: Mapping[str, float] = SHARES,
    device: torch.device | str = "cpu",
) -> Iterator[Tensor]:
    """Yield chunks of about `count` images (uint8) without end, in each the same shares."""
    if size < 16:
        raise InvalidInputError(
            f"size must be at least 16 pixels, got {size}; make larger images and resize"
        )
    if channels < 1:
        raise InvalidInputError(f"channels must be at least 1, got {channels}")
    unknown = set(shares) - set(SHARES)
    if unknown:
        raise InvalidInputError(
            f"unknown family {sorted(unknown)[0]!r}; choose from {', '.join(SHARES)}"
        )
    number = 0
    while True:
        random = Random(seed, number, torch.device(device))
        with torch.no_grad():
            images = _chunk(random, count, size, shares)
            images = images[random.permutation(len(images))]
            images = to_channels(random, images, channels)
            yield (images * 255).round().clamp(0, 255).to(torch.uint8)
        number += 1


def _chunk(random: Random, count: int, size: int, shares: Mapping[str, float]) -> Tensor:
    """Make one chunk, family after family, in [0, 1]."""
    total = sum(shares.values())
    # Rounded up, so that a chunk is never smaller than asked for.
    counts = {name: math.ceil(count * share / total) for name, share in shares.items()}
    made: dict[str, Tensor] = {}
    for name, family in (("networks", networks), ("patterns", patterns), ("noise", noise)):
        if counts.get(name):
            made[name] = family(random, counts[name], size)
    # Shapes are filled with cut-outs of these images.
    textures = torch.cat(list(made.values())) if made else noise(random, 64, size)
    for name, painted in (("leaves", leaves), ("objects", objects)):
        if counts.get(name):
            made[name] = painted(random, counts[name], size, textures)
    for name, drawn in (("strokes", strokes), ("glyphs", glyphs)):
        if counts.get(name):
            made[name] = drawn(random, counts[name], size, textures)
    return torch.cat(list(made.values()))
