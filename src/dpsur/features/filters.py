"""The filters of a scattering transform on a torus of given size, computed in float64.

Spectra are real and indexed as `numpy.fft.fft2` indexes them.
"""

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# The amplitude of published scattering features rests on this rounding of pi. It is kept, so that
# they agree to all digits and not only to four.
_PI = 3.1415
# The narrowest envelope, and the frequency of the narrowest wavelet in radians per pixel.
_WIDTH, _FREQUENCY = 0.8, 0.75 * math.pi
# Periods of the torus on either side that a filter is wrapped around from.
_WRAPS = 2


def wavelet_spectra(height: int, width: int, scale: int, angles: int) -> Array:
    """Spectra of the Morlet wavelets of one scale: (angles, height, width)."""
    return np.stack([_morlet(height, width, scale, turn, angles) for turn in range(angles)])


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
