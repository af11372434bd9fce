"""A frozen encoder of images, trained on procedural images alone, and its whitening.

    features = Encoder()(images)          # (N, 8192), every row of norm 1

Formal guarantee: the weights and the statistics come from `procedural` images, never from private
records, and the features of an image depend on that image alone. So computing them costs no
privacy.

An image is brought to 32 x 32 pixels and encoded together with its mirror image by each of two
networks. The maps behind the three groups of layers are averaged over a coarse grid of cells. The
averages are standardised, split into scales (the mean of a map, then details), whitened scale by
scale and brought to norm 1. `python -m reproduction encoder` makes the file of weights.

A fixed linear map that evens out the variances of averages over image cells.

Formal guarantee: it is fitted on procedural images, so it contains nothing of private records and
costs no privacy.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from dpsur.errors import FileError, InvalidInputError
from dpsur.features.scattering import Scattering2d


def haar(block: Tensor) -> list[Tensor]:
    """Split (N, channels, cells) into the mean of each map and its details, coarse to fine.

    An orthonormal change of coordinates: 1, 3, 12, ... numbers per channel. The cells form a square
    whose side is a power of 2.
    """
    n, channels, cells = block.shape
    side = math.isqrt(cells)
    values = block.reshape(n, channels, side, side)
    details = []
    while side > 1:
        a, b = values[..., ::2, ::2], values[..., ::2, 1::2]
        c, d = values[..., 1::2, ::2], values[..., 1::2, 1::2]
        details.append(torch.stack([a + b - c - d, a - b + c - d, a - b - c + d], 2).flatten(2) / 2)
        values = (a + b + c + d) / 2
        side //= 2
    return [values.flatten(2), *reversed(details)]


class Whitening(nn.Module):
    """Standardise blocks of (N, channels, cells), split them into scales, whiten every scale.

    The covariance of a scale is taken as a product of one over channels (all blocks together) and
    one over cells. A full covariance would need the square of all features.

    The tensors are `root` (an exponent of the averages), `by_scale` (whether blocks
    are split by `haar`), `mean.i` and `deviation.i` of block i, `channels.i`, `cells.i` and
    `factors.i` of scale i. They are no part of a state dict: a release names their file instead.
    `python -m reproduction encoder` fits those of the encoder.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.root = float(tensors["root"])
        self.by_scale = bool(tensors.get("by_scale", True))
        for name, values in tensors.items():
            if name not in ("root", "by_scale"):
                self.register_buffer(name.replace(".", "_"), values.float(), persistent=False)

    def split(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """Standardise the channels and join the blocks scale by scale."""
        standard = []
        for i, block in enumerate(blocks):
            values = block.float() if self.root == 1 else block.float().clamp(min=0) ** self.root
            mean, deviation = (self.get_buffer(f"{name}_{i}") for name in ("mean", "deviation"))
            if mean.dim() == 1:  # per channel, else per channel and cell
                mean, deviation = mean[:, None], deviation[:, None]
            standard.append((values - mean) / deviation)
        if not self.by_scale:
            return standard
        pyramids = [haar(block) for block in standard]
        depth = max(len(pyramid) for pyramid in pyramids)
        return [torch.cat([p[i] for p in pyramids if len(p) > i], 1) for i in range(depth)]

    def forward(self, blocks: Sequence[Tensor]) -> Tensor:
        """Whitened features of norm 1, (N, dimension)."""
        rows = []
        for i, values in enumerate(self.split(blocks)):
            channels, cells, factors = (
                self.get_buffer(f"{part}_{i}") for part in ("channels", "cells", "factors")
            )
            rows.append((rotate(values, channels, cells) * factors).flatten(1))
        return F.normalize(torch.cat(rows, 1))


def rotate(values: Tensor, rotation: Tensor, turn: Tensor) -> Tensor:
    return torch.einsum("ncs,cd->nds", values, rotation) @ turn


#: Height and width of what the networks see.
SIZE = 32
#: Features of an image of one or three channels, from the shipped encoder.
DIMENSION = 8192
#: The shipped files and their SHA-256. A release records it, and other files are refused.
ENCODER = "encoder.safetensors"
ENCODER_DIGEST = "c2a685c0b7d60a1d137f261d2a49b57733a618dc293dada07cd85c645ba7a2a7"
SCATTERING_WHITENING = "scattering-28x28.safetensors"
SCATTERING_DIGEST = "41459598f73d020b7d549baec99304188df72a604a355b74eb58c55ab2daea17"
#: Channels, height and width of the images that scattering is whitened for.
SCATTERING_SHAPE = (1, 28, 28)
SCATTERING_DIMENSION = 81 * 7 * 7

# Images without a resize keep their pixels sharp: sizes in this range are padded.
_PADDED_FROM = 24
# Pixels in [0, 1] are shifted and scaled by these before the first layer.
CENTRE, SPREAD = 0.5, 0.25
# Of the batch normalisation that the networks were trained with.
_VARIANCE_EPS = 1e-5
# Images that are encoded at once.
_BATCH = 256


class FrozenWideResNet(nn.Module):
    """A trained wide residual network (Zagoruyko and Komodakis, 2016) that returns three maps.

    `depth` is 6 n + 4 layers. The maps follow the ReLU behind each group of layers: for 32 x 32
    pixels they have 32, 16 and 8 pixels per side. Batch normalisation has become a fixed scale and
    shift per channel, so nothing depends on the other images of a batch. The weights are no part of
    a state dict: a release names their file instead.
    """

    def __init__(self, weights: Mapping[str, Tensor], depth: int) -> None:
        super().__init__()
        self._places = [(group, place) for group in range(3) for place in range((depth - 4) // 6)]
        named = {name: values.float() for name, values in weights.items()}
        self._keep("stem", named["stem.weight"])
        for group, place in self._places:
            source, target = f"groups.{group}.{place}.", f"{group}_{place}_"
            self._keep_norm(target + "before", named, source + "norm1.")
            scale, shift = _scale_and_shift(named, source + "norm2.")
            self._keep(
                target + "first", named[source + "conv1.weight"] * scale[:, None, None, None]
            )
            self._keep(target + "shift", shift)
            self._keep(target + "second", named[source + "conv2.weight"])
            if source + "shortcut.weight" in named:
                self._keep(target + "shortcut", named[source + "shortcut.weight"])
        self._keep_norm("after", named, "norm.")

    def _keep(self, name: str, values: Tensor) -> None:
        if values.dim() == 4:
            values = values.contiguous(memory_format=torch.channels_last)
        self.register_buffer(name, values, persistent=False)

    def _keep_norm(self, name: str, named: Mapping[str, Tensor], source: str) -> None:
        for part, values in zip(("scale", "add"), _scale_and_shift(named, source), strict=True):
            self._keep(f"{name}_{part}", values[:, None, None])

    def _active(self, name: str, values: Tensor) -> Tensor:
        scale, add = (self.get_buffer(f"{name}_{part}") for part in ("scale", "add"))
        return F.relu(torch.addcmul(add, values, scale))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode (N, 3, height, width) in [0, 1]."""
        known = dict(self.named_buffers())
        values = F.conv2d((images - CENTRE) / SPREAD, known["stem"], padding=1)
        maps = []
        for group, place in self._places:
            name = f"{group}_{place}_"
            stride = 2 if group > 0 and place == 0 else 1
            active = self._active(name + "before", values)
            if stride == 2:
                maps.append(active)
            hidden = F.conv2d(active, known[name + "first"], known[name + "shift"], stride, 1)
            direct = values
            if name + "shortcut" in known:
                direct = F.conv2d(active, known[name + "shortcut"], stride=stride)
            values = direct + F.conv2d(F.relu(hidden), known[name + "second"], padding=1)
        first, second, third = *maps, self._active("after", values)
        return first, second, third


def _scale_and_shift(named: Mapping[str, Tensor], source: str) -> tuple[Tensor, Tensor]:
    """Batch normalisation in evaluation mode as one factor and one summand per channel."""
    weight, bias, mean, variance = (
        named[source + name] for name in ("weight", "bias", "running_mean", "running_var")
    )
    scale = weight / (variance + _VARIANCE_EPS).sqrt()
    return scale, bias - mean * scale


def prepare(images: Tensor) -> Tensor:
    """Bring images of any size and channel count to (N * k, 3, 32, 32), float in [0, 1].

    uint8 is divided by 255. Images whose longer side has 24 to 32 pixels are padded with zeros,
    others are resized (the longer side to 32) and then padded. One channel is repeated three times,
    three are taken as colours; of any other number each channel counts as a grey image (k of them).
    """
    if images.dim() != 4:
        raise InvalidInputError(
            f"images must have the shape (N, channels, height, width), got {tuple(images.shape)}"
        )
    values = _as_numbers(images)
    if values.shape[1] != 3:
        values = values.reshape(-1, 1, *values.shape[2:])
    return _to_square(values, SIZE, _PADDED_FROM).expand(-1, 3, -1, -1)


def _as_numbers(images: Tensor) -> Tensor:
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def _to_square(values: Tensor, side: int, padded_from: int) -> Tensor:
    """Pad images whose longer side is in `padded_from` to `side`; resize others, then pad."""
    height, width = values.shape[2:]
    longer = max(height, width)
    if not padded_from <= longer <= side:
        height, width = (max(1, round(length * side / longer)) for length in (height, width))
        values = F.interpolate(
            values, (height, width), mode="bilinear", align_corners=False, antialias=longer > side
        )
    left, top = (side - width) // 2, (side - height) // 2
    return F.pad(values, (left, side - width - left, top, side - height - top))


def zoomed(values: Tensor) -> Tensor:
    border = (SIZE - 26) // 2
    middle = values[..., border : SIZE - border, border : SIZE - border]
    return F.interpolate(middle, SIZE, mode="bilinear", align_corners=False)


def pooled_maps(
    networks: Sequence[nn.Module], images: Tensor, grids: Sequence[int], *, zoom: bool = False
) -> list[Tensor]:
    """Maps averaged over cells, and over image, mirror image and zoomed views, in order.

    One (N, channels, cells) float32 tensor per map and network.
    """
    values = prepare(images)
    views = [values, values.flip(-1)]
    if zoom:
        views += [zoomed(view) for view in views]
    stacked = torch.cat(views).contiguous(memory_format=torch.channels_last)
    pooled = [
        F.adaptive_avg_pool2d(values.float(), grid).flatten(2)
        for network in networks
        for values, grid in zip(network(stacked), grids, strict=True)
    ]
    return [block.reshape(len(views), -1, *block.shape[1:]).mean(0) for block in pooled]


class AssetDigest(nn.Module):
    """The SHA-256 of a file of frozen weights: all that a release holds of it.

    Weights that were trained on features of another file are refused.
    """

    def __init__(self, digest: str) -> None:
        super().__init__()
        self.register_buffer("digest", torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8))

    def __str__(self) -> str:
        return bytes(self.get_buffer("digest").tolist()).hex()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        stored, own = state_dict.get(f"{prefix}digest"), self.get_buffer("digest")
        if stored is not None and not torch.equal(stored.cpu(), own.cpu()):
            found, expected = (bytes(each.tolist()).hex() for each in (stored, own))
            raise InvalidInputError(
                f"the model was trained on features of an encoder file with the SHA-256 {found}, "
                f"and this one has {expected}; use the version of dpsur that the model was trained "
                "with"
            )
        super()._load_from_state_dict(state_dict, prefix, *rest)


class FrozenFeatures(nn.Module):
    """Features of images from a shipped file: one row of norm 1 each, nothing in it is trained.

    Images are (N, channels, height, width), uint8 or numbers in [0, 1]. `mean` and `deviation` (per
    channel) tell that the numbers were standardised with these, which is undone first. `digest` is
    the SHA-256 that the file must have.

    Features are rounded to 16 bits, so that a cache of them needs half of the space.
    """

    def __init__(
        self,
        digest: str,
        mean: Sequence[float] | None = None,
        deviation: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.standardised = mean is not None and deviation is not None
        for name, values in (("mean", mean), ("deviation", deviation)):
            if self.standardised:
                tensor = torch.tensor(values).reshape(-1, 1, 1)
                self.register_buffer(name, tensor, persistent=False)
        self.asset = AssetDigest(digest)

    def pixels(self, images: Tensor) -> Tensor:
        if images.dtype == torch.uint8 or not self.standardised:
            return images
        return images * self.get_buffer("deviation") + self.get_buffer("mean")

    def forward(self, images: Tensor) -> Tensor:
        return rounded(self.rows(images))

    @torch.no_grad()
    def rows(self, images: Tensor) -> Tensor:
        """Features before they are rounded, of some images at a time.

        An exported program, of any number, takes them all at once.
        """
        if torch.compiler.is_exporting():
            return self.encoded(images)
        return torch.cat([self.encoded(some) for some in torch.split(images, _BATCH)])

    def encoded(self, images: Tensor) -> Tensor:
        raise NotImplementedError


class Encoder(FrozenFeatures):
    """The shipped encoder. `zoom` also encodes the enlarged middle of every image and averages.

    That doubles the time.
    """

    def __init__(
        self,
        *,
        digest: str = ENCODER_DIGEST,
        mean: Sequence[float] | None = None,
        deviation: Sequence[float] | None = None,
        zoom: bool = False,
    ) -> None:
        super().__init__(digest, mean, deviation)
        content = read_asset(ENCODER, digest)
        about, named = described(_shipped(ENCODER)), load_tensors(content)
        self.grids, self.zoom = tuple(about["grids"]), zoom
        self.networks = nn.ModuleList(
            FrozenWideResNet(_part(named, f"networks.{number}."), depth)
            for number, (depth, _) in enumerate(about["networks"])
        )
        self.whitening = Whitening(_part(named, "whitening."))

    def encoded(self, images: Tensor) -> Tensor:
        blocks = pooled_maps(list(self.networks), self.pixels(images), self.grids, zoom=self.zoom)
        return F.normalize(self.whitening(blocks).reshape(images.shape[0], -1))


class WhitenedScattering(FrozenFeatures):
    """Roots of scattering coefficients, whitened with statistics of procedural images.

    Images are brought to 28 x 28 pixels; three channels are averaged to grey ones, and of any other
    number each counts as a grey image. A hundred times faster than the encoder, and as good for
    strokes on a plain ground.
    """

    def __init__(
        self,
        *,
        digest: str = SCATTERING_DIGEST,
        mean: Sequence[float] | None = None,
        deviation: Sequence[float] | None = None,
    ) -> None:
        super().__init__(digest, mean, deviation)
        self.scattering = Scattering2d(*SCATTERING_SHAPE[1:])
        self.whitening = Whitening(load_tensors(read_asset(SCATTERING_WHITENING, digest)))

    def encoded(self, images: Tensor) -> Tensor:
        values = _as_numbers(self.pixels(images))
        if values.shape[1] == 3:
            values = values.mean(1, keepdim=True)
        values = values.reshape(-1, 1, *values.shape[2:])
        side = SCATTERING_SHAPE[1]
        scattered = self.scattering(_to_square(values, side, side)).flatten(2)
        return F.normalize(self.whitening([scattered]).reshape(images.shape[0], -1))


class ScatteringEncoder(nn.Module):
    """Whitened scattering and the encoder's features, each half of the square of a row's norm."""

    def __init__(
        self,
        *,
        digest: str = ENCODER_DIGEST,
        scattering_digest: str = SCATTERING_DIGEST,
        mean: Sequence[float] | None = None,
        deviation: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.encoder = Encoder(digest=digest, mean=mean, deviation=deviation)
        self.scattering = WhitenedScattering(
            digest=scattering_digest, mean=mean, deviation=deviation
        )

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        parts = [self.scattering.rows(images), self.encoder.rows(images)]
        return rounded(torch.cat(parts, 1) * math.sqrt(0.5))


def rounded(rows: Tensor) -> Tensor:
    """Rows as 16-bit numbers hold them, in float32."""
    return rows.half().float()


def _shipped(name: str) -> Path:
    return Path(str(files("dpsur.features") / "assets" / name))


def _part(named: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in named.items() if k.startswith(prefix)}


def read_asset(name: str, digest: str) -> bytes:
    """The content of a shipped file, whose SHA-256 must be `digest`."""
    try:
        content = _shipped(name).read_bytes()
    except OSError as error:
        raise FileError(f"{name} cannot be read ({error.strerror}); install dpsur again") from None
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise InvalidInputError(
            f"{name} has the SHA-256 {found}, and {digest} is needed; use the version of "
            "dpsur that has that file, or install dpsur again if the file is damaged"
        )
    return content


def described(path: Path) -> dict[str, Any]:
    """What the file of an encoder says about itself: grids, networks and the recipe."""
    try:
        with safe_open(path, "pt") as file:
            about: dict[str, Any] = json.loads(file.metadata()["encoder"])
    except (SafetensorError, TypeError, KeyError, ValueError):
        raise InvalidInputError(f"{path} is no file of an encoder; see docs/results.md") from None
    return about
