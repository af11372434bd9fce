"""Rate search in a custom loop: blocks of updates, and rare, precise tests that decide about them.

The order of updates and tests is fixed before the run (`Plan`), and all of them are charged.
The loop makes the updates. After the last update of a block, `optimizer.step()` makes the test that
is due, on all records, and does what the rule says (`RateSearch`): it sets the learning rate and
perhaps the clipping norm, and continues, or goes back to a saved state.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, SGD, Optimizer

from dpsur.engine.criterion import Criterion
from dpsur.engine.gate import BlockGate, Snapshot
from dpsur.engine.loader import RecordReader
from dpsur.engine.optimizer import SCHEDULED
from dpsur.engine.private_step import augmenting
from dpsur.engine.watch import Watcher
from dpsur.errors import InvalidInputError, StepError
from dpsur.functional.problem import mode, output_rows
from dpsur.functional.process_settings import precision
from dpsur.functional.tree import map_tensors, tensors_of
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
from dpsur.mechanism.dp_gradient import add_gaussian
from dpsur.mechanism.rate_search import (
    START,
    Decision,
    Memory,
    RateRule,
    RateSearch,
    Walk,
    search_starts,
)
from dpsur.mechanism.streams import VAL_NOISE, Draws, Streams
from dpsur.per_example.clipping import ClippedSum
from dpsur.privacy.account import Account
from dpsur.privacy.plan import Plan

FIRST_CLIP_NORM = 1.0  # stays in force where a histogram of gradient norms shows nothing


class BlockRun:
    """A run by a `BlockGate`: what its tests have released, and states to go back to."""

    def __init__(
        self,
        gate: BlockGate,
        ledger: Account,
        watcher: Watcher,
        optimizer: Optimizer,
        criterion: Criterion | None,
        max_grad_norm: float | None,
        records: RecordReader,
        streams: Callable[[], Streams],
    ) -> None:
        self._gate, self.ledger, self._watcher = gate, ledger, watcher
        self._optimizer, self._criterion = optimizer, criterion
        self._records, self._streams = records, streams
        self._module = watcher.module
        self._scale_free, self._momentum = _kind_of(optimizer)
        self._clip_by_median = max_grad_norm is None
        self._check_settings()
        self._max_grad_norm = FIRST_CLIP_NORM if max_grad_norm is None else max_grad_norm
        self._ratios = _ratios(optimizer)
        self._set: list[float] | None = None  # the rates that were set last
        self._saved = {START: Snapshot(self._module, optimizer, gate.averages)}
        self._memory: Memory | None = None
        self._decision: Decision | None = None  # to be carried out

    def _check_settings(self) -> None:
        if self._gate.losses is None and self._criterion is None:
            raise InvalidInputError(
                "a BlockGate needs the loss of each record; give make_private criterion=..., or "
                "the gate losses=..."
            )
        rate = self._gate.learning_rate
        if self._clip_by_median and rate is not None and not self._scale_free:
            raise InvalidInputError(
                f"learning_rate {rate:g} of the gate means nothing without a clipping norm, by "
                "which gradients are scaled; give make_private max_grad_norm=..."
            )
        if any("initial_lr" in group for group in self._optimizer.param_groups):
            raise InvalidInputError(SCHEDULED.format("a learning-rate scheduler"))

    def _snapshot(self) -> Snapshot:
        """The state at hand, to be restored with the optimizer of the first one."""
        return Snapshot(self._module, self._optimizer, self._gate.averages, self._saved[START])

    @property
    def plan(self) -> Plan:
        """Updates and tests, fixed before the run."""
        plan = self.ledger.plan
        assert plan is not None
        return plan

    @cached_property
    def search(self) -> RateSearch:
        """The rule; what it has to know of the model comes from the outputs for a blank record."""
        found = self._evaluate(self._records.blank())
        starts = search_starts(
            scale_free=self._scale_free,
            momentum=self._momentum,
            learning_rate=self._gate.learning_rate,
            max_grad_norm=self._max_grad_norm,
        )
        rule = RateRule(
            self._max_grad_norm,
            starts,
            schedule=self._gate.schedule,
            clip_by_median=self._clip_by_median,
            scale_free=self._scale_free,
            momentum=self._momentum,
        )
        classes = classes_of(found.outputs, found.targets)
        return RateSearch(self.plan, self._records.size, classes, rule)

    @property
    def memory(self) -> Memory:
        """What is known so far: released values and what follows from them."""
        if self._memory is None:
            self._memory = self.search.initial_memory()
        return self._memory

    @property
    def done(self) -> bool:
        """Whether all of the plan was made, and all decisions were carried out."""
        noted = 0 if self._memory is None else int(self._memory["tests"])
        return self.ledger.completed and noted == self.ledger.tests

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """What the tests released so far, which is paid for and public."""
        return [] if self._memory is None else self.search.metrics(self._memory)

    # --- updates ----------------------------------------------------------------------------------

    def check_rates(self) -> None:
        """Refuse learning rates that someone else has set."""
        now = [float(group["lr"]) for group in self._optimizer.param_groups]
        if self._set is not None and now != self._set:
            raise StepError(SCHEDULED.format("the loop or a scheduler"))

    def set_rates(self) -> None:
        """Put the rate of the update at hand into all parameter groups. It is charged already."""
        rate = float(self.search.learning_rate(self.memory, self.ledger.made - 1))
        for group, ratio in zip(self._optimizer.param_groups, self._ratios, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio
        self._set = [float(group["lr"]) for group in self._optimizer.param_groups]

    # --- tests ------------------------------------------------------------------------------------

    def make_tests(self) -> None:
        """Make the tests that are due, and do what follows from them.

        A test that was charged and interrupted is made with the noise of its own step. Nothing has
        been seen of it.
        """
        while True:
            if self._decision is None:
                if self.ledger.tests == int(self.memory["tests"]):
                    if not self.ledger.test_is_due:
                        return
                    self.ledger.charge(self.plan.test)
                noisy = self._noisy_sum(self._streams().at(self.ledger.steps))
                self._decision = self.search.after_test(self.memory, noisy, self._walk)
            self._carry_out(self._decision)

    def _carry_out(self, decision: Decision) -> None:
        """Save and restore. It can be interrupted at any point and done again."""
        for name in decision.save:
            self._saved = {**self._saved, name: self._snapshot()}
            self._decision = decision = replace(decision, save=())
        if decision.restore is not None:
            self._saved[decision.restore].restore(keep=True)
            self._set = None
        first, trained = self._saved[START].weights, self._watcher.trained
        with torch.no_grad():
            for name, factor in decision.add:  # to restored weights
                end = self._saved[name].weights
                for key, value in trained.items():
                    value.add_(end[key] - first[key], alpha=factor)
        self._memory = decision.memory
        self._use_clip_norm()
        self._decision = None

    def _use_clip_norm(self) -> None:
        if self._memory is not None:
            self._watcher.max_grad_norm = float(self._memory["max_grad_norm"])

    def _noisy_sum(self, draws: Draws) -> Tensor:
        """The value of the test that is due: one Gaussian query."""
        total, ranks = None, self._streams().ranks
        quantity = self.search.quantity(self.memory)
        rate = getattr(self.plan.test, "sample_rate", None)
        views = quantity == GRADIENT_NORM  # is measured as in training
        now = self._weights() if quantity == LOSS_DECREASE else {}
        for count, batch in self._records.read(draws.step, rate, views=views):
            values = self._values(quantity, batch, now)
            if len(values) != max(1, count):
                raise InvalidInputError(
                    "outputs or losses of the gate have another number of rows than their batch "
                    "has records; return a row for each record"
                )
            part = values.sum(0) if count else torch.zeros_like(values[0])
            total = part if total is None else total + part
        assert total is not None
        clipped = ClippedSum({"test": ranks.sum(total)}, 1.0)
        return add_gaussian(clipped, self.plan.test.noise_multiplier, draws[VAL_NOISE])["test"]

    def _values(self, quantity: str, batch: Any, now: Mapping[str, Tensor]) -> Tensor:
        """What the records of a microbatch add to a test: rows of L2 norm at most 1."""
        if quantity == GRADIENT_NORM:
            return bins_of(self._gradient_norms(batch))
        found = self._evaluate(batch)
        if quantity == LOSS_SCALE:
            return bins_of(found.losses.double().abs())
        if quantity == SCORE:
            return metrics_of(found.outputs, found.targets, found.losses)
        try:
            self._write_weights(self._saved[START].weights)
            before = self._evaluate(batch).losses
        finally:
            self._write_weights(now)
        return decreases_of(before, found.losses, self.memory["loss_scale"])

    def _weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self._watcher.trained.items()}

    def _write_weights(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in self._watcher.trained.items():
                value.copy_(weights[name])

    def _evaluate(self, batch: Any) -> "_Evaluated":
        """Outputs, targets and the loss of each record, in evaluation mode."""
        sharding = self._watcher.sharding
        records, alone = self._alone(batch)
        with torch.no_grad(), mode(self._module, training=False), self._watcher.paused():
            _, found = self._watcher.records.run(self._call, alone, records)
        if sharding is not None:
            sharding.reshard()  # or the next step would not reach gathered weights
        outputs, targets, losses = found
        if not isinstance(losses, Tensor) or losses.numel() != records:
            raise InvalidInputError(
                "losses of a gate must be a tensor with one dimension, the loss of each record"
            )
        outputs, targets = map_tensors(lambda value: value.flatten(0, 1), (outputs, targets))
        return _Evaluated(outputs, targets, losses.reshape(records))

    def _alone(self, batch: Any, views: int = 1) -> tuple[int, Any]:
        """The number of records of a batch, and their tensors with the records in front."""
        tensors = [value for value in tensors_of(batch) if value.dim()]
        rows = len(tensors[0]) if tensors else 0
        if not rows or rows % views or any(len(value) != rows for value in tensors):
            raise InvalidInputError(
                "a test of the gate needs batches whose tensors have a row per record"
            )
        device = next(iter(self._watcher.trained.values())).device

        def front(value: Tensor) -> Tensor:
            if not value.dim():
                return value.expand(rows // views)
            return value.to(device).reshape(-1, views, *value.shape[1:])

        return rows // views, map_tensors(front, batch, otherwise=lambda value: value)

    def _call(self, batch: Any) -> tuple[Any, Any, Tensor]:
        """Outputs, targets and loss of a batch of one record."""
        if self._gate.losses is not None:
            return None, None, self._gate.losses(self._module, batch)
        outputs, targets = self._outputs(batch)
        assert self._criterion is not None
        outputs = output_rows(outputs)
        return outputs, targets, self._criterion.loss(outputs, targets)

    def _outputs(self, batch: Any) -> tuple[Any, Any]:
        if self._gate.outputs is not None:
            return self._gate.outputs(self._module, batch)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise InvalidInputError(
                "batches of the loader are no pairs of inputs and targets; give "
                "BlockGate(outputs=...), a function of (model, batch) that returns the outputs "
                "of the model and the targets"
            )
        device = next(self._module.parameters()).device
        inputs, targets = (map_tensors(lambda value: value.to(device), part) for part in batch)
        return self._module(inputs), targets

    def _gradient_norms(self, batch: Any) -> Tensor:
        """The norm of each record's gradient, as in training."""
        records, alone = self._alone(batch, self._watcher.views)

        def loss(one: Any) -> Tensor:
            *_, found = self._call(one)
            return found.mean() if self._watcher.loss_reduction == "mean" else found.sum()

        watcher = self._watcher
        sharding = watcher.sharding
        with (
            mode(self._module, training=True),
            watcher.paused(),
            augmenting(self._module, watcher.augment),
            nullcontext() if sharding is None else sharding.watched(),
        ):
            tape, *_ = watcher.records.tape(loss, alone, records, randomness=watcher.randomness)
        if sharding is not None:
            sharding.reshard()
        with torch.no_grad(), precision(tf32=False):
            tape.carry_back()
            if not tape.contributions:
                raise InvalidInputError(
                    "no gradient of the model was found in the loss of the gate, from which the "
                    "clipping norm is measured; call the model, without torch.no_grad(), or give "
                    "make_private max_grad_norm=..."
                )
            return tape.norms()

    def _walk(self) -> Walk:
        """How far the weights are from the first ones."""
        first, trained = self._saved[START].weights, self._watcher.trained
        squares = [
            _whole((value.detach() - first[name]).double().square().sum())
            for name, value in trained.items()
        ]
        return Walk(
            float(torch.stack(squares).sum()),
            sum(value.numel() for value in trained.values()),
            self.plan.update.noise_multiplier,
            self.plan.update.sample_rate * self._records.size,
        )

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Released values and saved states."""
        if self._decision is not None:
            raise StepError(
                "a test of the block gate was interrupted before weights were saved or restored as "
                "it says; draw the next batch from the loader, which finishes that, and then save"
            )
        return {
            "memory": None if self._memory is None else dict(self._memory),
            "saved": {name: saved.state_dict() for name, saved in self._saved.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], ledger: Account) -> None:
        """Continue where a checkpoint was made."""
        self.ledger = ledger
        self._memory = None if state["memory"] is None else dict(state["memory"])
        self._saved[START].load_state_dict(state["saved"][START])
        for name in state["saved"].keys() - {START}:
            self._saved[name] = self._snapshot()
            self._saved[name].load_state_dict(state["saved"][name])
        self._set = None
        self._use_clip_norm()


@dataclass(frozen=True)
class _Evaluated:
    outputs: Any
    targets: Any
    losses: Tensor


def _whole(value: Tensor) -> Tensor:
    """A number that ranks may hold parts of."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _kind_of(optimizer: Optimizer) -> tuple[bool, float]:
    """Whether steps do not grow with the gradient, and the momentum of plain SGD.

    With momentum m and dampening d a gradient moves the weights by (1 - d) / (1 - m) in all.
    """
    if not isinstance(optimizer, SGD | ASGD):
        return True, 0.0
    group = optimizer.param_groups[0]
    left = 1 - group.get("dampening", 0.0)
    return False, 1 - (1 - group.get("momentum", 0.0)) / left if left > 0 else 0.0


def _ratios(optimizer: Optimizer) -> list[float]:
    """The rates of the parameter groups over the largest of them."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    if not max(rates) > 0 or not all(math.isfinite(rate) and rate >= 0 for rate in rates):
        raise InvalidInputError(
            f"the learning rates of the optimizer are {rates}; a BlockGate keeps their ratios, so "
            "give at least one group a rate above zero"
        )
    return [rate / max(rates) for rate in rates]
