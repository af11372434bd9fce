"""Tests of blocks of updates: noisy sums of bounded values over the training records.

A record adds a row of L2 norm at most 1, whatever it is, so that 1 is the sensitivity of a sum.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from dpsur.functional.persons import PersonTargets, record_rows
from dpsur.functional.problem import EVALUATION_ROWS, Problem
from dpsur.functional.records import Examples
from dpsur.functional.tree import Params
from dpsur.mechanism import gaussian
from dpsur.mechanism.proposer import Sampler
from dpsur.mechanism.state import START, State
from dpsur.mechanism.streams import VAL_BATCH, VAL_NOISE, Draws
from dpsur.per_example import ClippedSum, clipped_norms
from dpsur.per_example.record_function import record_losses, record_outputs
from dpsur.privacy.events import Gaussian, SampledGaussian
from dpsur.privacy.statement import ACCURACY, BRIER

# Bins of a noisy histogram: half octaves from 2^-24 to 2^24, what lies outside in the end bins.
LOWEST_OCTAVE, HIGHEST_OCTAVE, BINS_PER_OCTAVE = -24, 24, 2
BINS: Final = (HIGHEST_OCTAVE - LOWEST_OCTAVE) * BINS_PER_OCTAVE
# A bin whose noisy count is below this many standard deviations counts as empty.
EMPTY_BELOW: Final = 2.0

GRADIENT_NORM, LOSS_SCALE = "median gradient norm", "median loss"
SCORE, LOSS_DECREASE = "score", "clipped loss decrease"
# The largest norm of (label right, half the Brier score): a label with the largest probability, p,
# has a Brier score of at most 1 - p.
METRICS_NORM: Final = math.sqrt(1.25)


class Tests(Protocol):
    """Adds up values of the training records."""

    @property
    def records(self) -> int:
        """The size of the data set."""

    @property
    def classes(self) -> int:
        """How many classes the model tells apart; 0 if it is no classifier."""

    def total(self, quantity: str, state: State, draws: Draws) -> Tensor:
        """The sum of a quantity over all records, or a Poisson sample of them, on all ranks.

        Each record adds a row that depends on that record alone, of L2 norm at most 1.
        """


def noisy_sum(
    tests: Tests, quantity: str, state: State, event: Gaussian | SampledGaussian, draws: Draws
) -> Tensor:
    """One Gaussian query: a sum over records of rows of L2 norm at most 1, its sensitivity."""
    total = ClippedSum({"test": tests.total(quantity, state, draws)}, 1.0)
    return gaussian.add_noise(total, event.noise_multiplier, draws[VAL_NOISE])["test"]


@dataclass(frozen=True)
class RecordTests:
    """The tests of a `Problem`, whose weights are in the state."""

    sampler: Sampler
    event: Gaussian | SampledGaussian

    @property
    def records(self) -> int:
        return self.sampler.problem.size

    @cached_property
    def classes(self) -> int:
        """How many classes outputs are scores of, where targets are indices of them; else 0."""
        problem = self.sampler.problem
        one = problem.train.part(slice(1))
        inputs, targets = record_rows(one.inputs), record_rows(one.targets)
        if not _are_labels(targets):
            return 0
        return classes_of(problem.outputs(problem.initial_params(), inputs), targets)

    def total(self, quantity: str, state: State, draws: Draws) -> Tensor:
        problem = self.sampler.problem
        total = torch.zeros((), dtype=torch.float64, device=problem.device)
        with self.sampler.layer_randomness(draws):  # gradients are those of training
            for rows, mask in self._shares(draws):
                values = self._values(quantity, state, rows)
                if mask is not None:
                    values = torch.where(mask[:, None], values, 0.0)
                total = total + values.sum(0)
        return draws.ranks.sum(total)

    def _values(self, quantity: str, state: State, rows: Examples) -> Tensor:
        problem = self.sampler.problem
        if quantity == SCORE:
            return class_metrics(problem, state.params, rows)
        if quantity == GRADIENT_NORM:
            return bins_of(clipped_norms(problem, state.params, rows, math.inf))
        losses = record_losses(problem, state.params, rows)
        if quantity == LOSS_SCALE:
            return bins_of(losses.double().abs())
        assert state.saved is not None
        assert state.memory is not None
        before = record_losses(problem, state.saved[START], rows)
        return decreases_of(before, losses, state.memory["loss_scale"])

    def _shares(self, draws: Draws) -> Iterator[tuple[Examples, Tensor | None]]:
        """This rank's share of the records to test on; a masked record where it has none."""
        problem, ranks, seen = self.sampler.problem, draws.ranks, False
        if isinstance(self.event, SampledGaussian):
            batch = self.sampler.batch(self.event.sample_rate, draws, VAL_BATCH)
            for start in range(0, len(batch), EVALUATION_ROWS):
                some, seen = slice(start, start + EVALUATION_ROWS), True
                mask = None if batch.mask is None else batch.mask[some]
                if batch.rows is None:
                    yield batch.data.part(some), mask
                else:
                    yield batch.data.select(batch.rows[some]), mask
        else:
            rows = max(1, min(EVALUATION_ROWS, -(-len(problem.train) // ranks.size)))
            for number, part in enumerate(problem.train.parts(rows)):
                if number % ranks.size == ranks.rank:
                    seen = True
                    yield part, None
        if not seen:  # a sum of nothing gets its shape from a record that does not count
            mask = torch.zeros(1, dtype=torch.bool, device=problem.device)
            yield problem.train.part(slice(1)), mask


# --- what a record adds to a test: a row of L2 norm at most 1, whatever the record is -------------


def _are_labels(targets: Any) -> bool:
    return isinstance(targets, Tensor) and targets.dim() == 1 and targets.dtype == torch.int64


def classes_of(outputs: Any, targets: Any) -> int:
    """How many classes the outputs of some records are scores of; 0 without labels."""
    scores = isinstance(outputs, Tensor) and outputs.dim() == 2 and outputs.shape[1] > 1
    return int(outputs.shape[1]) if scores and _are_labels(targets) else 0


def class_metrics(problem: Problem, params: Params, rows: Examples) -> Tensor:
    """(label right, half the Brier score) over the largest norm that this can have.

    Of a person, the mean over their records, which has no larger norm.
    """
    outputs = record_outputs(problem, params, rows.inputs)
    assert isinstance(outputs, Tensor)
    if isinstance(rows.targets, PersonTargets):
        flat, targets = outputs.flatten(0, 1), record_rows(rows.targets)
        each = metrics_of(flat, targets)
        return rows.targets.mean(each.view(*outputs.shape[:2], -1))
    assert isinstance(rows.targets, Tensor)
    return metrics_of(outputs, rows.targets)


def metrics_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """The same from scores of classes and labels, each with a row per record.

    The Brier score is the squared distance of the probabilities from those of certainty. It is
    bounded as it is. A loss that is clipped is smallest, where most records are of one class, for a
    model that is sure of that class for any record.
    """
    probabilities = torch.softmax(outputs.double(), 1)
    labels = torch.nn.functional.one_hot(targets, outputs.shape[1])
    halves = (probabilities - labels).square().sum(1) / 2
    right = (outputs.argmax(1) == targets).double()
    right = torch.where(halves.isfinite(), right, 0.0)
    values = torch.stack([right, torch.where(halves.isfinite(), halves, 1.0)], 1) / METRICS_NORM
    longest: Tensor = values.norm(dim=1, keepdim=True)
    return values / longest.clamp(min=1)


def decreases_of(before: Tensor, after: Tensor, bound: Tensor) -> Tensor:
    """By how much a record's loss is below that at the first weights, clipped, in [-1, 1]."""
    difference = before.double() - after.double()
    clipped = (difference / bound).clamp(-1, 1)
    return torch.where(difference.isfinite(), clipped, -1.0)[:, None]


def bins_of(sizes: Tensor) -> Tensor:
    """A one in the bin of each record's size."""
    sizes = torch.where(sizes.isfinite(), sizes, 0.0).clamp(min=2.0**LOWEST_OCTAVE)
    places = (BINS_PER_OCTAVE * (sizes.log2() - LOWEST_OCTAVE)).floor().long()
    return torch.nn.functional.one_hot(places.clamp(0, BINS - 1), BINS).double()


def median_of(noisy: Tensor, noise: float) -> float | None:
    """The median by a noisy histogram, the middle of its bin; None if all bins look empty."""
    counts = torch.where(noisy > EMPTY_BELOW * noise, noisy, 0.0).cumsum(0)
    if not float(counts[-1]) > 0:
        return None
    place = int((counts < counts[-1] / 2).sum())
    return float(2.0 ** (LOWEST_OCTAVE + (place + 0.5) / BINS_PER_OCTAVE))


# --- what a test released -------------------------------------------------------------------------


def with_value(values: Tensor, place: int, value: float | Tensor) -> Tensor:
    """The same values, one of them replaced."""
    values = values.clone()
    values[place] = value
    return values


def metric_row(
    test: int,
    after: str,
    quantity: str,
    rate: float | None,
    value: float,
    scale: float | None,
    error: float,
) -> dict[str, Any]:
    """A noisy value that a test released. `scale` is by how much a record can change its sum."""
    return {
        "test": test,
        "after": after,
        "quantity": quantity,
        "learning_rate": rate,
        "value": value,
        "scale": scale,
        "standard_error": None if scale is None else scale * error,
    }


def both_metrics(
    test: int, after: str, rate: float | None, pair: Sequence[float], error: float
) -> list[dict[str, Any]]:
    """Training accuracy and Brier score, from one test."""
    right, half = pair
    return [
        metric_row(test, after, ACCURACY, rate, right, METRICS_NORM, error),
        metric_row(test, after, BRIER, rate, 2 * half, 2 * METRICS_NORM, error),
    ]
