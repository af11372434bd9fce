"""The one place that adds noise to gradients."""

from torch import Tensor

from dpsur.functional.parameters import Params, elementwise
from dpsur.mechanism.streams import Stream
from dpsur.per_example import ClippedSum


def add_gaussian(total: ClippedSum, noise_multiplier: float | Tensor, stream: Stream) -> Params:
    """Gaussian mechanism on a sum of bounded sensitivity (Alg. 1, L7).

    Formal guarantee: with Poisson sampling at rate q, a sampled Gaussian mechanism of rate q and
    this noise multiplier. The scale comes from the sensitivity that the sum itself reports.
    """
    scale = noise_multiplier * total.sensitivity

    def noisy(value: Tensor) -> Tensor:
        # Normal draws in float32 end at 5.8 standard deviations, where some records would be told
        # apart for certain. In float64 they end at 8.6, which is charged
        # (`privacy/accountants/noise_tail.py`).
        noise = stream.normal(value.numel()).view(value.shape)
        return noise.mul_(scale).add_(value).to(value.dtype)

    return elementwise(noisy, total.params)
