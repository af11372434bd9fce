"""Tests on the records of a custom loop: of single candidates, and of blocks of updates.

`CandidateTest` is the gate of Algorithm 1 for a module whose candidates are made in place: it looks
at the weights before the update and at those after it. `ModelTests` adds up bounded values of the
records for the tests of blocks. Functions of the user run in the record level there, so that what a
record adds depends on that record alone.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from dpsur.engine.criterion import Criterion
from dpsur.engine.loader import PrivateLoader
from dpsur.engine.watch import Watcher
from dpsur.errors import InvalidInputError
from dpsur.functional.problem import mode, output_rows
from dpsur.functional.process_settings import precision
from dpsur.functional.tree import Params, keep, map_tensors, tensors_of
from dpsur.mechanism.block_tests import (
    GRADIENT_NORM,
    LOSS_DECREASE,
    LOSS_SCALE,
    SCORE,
    bins_of,
    classes_of,
    decreases_of,
    metrics_of,
)
from dpsur.mechanism.gates import BatchLoss, Losses, Outputs
from dpsur.mechanism.state import START, Candidate, State, Verdict
from dpsur.mechanism.streams import VAL_NOISE, Draws
from dpsur.mechanism.trial import Rule
from dpsur.privacy.events import CoinTest, Gaussian, LossTest, SampledGaussian


@dataclass(frozen=True)
class Evaluation:
    """How the records of a batch get outputs, targets and losses, each record alone.

    Attributes:
        outputs: of model and batch; by default a batch is a pair of inputs and targets.
        losses: of model and batch, instead of outputs and a criterion.
    """

    watcher: Watcher
    criterion: Criterion | None = None
    outputs: Outputs | None = None
    losses: Losses | None = None

    def __post_init__(self) -> None:
        if self.losses is None and self.criterion is None:
            raise InvalidInputError(
                "a gate needs the loss of each record; give make_private criterion=..., or the "
                "gate a loss function"
            )

    def __call__(self, batch: Any) -> tuple[Any, Any, Tensor]:
        """Outputs, targets and losses, each with a row per record."""
        watcher = self.watcher
        records, alone = self._alone(batch)
        with torch.no_grad(), mode(watcher.module, training=False), watcher.paused():
            _, (outputs, targets, losses) = watcher.records.run(self._of_one, alone, records)
        watcher.reshard()  # or the next step would not reach gathered weights
        if not isinstance(losses, Tensor) or losses.numel() != records:
            raise InvalidInputError(
                "losses of a gate must be a tensor with one dimension, the loss of each record"
            )
        outputs, targets = map_tensors(lambda value: value.flatten(0, 1), (outputs, targets))
        return outputs, targets, losses.reshape(records)

    def mean_loss(self, _: Any, batch: Any) -> Tensor:
        return self(batch)[-1].mean()

    def gradient_norms(self, batch: Any, rows_each: int = 1) -> Tensor:
        """The norm of each record's (or person's) gradient, as in training.

        A record has one row, a person one for each of their records.
        """
        watcher = self.watcher
        records, alone = self._alone(batch, rows_each)

        def loss(one: Any) -> Tensor:
            *_, found = self._of_one(one)
            return found.mean() if watcher.loss_reduction == "mean" else found.sum()

        watched = nullcontext() if watcher.sharding is None else watcher.sharding.watched()
        with mode(watcher.module, training=True), watcher.paused(), watched:
            tape, *_ = watcher.records.tape(loss, alone, records, randomness=watcher.randomness)
        watcher.reshard()
        with torch.no_grad(), precision(tf32=False):
            tape.carry_back()
            if not tape.contributions:
                raise InvalidInputError(
                    "no gradient of the model was found in the loss of the gate, from which the "
                    "clipping norm is measured; call the model, without torch.no_grad(), or give "
                    "make_private max_grad_norm=..."
                )
            return tape.norms()

    def _alone(self, batch: Any, rows_each: int = 1) -> tuple[int, Any]:
        tensors = [value for value in tensors_of(batch) if value.dim()]
        rows = len(tensors[0]) if tensors else 0
        if not rows or rows % rows_each or any(len(value) != rows for value in tensors):
            raise InvalidInputError(
                "a test of the gate needs batches whose tensors have a row per record"
            )
        device = self.watcher.device

        def front(value: Tensor) -> Tensor:
            value = value.to(device)
            if not value.dim():
                return value.expand(rows // rows_each)
            return value.reshape(-1, rows_each, *value.shape[1:])

        return rows // rows_each, map_tensors(front, batch, otherwise=keep)

    def _of_one(self, batch: Any) -> tuple[Any, Any, Tensor]:
        module = self.watcher.module
        if self.losses is not None:
            return None, None, self.losses(module, batch)
        if self.outputs is not None:
            outputs, targets = self.outputs(module, batch)
        elif isinstance(batch, (tuple, list)) and len(batch) == 2:
            outputs, targets = module(batch[0]), batch[1]
        else:
            raise InvalidInputError(
                "batches of the loader are no pairs of inputs and targets; give the gate "
                "outputs=..., a function of (model, batch) that returns the outputs of the model "
                "and the targets"
            )
        assert self.criterion is not None
        outputs = output_rows(outputs)
        return outputs, targets, self.criterion.loss(outputs, targets)


@dataclass(frozen=True)
class ModelTests:
    """Sums of bounded values over the records of a loader (`mechanism.block_tests.Tests`)."""

    evaluate: Evaluation
    loader: PrivateLoader
    event: Gaussian | SampledGaussian
    records: int  # the public size of the data set, or the number of persons

    @cached_property
    def classes(self) -> int:
        """How many classes the model tells apart, by the outputs for a blank record."""
        outputs, targets, _ = self.evaluate(self.loader.joined([]))
        return classes_of(outputs, targets)

    def total(self, quantity: str, state: State, draws: Draws) -> Tensor:
        total = None
        rate = self.event.sample_rate if isinstance(self.event, SampledGaussian) else None
        for count, batch in self.loader.for_test(draws.step, rate):
            values = self._values(quantity, batch, state, max(1, count))
            if len(values) != max(1, count):
                raise InvalidInputError(
                    "outputs or losses of the gate have another number of rows than their batch "
                    "has records; return a row for each record"
                )
            part = values.sum(0) if count else torch.zeros_like(values[0])
            total = part if total is None else total + part
        assert total is not None
        return draws.ranks.sum(total)

    def _values(self, quantity: str, batch: Any, state: State, units: int) -> Tensor:
        """What the records or persons of a microbatch add to a test: rows of L2 norm at most 1.

        Of a person, it is the mean over their records, or follows from their mean loss.
        """
        if quantity == GRADIENT_NORM:
            rows = next(len(value) for value in tensors_of(batch) if value.dim())
            return bins_of(self.evaluate.gradient_norms(batch, rows // units))
        outputs, targets, losses = self.evaluate(batch)
        losses = _unit_means(losses, units)
        if quantity == LOSS_SCALE:
            return bins_of(losses.double().abs())
        if quantity == SCORE:
            return _unit_means(metrics_of(outputs, targets), units)
        assert quantity == LOSS_DECREASE
        assert state.saved is not None
        assert state.memory is not None
        trained = self.evaluate.watcher.trained
        now = {name: value.detach().clone() for name, value in trained.items()}
        try:
            _write(trained, {name: state.saved[START][f"parameter {name}"] for name in trained})
            before = _unit_means(self.evaluate(batch)[-1], units)
        finally:
            _write(trained, now)
        return decreases_of(before, losses, state.memory["loss_scale"])


@dataclass(frozen=True)
class CandidateTest:
    """Compare the weights before and after an update on a fresh Poisson batch; a rule decides.

    `loss` gives the mean loss of a batch as the loader yields it. The means of microbatches count
    by their records or persons, those of all ranks together.
    """

    watcher: Watcher
    loader: PrivateLoader
    loss: BatchLoss
    test: LossTest | CoinTest
    rule: Rule
    rejects: ClassVar[bool] = True

    def begin(self, state: State, draws: Draws) -> tuple[list[Any], Tensor]:  # noqa: ARG002
        """The batch of a test, in microbatches with their numbers of records, and its loss."""
        batches = list(self.loader.for_test(draws.step, self.test.sample_rate, here=True))
        return batches, self._mean_loss(batches, draws)

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:  # noqa: ARG002
        batches, before = candidate.test
        after = self._mean_loss(batches, draws)
        return Verdict(self.rule.decide(after - before, draws[VAL_NOISE]).cpu())

    def after_rejection(self, state: State, candidate: Candidate) -> State:  # noqa: ARG002
        return state

    def padded(self) -> "CandidateTest":
        return self

    def _mean_loss(self, batches: list[tuple[int, Any]], draws: Draws) -> Tensor:
        """Over the records of all ranks; zero for none. A microbatch of none is a placeholder."""
        module = self.watcher.module
        device = next(module.parameters()).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        with torch.no_grad(), mode(module, training=False):
            for count, batch in batches:
                moved = map_tensors(lambda v: v.to(device), batch, otherwise=keep)
                found = self.loss(module, moved)
                if not isinstance(found, Tensor) or found.numel() != 1:
                    raise InvalidInputError(
                        "the loss of a gate must return a tensor of one number, the mean of a batch"
                    )
                if count:
                    total += count * found.double().reshape(())
        self.watcher.reshard()
        records = torch.full_like(total, sum(count for count, _ in batches))
        total, records = draws.ranks.sum(torch.stack([total, records])).unbind()
        return total / records.clamp(min=1)


def _unit_means(values: Tensor, units: int) -> Tensor:
    """Means over the rows of each unit, which are next to each other: one, or a person's records.

    Rows that are not as many for each unit are left alone, and refused as another number of rows.
    """
    if len(values) == units or len(values) % units:
        return values
    return values.reshape(units, -1, *values.shape[1:]).mean(1)


def _write(places: Mapping[str, Tensor], values: Params) -> None:
    with torch.no_grad():
        for name, value in places.items():
            value.copy_(values[name])
