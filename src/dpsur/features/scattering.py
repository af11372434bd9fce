"""The filters of a scattering transform on a torus of given size, computed in float64.

Spectra are real and indexed as `numpy.fft.fft2` indexes them.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from dpsur import checks
from dpsur.errors import InvalidInputError

Array = NDArray[np.float64]

# The amplitude of published scattering features rests on this rounding of pi. It is kept, so that
# they agree to all digits and not only to four.
_PI = 3.1415
# The narrowest envelope, and the frequency of the narrowest wavelet in radians per pixel.
_WIDTH, _FREQUENCY = 0.8, 0.75 * math.pi
# Periods of the torus on either side that a filter is wrapped around from.
_WRAPS = 2


def averaging_matrix(size: int, scales: int, scale: int) -> Array:
    """The low-pass filter along one axis as a matrix: from resolution `scale` to the output's.

    The filter is an isotropic Gaussian, a product of one matrix per axis. `size` is that of the
    padded image at full resolution. The first and the last output lie in the padding and are left
    out: (size / 2^scales - 2, size / 2^scale).
    """
    deviation = _WIDTH * 2 ** (scales - 1)
    places = np.arange(-_WRAPS * size, (_WRAPS + 1) * size)
    gaussian = np.exp(-(places**2) / (2 * deviation**2)).reshape(-1, size).sum(0)
    spectrum = np.fft.fft(gaussian).real / (deviation * math.sqrt(2 * _PI))
    impulse = np.fft.ifft(lowest(spectrum, 2**scale, axes=(0,))).real
    step, length = 2 ** (scales - scale), size // 2**scale
    outputs = step * np.arange(1, length // step - 1)
    matrix: Array = impulse[(outputs[:, None] - np.arange(length)) % length]
    return matrix


def lowest(spectrum: Array, factor: int, axes: tuple[int, ...]) -> Array:
    """The lowest frequencies: those that a grid coarser by `factor` can hold."""
    for axis in axes:
        half = spectrum.shape[axis] // (2 * factor)
        kept = np.r_[0:half, spectrum.shape[axis] - half : spectrum.shape[axis]]
        spectrum = np.take(spectrum, kept, axis)
    return spectrum


def _morlet(height: int, width: int, scale: int, turn: int, angles: int) -> Array:
    """A wave under an elliptic envelope, less as much of the envelope as makes the mean zero."""
    angle = (angles // 2 - 1 - turn) * math.pi / angles
    slant = 4 / angles  # rounder where fewer angles share the half circle
    deviation, frequency = _WIDTH * 2**scale, _FREQUENCY / 2**scale
    rows = np.arange(-_WRAPS * height, (_WRAPS + 1) * height)[:, None]
    columns = np.arange(-_WRAPS * width, (_WRAPS + 1) * width)
    along = math.cos(angle) * rows + math.sin(angle) * columns
    across = math.cos(angle) * columns - math.sin(angle) * rows
    envelope = np.exp(-(along**2 + (slant * across) ** 2) / (2 * deviation**2))
    envelope *= slant / (2 * _PI * deviation**2)
    wave = envelope * np.exp(1j * frequency * along)
    wavelet = wave - wave.sum() / envelope.sum() * envelope
    wrapped = wavelet.reshape(2 * _WRAPS + 1, height, 2 * _WRAPS + 1, width).sum((0, 2))
    spectrum: Array = np.fft.fft2(wrapped).real  # the imaginary part is zero by symmetry
    return spectrum


_MOST_SCALES, _LARGEST_FILTERS = 8, 2**25
# Numbers in the largest intermediate: what a core's cache holds, or a small part of a GPU.
_NUMBERS_PER_THREAD, _NUMBERS_ON_A_CARD = 2**20, 2**27


class Scattering2d(nn.Module):
    """Two layers of wavelets and moduli, averaged over windows of 2^scales pixels.

    Takes (N, C, height, width) and returns (N, C * paths, height / 2^scales, width / 2^scales),
    the paths of the first channel first. Paths are ordered by layer, then by scale and angle of the
    first wavelet, then of the second; with two scales and eight angles there are 81. Nothing is
    trained or saved: the filters follow from the arguments.
    """

    def __init__(self, height: int, width: int, scales: int = 2, angles: int = 8) -> None:
        super().__init__()
        sizes = {"height": height, "width": width, "scales": scales, "angles": angles}
        for name, value in sizes.items():
            checks.at_least_one(name, value)
        if scales > _MOST_SCALES or height * width * angles > _LARGEST_FILTERS:
            raise InvalidInputError(
                f"scattering of {height}x{width}, {scales} scales and {angles} angles is "
                f"too large; there are up to {_MOST_SCALES} scales, and up to {_LARGEST_FILTERS} "
                "pixels times angles"
            )
        step = 1 << scales
        for name, size in (("height", height), ("width", width)):
            if size % step or size < 2 * step:
                raise InvalidInputError(
                    f"scattering with {scales} scales needs a {name} that is a multiple of {step} "
                    f"and at least {2 * step}, got {size}; pad or crop the images"
                )
        self.height, self.width, self.scales, self.angles = height, width, scales, angles
        self._padded = (height + 2 * step, width + 2 * step)
        filters: dict[str, Tensor] = {}
        for scale in range(scales):
            for axis, size in zip(("rows", "columns"), self._padded, strict=True):
                filters[f"{axis}_{scale}"] = torch.from_numpy(averaging_matrix(size, scales, scale))
            turns = [_morlet(*self._padded, scale, turn, angles) for turn in range(angles)]
            spectra = np.stack(turns)
            for before in range(max(1, scale)):
                factor = 2 ** (scale - before)
                band = torch.from_numpy(lowest(spectra, 2**before, axes=(1, 2))) / factor**2
                # One factor for the real and one for the imaginary part of every frequency.
                filters[f"wavelets_{before}_{scale}"] = band.repeat_interleave(2, dim=-1)
        for name, values in filters.items():
            self.register_buffer(name, values.float(), persistent=False)

    @property
    def paths(self) -> int:
        """Output channels per input channel."""
        pairs = self.scales * (self.scales - 1) // 2
        return 1 + self.scales * self.angles + pairs * self.angles**2

    def forward(self, images: Tensor) -> Tensor:
        """The features of every image on its own, in microbatches of bounded memory."""
        if images.dim() != 4 or images.shape[2:] != (self.height, self.width):
            raise InvalidInputError(
                f"scattering takes images of shape (N, C, {self.height}, {self.width}), "
                f"got {tuple(images.shape)}"
            )
        planes = images.flatten(0, 1).to(self.get_buffer("rows_0").dtype)
        shape = (images.shape[0], images.shape[1] * self.paths, *self._output_size())
        if torch.compiler.is_exporting():  # a program for any number of images has one batch
            return self._planes(planes).reshape(shape)
        microbatches = (
            torch.split(planes, self._planes_at_once(planes.device)) if len(planes) else ()
        )
        empty = planes[:0].new_empty(0, self.paths, *self._output_size())
        return torch.cat([empty, *map(self._planes, microbatches)]).reshape(shape)

    def _output_size(self) -> tuple[int, int]:
        return self.height >> self.scales, self.width >> self.scales

    def _planes_at_once(self, device: torch.device) -> int:
        numbers = _NUMBERS_ON_A_CARD
        if device.type != "cuda":
            numbers = _NUMBERS_PER_THREAD * int(torch.get_num_threads())
        largest = self._padded[0] * self._padded[1] * self.angles * max(2, self.angles // 2)
        return max(1, numbers // largest)

    def _planes(self, planes: Tensor) -> Tensor:
        border = 1 << self.scales
        padded = F.pad(planes.unsqueeze(1), (border,) * 4, mode="reflect").squeeze(1)
        spectra = torch.fft.fft2(padded)
        first = [self._moduli(spectra, 0, scale) for scale in range(self.scales)]
        layers = [self._average(padded, 0).unsqueeze(1)]
        layers += [self._average(moduli, scale) for scale, moduli in enumerate(first)]
        layers += [self._second(moduli, scale) for scale, moduli in enumerate(first[:-1])]
        return torch.cat(layers, dim=1)

    def _second(self, moduli: Tensor, scale: int) -> Tensor:
        """Averages of the second layer, over wavelets wider than those of the first."""
        spectra = torch.fft.fft2(moduli)
        averages = [
            self._average(self._moduli(spectra, scale, wider), wider)
            for wider in range(scale + 1, self.scales)
        ]
        return torch.cat(averages, dim=2).flatten(1, 2)

    def _moduli(self, spectra: Tensor, before: int, scale: int) -> Tensor:
        """Moduli of wavelet coefficients, one map per angle, at the resolution of the scale.

        Keeping every n-th pixel is adding up n x n parts of the spectrum. Real arithmetic on the
        interleaved parts of complex numbers does that in one sweep per part.
        """
        wavelets = self.get_buffer(f"wavelets_{before}_{scale}")
        factor = 2 ** (scale - before)
        parts = _parts(torch.view_as_real(spectra).flatten(-2).unsqueeze(-3), factor)
        (first, band), *others = zip(parts, _parts(wavelets, factor), strict=True)
        folded = first * band
        for part, band in others:
            folded.addcmul_(part, band)
        pairs = folded.reshape(*folded.shape[:-1], -1, 2)
        return torch.abs(torch.fft.ifft2(torch.view_as_complex(pairs)))

    def _average(self, maps: Tensor, scale: int) -> Tensor:
        return self.get_buffer(f"rows_{scale}") @ maps @ self.get_buffer(f"columns_{scale}").mT

    def extra_repr(self) -> str:
        return f"{self.height}x{self.width}, scales={self.scales}, angles={self.angles}"


def _parts(values: Tensor, factor: int) -> list[Tensor]:
    return [part for rows in values.chunk(factor, -2) for part in rows.chunk(factor, -1)]
