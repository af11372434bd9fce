"""DP-SGD's parts for a custom loop: Poisson batches, and the private gradient of one of them."""

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from dpsur import checks
from dpsur.errors import InvalidInputError, PrivacyWarning
from dpsur.functional.problem import LossFunction
from dpsur.functional.tree import TensorTree, check_rows, map_tensors
from dpsur.mechanism import gaussian
from dpsur.mechanism.gaussian import poisson_sample
from dpsur.mechanism.streams import BATCH, NOISE, Streams
from dpsur.per_example.api import clipped_sum
from dpsur.privacy.accountants.noise_tail import MOST_WEIGHTS


def poisson_batches(
    records: TensorTree,
    sample_rate: float,
    steps: int,
    *,
    seed: int | None = None,
    first_step: int = 1,
) -> Iterator[TensorTree]:
    """Yield `steps` Poisson batches of records.

    Args:
        records: a tensor with one row per record, or a tuple, dict or dataclass of such tensors.
        sample_rate: the probability with which each record joins each batch.
        steps: how many batches.
        seed: makes the batches repeatable, and void against anyone who knows the seed.
        first_step: with a seed, the number of the first batch. Two calls with one seed must not
            share a number: they would draw the same records again.

    Formal guarantee: every record joins every batch independently of all others with probability
    `sample_rate`, which the amplification of a sampled Gaussian mechanism needs. A batch may
    be empty. It must not be skipped: an empty batch is a noisy step like any other.
    """
    checks.sample_rate("sample_rate", sample_rate)
    checks.at_least_one("steps", steps)
    checks.at_least_one("first_step", first_step)
    if isinstance(records, list):
        raise InvalidInputError(
            "records must not be a list, which could be a list of records or of columns; stack "
            "records into one tensor, or pass columns as a tuple"
        )
    size = check_rows(records, "records")
    if size is None:
        raise InvalidInputError("records hold no tensor; pass tensors with one row per record")
    if seed is not None:
        warnings.warn(
            "these batches are seeded: whoever knows the seed knows which records are in them",
            PrivacyWarning,
            stacklevel=2,
        )
    # a key of their own: a run of `fit` with the same seed draws other numbers
    streams = Streams(seed, torch.device("cpu")).spawn(0)
    return _batches(records, size, sample_rate, streams, range(first_step, first_step + steps))


def _batches(
    records: TensorTree, size: int, sample_rate: float, streams: Streams, steps: range
) -> Iterator[TensorTree]:
    for step in steps:
        rows = poisson_sample(size, sample_rate, streams.at(step)[BATCH])
        yield map_tensors(lambda value, rows=rows: value[rows.to(value.device)], records)


def dp_gradient(
    model: nn.Module,
    loss: LossFunction,
    inputs: TensorTree,
    targets: TensorTree,
    *,
    max_grad_norm: float,
    noise_multiplier: float,
    expected_batch_size: float,
) -> dict[str, Tensor]:
    """The private mean gradient of a Poisson batch, by name of parameter.

    Clips each record's gradient to `max_grad_norm`, adds them up, adds Gaussian noise of
    `noise_multiplier` times that norm, and divides by the expected batch size, not the drawn one.
    Inputs and targets are those of `clipped_sum`.

    Formal guarantee: if the batch was drawn by `poisson_batches` at rate q, one call is a sampled
    Gaussian mechanism of rate q and this noise multiplier, for adding or removing one record.
    Charge it as such (`Account`). The noise is fresh in every call and cannot be seeded: two
    steps with the same noise would have none between them.
    """
    checks.positive("max_grad_norm", max_grad_norm)
    checks.positive("noise_multiplier", noise_multiplier)
    checks.positive("expected_batch_size", expected_batch_size)
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if weights > MOST_WEIGHTS:
        raise InvalidInputError(
            f"the model has {weights} trained weights; figures of epsilon hold for up to "
            f"{MOST_WEIGHTS}: freeze some"
        )
    total = clipped_sum(model, loss, inputs, targets, max_grad_norm)
    device = next(iter(total.params.values())).device
    noisy = gaussian.add_noise(total, noise_multiplier, Streams(None, device).at(1)[NOISE])
    return {name: value / expected_batch_size for name, value in noisy.items()}
