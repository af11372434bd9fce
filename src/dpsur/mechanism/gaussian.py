"""The Gaussian mechanism on a sum of bounded sensitivity: the one place where noise is added.

Call it as `gaussian.add_noise`, by the name of the module, so that a test which watches or breaks
the mechanism reaches every use of it.
"""

from dataclasses import replace

from torch import Tensor

from dpsur.functional.problem import Problem
from dpsur.functional.tree import Params, elementwise
from dpsur.mechanism.sampling import Batch
from dpsur.mechanism.streams import Stream
from dpsur.per_example import ClippedSum, clipped_sum


def add_noise(total: ClippedSum, noise_multiplier: float | Tensor, stream: Stream) -> Params:
    """Gaussian mechanism on a sum of bounded sensitivity (Alg. 1, L7).

    Formal guarantee: with Poisson sampling at rate q, a sampled Gaussian mechanism of rate q and
    this noise multiplier. The scale comes from the sensitivity that the sum itself reports. Each
    number of a vector has its own address, so that shards on several ranks together get the noise
    that one process would draw.
    """
    scale = noise_multiplier * total.sensitivity
    if total.offsets is not None:
        return {
            name: stream.normal(value.numel(), total.offsets[name])
            .view(value.shape)
            .mul_(scale)
            .add_(value)
            .to(value.dtype)
            for name, value in total.params.items()
        }

    def noisy(value: Tensor) -> Tensor:
        # Normal draws in float32 end at 5.8 standard deviations, where some records would be told
        # apart for certain. In float64 they end at 8.6, which is charged
        # (`privacy/accountants/noise_tail.py`).
        flat = value.reshape(-1)
        if total.scratch:
            return stream.add_normal(flat, scale, in_place=True).view(value.shape)
        return stream.add_normal(flat, scale).view(value.shape)

    return elementwise(noisy, total.params)


def noisy_mean(
    total: ClippedSum, noise_multiplier: float | Tensor, expected_size: float, stream: Stream
) -> Params:
    """A clipped sum with noise, over the expected batch size.

    The drawn size is private, and dividing by it would change the sensitivity. The memory of the
    sum, which is as large as the model, becomes that of the mean.
    """
    noisy = add_noise(replace(total, scratch=True), noise_multiplier, stream)
    if total.offsets is not None:
        return {name: value.div_(expected_size) for name, value in noisy.items()}
    return elementwise(lambda value: value.div_(expected_size), noisy)


def dp_mean_gradient(
    problem: Problem,
    params: Params,
    batch: Batch,
    sample_rate: float,
    noise_multiplier: float | Tensor,
    max_grad_norm: float | Tensor,
    noise: Stream,
    *,
    coins: Tensor | None = None,
) -> Params:
    """Clip each record's gradient, add them up, add noise, divide by the expected size (L4-8).

    Formal guarantee: if `batch` was drawn from the training records at this rate, this is a sampled
    Gaussian mechanism of the rate and the noise multiplier, which may be a number on the device.
    `coins` are those of `clipped_sum`.
    """
    total = clipped_sum(
        problem,
        params,
        batch.data,
        max_grad_norm,
        mask=batch.mask,
        rows=batch.rows,
        coins=coins,
        ranks=batch.ranks,
        at_once=batch.at_once,
    )
    return noisy_mean(total, noise_multiplier, sample_rate * len(problem.train), noise)
