"""The private gradient that every private method here steps along."""

from torch import Tensor

from dpsur.functional.parameters import Params, elementwise
from dpsur.functional.problem import Problem
from dpsur.mechanism.noise import add_gaussian
from dpsur.mechanism.sampling import Batch
from dpsur.mechanism.streams import Stream
from dpsur.per_example import clipped_sum


def dp_mean_gradient(
    problem: Problem,
    params: Params,
    batch: Batch,
    sample_rate: float,
    noise_multiplier: float | Tensor,
    max_grad_norm: float,
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
        problem, params, batch.data, max_grad_norm, mask=batch.mask, rows=batch.rows, coins=coins
    )
    noisy = add_gaussian(total, noise_multiplier, noise)
    # The expected size, not the drawn one: the drawn size is private, and dividing by it would
    # change the sensitivity.
    expected_size = sample_rate * len(problem.train)
    return elementwise(lambda value: value / expected_size, noisy)
