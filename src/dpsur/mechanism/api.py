"""DP-SGD's parts for a custom loop: Poisson batches, and the private gradient of one of them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.functional.problem import LossFunction
from dpsur.functional.tree import TensorTree
from dpsur.mechanism.noise import add_gaussian
from dpsur.mechanism.sampling import poisson_sample
from dpsur.mechanism.streams import BATCH, NOISE, Streams
from dpsur.per_example.api import clipped_sum


def poisson_batches(
    records: Any, sample_rate: float, steps: int, *, seed: int | None = None
) -> Iterator[Any]:
    """Yield `steps` Poisson batches of records.

    Args:
        records: a tensor with one row per record, or a tuple, list or dict of such tensors.
        sample_rate: the probability with which each record joins each batch.
        steps: how many batches.
        seed: makes the batches repeatable, and void against anyone who knows the seed.

    Formal guarantee: every record joins every batch independently of all others with probability
    `sample_rate`, which the amplification of a sampled Gaussian mechanism needs. A batch may
    be empty. It must not be skipped: an empty batch is a noisy step like any other.
    """
    checks.sample_rate("sample_rate", sample_rate)
    checks.at_least_one("steps", steps)
    sizes = {len(value) for value in pytree.tree_leaves(records)}
    if len(sizes) != 1:
        raise InvalidInputError(
            f"records must be tensors with one row per record, got lengths {sorted(sizes)}"
        )
    (size,) = sizes
    streams = Streams(seed, torch.device("cpu"))
    for step in range(1, steps + 1):
        rows = poisson_sample(size, sample_rate, streams.at(step)[BATCH])
        yield pytree.tree_map(lambda value, rows=rows: value[rows.to(value.device)], records)


def dp_gradient(
    model: nn.Module,
    loss: LossFunction,
    inputs: TensorTree,
    targets: TensorTree,
    *,
    max_grad_norm: float,
    noise_multiplier: float,
    expected_batch_size: float,
    seed: int | None = None,
) -> dict[str, Tensor]:
    """The private mean gradient of a Poisson batch, by name of parameter.

    Clips each record's gradient to `max_grad_norm`, adds them up, adds Gaussian noise of
    `noise_multiplier` times that norm, and divides by the expected batch size, not the drawn one.

    Formal guarantee: if the batch was drawn by `poisson_batches` at rate q, one call is a sampled
    Gaussian mechanism of rate q and this noise multiplier, for adding or removing one record.
    Charge it as such (`PrivacyLedger`). The noise is fresh in every call, unless it is seeded.
    """
    checks.positive("max_grad_norm", max_grad_norm)
    checks.positive("noise_multiplier", noise_multiplier)
    checks.positive("expected_batch_size", expected_batch_size)
    total = clipped_sum(model, loss, inputs, targets, max_grad_norm)
    device = next(iter(total.params.values())).device
    noise = Streams(seed, device).at(1)[NOISE]
    noisy = add_gaussian(total, noise_multiplier, noise)
    return {name: value / expected_batch_size for name, value in noisy.items()}
