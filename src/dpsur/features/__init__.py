"""Fixed features of the records, by name, computed once.

Formal guarantee: the features of a record depend on that record alone, so adding or removing one
record adds or removes one row, and training on features costs no privacy beyond the training.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpsur.errors import InvalidInputError
from dpsur.features import cache
from dpsur.features.encoder import ENCODER_DIGEST, SCATTERING_DIGEST
from dpsur.features.encoder import Encoder as Encoder
from dpsur.features.layers import LayerDescription, apply_layers, build_layers
from dpsur.features.table import words as words

Shape = tuple[int, ...]
# How features can be normalised (see `dpsur.runs.input_features`).
NONE, GROUP, PRIVATE, MEAN, QUANTILES = "none", "group", "private", "mean", "quantiles"
NORMALISATIONS = (NONE, GROUP, PRIVATE, MEAN, QUANTILES)
# Features of a table, which need its schema.
TABLE = "table"
# Mean and deviation per channel that images were standardised with; None: they are in [0, 1].
PixelScale = tuple[Sequence[float], Sequence[float]]
# Rounding of images that were standardised and are scaled back.
_PIXEL_TOLERANCE = 0.01


@dataclass(frozen=True)
class Features:
    """A map from the inputs of one record to its features.

    `layers` describes it for inputs of a shape (without the dimension of the records); no layers
    leave the inputs as they are. `version` changes whenever the numbers do. `of_images` says that
    the inputs must be images with pixels in [0, 1], and that every record's features have norm 1.
    """

    name: str
    summary: str
    layers: Callable[[Shape], tuple[LayerDescription, ...]] = lambda _: ()
    version: int = 1
    of_images: bool = False

    def described(
        self, shape: Shape, scale: PixelScale | None = None
    ) -> tuple[LayerDescription, ...]:
        layers = self.layers(shape)
        if scale is None or not self.of_images:
            return layers
        mean, deviation = (list(values) for values in scale)
        return tuple({**layer, "mean": mean, "deviation": deviation} for layer in layers)

    def check_pixels(self, inputs: Tensor, scale: PixelScale | None, name: str) -> None:
        """Refuse images whose pixels are not where the features expect them."""
        if not self.of_images or inputs.dtype == torch.uint8 or not inputs.numel():
            return
        channels = range(inputs.shape[1])
        mean, deviation = scale or ([0.0] * len(channels), [1.0] * len(channels))
        for channel in channels:
            least, most = inputs[:, channel].aminmax()
            for value in (float(least), float(most)):
                pixel = value * deviation[channel] + mean[channel]
                if not -_PIXEL_TOLERANCE <= pixel <= 1 + _PIXEL_TOLERANCE:
                    raise InvalidInputError(
                        f"the features {self.name} need images in [0, 1] or of type uint8, and "
                        f"{name} has numbers outside; divide them by the largest possible one"
                    )

    def output_shape(self, shape: Shape) -> Shape:
        layers = build_layers(self.layers(shape))
        return tuple(layers(torch.zeros(1, *shape)).shape[1:])


def _of_images(
    who_needs: str, name: str, **layer: Any
) -> Callable[[Shape], tuple[LayerDescription, ...]]:
    def layers(shape: Shape) -> tuple[LayerDescription, ...]:
        if len(shape) != 3:
            raise InvalidInputError(
                f"{who_needs} images of shape (channels, height, width), but a record of these "
                f"data has the shape {shape}; use the features pixels or tokens"
            )
        sizes = {"height": shape[1], "width": shape[2]} if name == "scattering" else {}
        return ({"name": name, **sizes, **layer},)

    return layers


_AS_THEY_ARE, _FROM_FILE = "the inputs themselves", {"digest": ENCODER_DIGEST}
FEATURES: dict[str, Features] = {
    features.name: features
    for features in (
        Features("pixels", _AS_THEY_ARE),
        Features("tokens", _AS_THEY_ARE),
        Features("vectors", _AS_THEY_ARE),
        Features("words", f"{_AS_THEY_ARE}: rows of norm 1, as dpsur.features.table"),
        Features(TABLE, "columns of a table: noisy quantiles in soft bins, rows of norm 1"),
        Features(
            "scattering",
            "wavelet moduli, 81 per channel, a quarter of the size",
            _of_images("scattering needs", "scattering", scales=2, angles=8),
        ),
        Features(
            "encoder",
            "8,192 numbers of an encoder that was trained on procedural images alone",
            _of_images("the features encoder need", "encoder", **_FROM_FILE),
            of_images=True,
        ),
        Features(
            "encoder-zoom",
            "the same, of the image and of its enlarged middle, averaged; twice the time",
            _of_images("the features encoder-zoom need", "encoder", **_FROM_FILE, zoom=True),
            of_images=True,
        ),
        Features(
            "whitened-scattering",
            "3,969 numbers: scattering of grey 28 x 28 pixels, whitened with procedural images",
            _of_images(
                "the features whitened-scattering need",
                "whitened-scattering",
                digest=SCATTERING_DIGEST,
            ),
            of_images=True,
        ),
        Features(
            "scattering+encoder",
            "whitened scattering and encoder with equal weight",
            _of_images(
                "the features scattering+encoder need",
                "scattering-encoder",
                **_FROM_FILE,
                scattering_digest=SCATTERING_DIGEST,
            ),
            of_images=True,
        ),
    )
}


def features_named(name: str) -> Features:
    try:
        return FEATURES[name]
    except KeyError:
        known = ", ".join(FEATURES)
        raise InvalidInputError(f"unknown features {name!r}; choose one of {known}") from None


def compute(
    features: Features,
    inputs: Tensor,
    *,
    device: torch.device | None = None,
    cached: bool = True,
    scale: PixelScale | None = None,
) -> Tensor:
    """The features of all records, one row each, where the inputs are.

    `device` is where to compute. `scale` is what images were standardised with. The result is kept
    on disk for the next time, readable by its owner only, since it says as much as the records do;
    `cached=False` neither reads nor writes files.
    """
    shape = tuple(inputs.shape[1:])
    layers = features.described(shape, scale)
    if not layers:
        return inputs
    module = build_layers(layers)
    if not cached or not len(inputs):
        return apply_layers(module, inputs, device=device)
    transform = {"features": features.name, "version": features.version, "layers": layers}
    path = cache.path_for(transform, inputs)
    known = cache.read(path, (len(inputs), *features.output_shape(shape)))
    if known is None:
        known = apply_layers(module, inputs, device=device)
        cache.write(path, known)
    return known.to(inputs.device)
