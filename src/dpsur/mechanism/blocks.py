"""Training in blocks: updates with a noisy test after each block, every one of them charged.

The steps of a run are updates and tests, in an order that is fixed before it starts (`Plan`).
`RateSearchTraining` finds the learning rate: a test at the first weights, some short blocks of
updates that each begin at the first weights and end with a test, then the long last block and its
test. What a test says decides about the block before it and about the learning rate of the next
one. `MeasuredTraining` only measures: noisy training accuracy and Brier score after every block.
All that follows from a test is post-processing of noisy values that are paid for. Rule and
constants are explained in docs/selection.md.

Both work on an `Updates`, which makes updates and holds the weights, and on `Tests`, which add up
values of the records. `fit` has them for weights in a state (`GradientProposer`, `RecordTests`),
`PrivacyEngine` for those of a module (`engine/weights.py`, `engine/model_tests.py`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from dpsur.errors import InvalidInputError
from dpsur.mechanism.block_tests import (
    GRADIENT_NORM,
    LOSS_DECREASE,
    LOSS_SCALE,
    METRICS_NORM,
    SCORE,
    Tests,
    both_metrics,
    median_of,
    metric_row,
    noisy_sum,
    with_value,
)
from dpsur.mechanism.proposer import SHAPES, GradientSource
from dpsur.mechanism.rate_search import (
    ADAM_SHARE,
    COARSE_MOVE,
    FIRST,
    LAST,
    LEAST_MOVE,
    MOVE_ERRORS,
    TIE_ERRORS,
    TOO_HIGH,
    RateRule,
    TriedRate,
    best_exponent,
    between,
    classify,
    end_of,
    next_exponent,
)
from dpsur.mechanism.state import START, Candidate, Procedure, Proposer, State, Verdict
from dpsur.mechanism.streams import Draws
from dpsur.privacy.events import Event, NonPrivate, SampledGaussian, Step, Trial
from dpsur.privacy.plan import Plan

# What is known of a run: released values and what follows from them, as tensors of a checkpoint.
Memory = dict[str, Tensor]


class Updates(Proposer, Protocol):
    """Makes updates of weights that it can save and go back to."""

    @property
    def source(self) -> GradientSource:
        """Where gradients come from."""

    def at_rate(self, schedule: Callable[[Tensor], Tensor], max_grad_norm: Tensor) -> Self:
        """The same with another learning rate and clipping norm."""

    def reserve(self, state: State, names: Sequence[str]) -> State:
        """A state with places for saved weights, so that checkpoints always hold the same."""

    def save(self, state: State, name: str) -> State:
        """Keep the weights at hand under a name."""

    def restore(self, state: State, name: str, add: Sequence[tuple[str, float]] = ()) -> State:
        """Go back to saved weights, with an optimizer at rest.

        For every name and factor in `add`, the way from the first weights to the saved ones is
        added, times the factor.
        """

    def squared_distance(self, state: State) -> tuple[float, int]:
        """How far the weights are from the first ones, and how many there are."""


@dataclass(frozen=True)
class _Blocks:
    """What both kinds of training in blocks have in common."""

    plan: Plan
    updates: Updates
    tests: Tests
    is_padded: bool = field(default=False, kw_only=True)

    @property
    def setup(self) -> tuple[Event, ...]:
        return self.plan.setup

    def step(self, state: State) -> Step:
        """A test where a block is done, else what the source of gradients has next."""
        return self.plan.test if self.test_is_due(state) else self.updates.step(state)

    def test_is_due(self, state: State) -> bool:
        """Whether all updates before the next test were made; padded steps are updates alone."""
        if self.is_padded:
            return False
        memory = memory_of(state)
        sizes, done = self.plan.blocks, int(memory["tests"])
        return done >= len(sizes) or int(memory["made"]) >= sizes[done]

    def update(self, state: State, draws: Draws, position: Tensor) -> Candidate:
        """An update, or a figure that is released before it, as a menu is chosen by."""
        found = self.updates.propose(state, draws, position)
        memory = memory_of(found.state)
        memory["made"] = memory["made"] + int(isinstance(self.updates.step(state), Trial))
        return replace(found, state=replace(found.state, memory=memory))

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:  # noqa: ARG002
        """Every step is kept, since every step is charged: a test restores whole blocks."""
        return Verdict(torch.ones((), dtype=torch.bool, device=state.updates.device))

    def after_rejection(self, state: State, candidate: Candidate) -> State:  # noqa: ARG002
        return state

    def padded(self) -> Self | None:
        """The updates on padded batches, which can be captured; a test is made exactly."""
        updates = self.updates.padded()
        return None if updates is None else replace(self, updates=updates, is_padded=True)

    @property
    def _test_rate(self) -> float:
        test = self.plan.test
        return test.sample_rate if isinstance(test, SampledGaussian) else 1.0

    @property
    def tested(self) -> float:
        """The expected number of records that a test looks at."""
        return self._test_rate * self.tests.records

    @property
    def standard_error(self) -> float:
        """Standard error of a test: its noise and, for a subsample, at most that of sampling."""
        noise = self.plan.test.noise_multiplier / self.tested
        return math.hypot(noise, math.sqrt((1 - self._test_rate) / self.tested))

    def _noisy(self, quantity: str, state: State, draws: Draws) -> Tensor:
        return noisy_sum(self.tests, quantity, state, self.plan.test, draws)


@dataclass(frozen=True)
class RateSearchTraining(_Blocks):
    """Updates in blocks, and tests that decide about them.

    `updates` makes the updates; its learning rate and clipping norm are replaced by those in force.
    What tests measure and what follows from their values is up to the `rule`.

    Formal guarantee: every update, and every release that a source of gradients is steered by, is a
    sampled Gaussian with noise in proportion to the clipping norm in force, every test a (sampled)
    Gaussian on a sum of per-record values of L2 norm at most 1, as the plan states them and in its
    order. Everything else that a step depends on is in the state: released values and weights that
    charged updates led to. Restoring takes weights, optimizer and averages from before the block;
    the step of the random numbers is not part of it and never goes back.
    """

    rule: RateRule

    def initial_state(self) -> State:
        state = self.updates.initial_state()
        device, tests, blocks = state.updates.device, len(self.plan.blocks), self._searched + 1
        count = torch.zeros((), dtype=torch.int64, device=device)
        number = torch.zeros((), dtype=torch.float64, device=device)
        memory = {
            **(state.memory or {}),
            "made": count,  # updates since the last test
            "tests": count,  # made so far
            "values": number.repeat(tests),  # what the tests released
            "measured": number.repeat(tests, 2),  # accuracy and loss, of classifiers
            "exponents": number.repeat(blocks),  # log2 of the rates, as in the rule
            "shares": number.repeat(blocks),  # of noise in the displacement
            "best": count,  # the block with the best value so far
            "max_grad_norm": torch.full_like(number, self.rule.max_grad_norm),  # in force
            "rate": number,  # of the block at hand, at its start
            "size": count,  # its updates
            "before": count,  # those of them that were made before the last test
            "loss_scale": number,
        }
        state = self.updates.save(replace(state, memory=memory), START)
        return self.updates.reserve(state, [end_of(block) for block in range(self._searched)])

    def propose(self, state: State, draws: Draws, position: Tensor) -> Candidate:
        if self.test_is_due(state):
            return Candidate(
                self.after_test(state, self._noisy(self.quantity(state), state, draws))
            )
        return self.update(state, draws, position)

    def update(self, state: State, draws: Draws, position: Tensor) -> Candidate:  # noqa: ARG002
        """The same with the rate and the clipping norm in force, which stay on the device."""
        memory, shape = memory_of(state), SHAPES[self.rule.schedule]

        def rate(made: Tensor) -> Tensor:
            passed = (memory["before"] + made).double()
            return memory["rate"] * shape(passed / memory["size"])

        updates = self.updates.at_rate(rate, memory["max_grad_norm"])
        return _Blocks.update(replace(self, updates=updates), state, draws, memory["made"])

    # --- tests ------------------------------------------------------------------------------------

    @cached_property
    def quantities(self) -> list[tuple[str, str]]:
        """What each test looks at, and what it releases, in order."""
        first = [(FIRST, GRADIENT_NORM)] if self.rule.clip_by_median else []
        first.append((FIRST, SCORE if self.tests.classes else LOSS_SCALE))
        score = SCORE if self.tests.classes else LOSS_DECREASE
        found = [(end_of(number), score) for number in range(self._searched)]
        return [*first, *found, (LAST, score)]

    def quantity(self, state: State) -> str:
        return self.quantities[int(memory_of(state)["tests"])][1]

    @property
    def _score_scale(self) -> float:
        """The noise of a score over that of a test: it is the difference of two metrics."""
        return math.sqrt(2) * METRICS_NORM if self.tests.classes else 1.0

    # --- what follows from a test -----------------------------------------------------------------

    def after_test(self, state: State, noisy: Tensor) -> State:
        """The state after a test: values noted, a block kept or restored, the next rate set."""
        memory, quantity = memory_of(state), self.quantity(state)
        done = int(memory["tests"])
        memory["tests"] = memory["tests"] + 1
        memory["made"] = memory["before"] = torch.zeros_like(memory["made"])
        if quantity in (GRADIENT_NORM, LOSS_SCALE):
            value = median_of(noisy, self.plan.test.noise_multiplier) or 0.0
            if quantity == LOSS_SCALE:
                memory["loss_scale"] = torch.full_like(memory["loss_scale"], value or 1.0)
            elif value:
                norm = memory["max_grad_norm"]
                memory["max_grad_norm"] = torch.full_like(norm, value)
        elif len(noisy) == 2:
            right, loss = (METRICS_NORM * noisy / self.tested).tolist()
            measured = memory["measured"]  # which a custom loop has on the host
            pair = measured.new_tensor([right, loss])
            memory["measured"] = with_value(measured, done, pair)
            value = right - loss
        else:
            value = float(noisy) / self.tested
        memory["values"] = with_value(memory["values"], done, value)
        block, restored = done - self._before_blocks, None
        head_start: tuple[tuple[str, float], ...] = ()
        if block == -1:
            memory = self._with_rate(memory, 0)
        elif block == self._searched:
            # No searched block may be clearly better than the last one.
            *searched, last = self._block_values(memory)
            if last < max(searched, default=-math.inf) - self._tie:
                restored = end_of(int(memory["best"]))
        elif block >= 0:
            event, (way, weights) = (
                self.updates.source.event(state),
                self.updates.squared_distance(state),
            )
            share = self._noise_share(memory, block, event, way, weights)
            memory["shares"] = with_value(memory["shares"], block, share)
            values = self._block_values(memory)
            if values[block] > max(values[:block], default=-math.inf):
                memory["best"] = torch.full_like(memory["best"], block)
            memory = self._with_rate(memory, block + 1)
            state, restored = self.updates.save(state, end_of(block)), START
            head_start = self._head_start(memory) if block + 1 == self._searched else ()
        state = replace(state, memory=memory)
        return state if restored is None else self.updates.restore(state, restored, head_start)

    def _with_rate(self, memory: Memory, block: int) -> Memory:
        """The rate of the next block, from the values of those before it."""
        memory, tried = dict(memory), self._blocks(memory, block)
        if len(self.rule.starts) > 1 and block == self._searched - 1:
            exponent = self.rule.starts[1]
        elif block < self._searched:
            exponent = next_exponent(self.rule.starts[0], tried, self._tie)
        elif not tried:
            exponent = self.rule.starts[-1]
        else:
            exponent = best_exponent(tried, self._tie)
            places = [one.exponent for one in tried]
            shares = [min(1.0, share) for share in memory["shares"].tolist()[:block]]
            share = between(exponent, places, shares)
            sizes = self.plan.blocks[self._before_blocks :]
            octaves = max(0.0, math.log2(sizes[block] / max(sizes[:block])))
            exponent -= share * self.rule.length_power * octaves
        memory["exponents"] = with_value(memory["exponents"], block, exponent)
        size = self.plan.blocks[block + self._before_blocks]
        memory["rate"] = torch.full_like(memory["rate"], self._rate(memory, block))
        memory["size"] = torch.full_like(memory["size"], size)
        return memory

    def _head_start(self, memory: Memory) -> tuple[tuple[str, float], ...]:
        """How much of the way of each block the last one starts with.

        A block's way, times the last rate over its own, is what its updates would have done at the
        last rate, as long as gradients do not change. All ways together are at most a mean. There
        is none where tests are too coarse to tell what a block did.
        """
        if not self.rule.head_start:
            return ()
        tried, shares = self._blocks(memory, self._searched), memory["shares"].tolist()
        used = [
            n for n, block in enumerate(tried)
            if block.kind != TOO_HIGH and math.isfinite(shares[n]) and self._margin <= COARSE_MOVE
        ]  # fmt: skip
        last = float(memory["exponents"][self._searched])
        return tuple(
            (end_of(n), min(2.0 ** (last - tried[n].exponent), 1 / len(used))) for n in used
        )

    def _blocks(self, memory: Memory, count: int) -> list[TriedRate]:
        """What the first blocks of the search say of their rates."""
        before = self._before_blocks
        exponents, values = memory["exponents"].tolist(), self._block_values(memory)
        if self.tests.classes:
            losses = memory["measured"][:, 1].tolist()
            first_value, first_loss = memory["values"].tolist()[before - 1], losses[before - 1]
        else:  # values are decreases of the loss
            losses = [-value for value in memory["values"].tolist()]
            first_value, first_loss = 0.0, 0.0
        if self._margin > COARSE_MOVE:
            return [TriedRate(exponents[n], values[n]) for n in range(count)]
        return [
            classify(
                exponents[n], values[n], losses[before + n], first_value, first_loss, self._margin
            )
            for n in range(count)
        ]

    @property
    def _margin(self) -> float:
        """How much a loss has to move for a block to have done anything."""
        noise = METRICS_NORM if self.tests.classes else 1.0
        return max(LEAST_MOVE, MOVE_ERRORS * noise * self.standard_error)

    @property
    def _tie(self) -> float:
        """How far apart two values may be without telling their rates apart."""
        return TIE_ERRORS * self.standard_error * self._score_scale

    def _noise_share(
        self,
        memory: Memory,
        block: int,
        event: SampledGaussian | NonPrivate,
        way: float,
        weights: int,
    ) -> float:
        """Share of a block's displacement that noise alone explains; infinite where weights are.

        `way` is its squared length, and `event` what each of its updates was.
        """
        if not math.isfinite(way):
            return math.inf
        if self.rule.scale_free:
            return ADAM_SHARE
        assert isinstance(event, SampledGaussian)
        if way == 0:
            return 1.0
        size = self.plan.blocks[block + self._before_blocks]
        passed = torch.arange(size, dtype=torch.float64, device="cpu") / size
        rates = self._rate(memory, block) * SHAPES[self.rule.schedule](passed)
        # With momentum, noise moves the weights in the update it is drawn for and in all later ones
        reach, squares = 0.0, 0.0
        for rate in reversed(rates.tolist()):
            reach = rate + self.rule.momentum * reach
            squares += reach**2
        batch_size = event.sample_rate * self.tests.records
        step = event.noise_multiplier * float(memory["max_grad_norm"]) / batch_size
        return min(1.0, squares * step**2 * weights / way)

    # --- where a run stands -----------------------------------------------------------------------

    @property
    def _before_blocks(self) -> int:
        """Tests at the first weights."""
        return 2 if self.rule.clip_by_median else 1

    @property
    def _searched(self) -> int:
        """Blocks before the last one."""
        return len(self.plan.blocks) - self._before_blocks - 1

    def _block_values(self, memory: Memory) -> list[float]:
        values: list[float] = memory["values"].tolist()
        return values[self._before_blocks :]

    def _rate(self, memory: Memory, block: int) -> float:
        rate: float = 2.0 ** float(memory["exponents"][block])
        return rate if self.rule.scale_free else rate / float(memory["max_grad_norm"])

    def metrics(self, state: State) -> list[dict[str, Any]]:
        """What the tests released so far, which is paid for and public."""
        memory = memory_of(state)
        values, done = memory["values"].tolist(), int(memory["tests"])
        found = []
        for number, (after, quantity) in enumerate(self.quantities[:done]):
            block = number - self._before_blocks
            rate = self._rate(memory, block) if block >= 0 else None
            scale = self._score_scale if quantity in (SCORE, LOSS_DECREASE) else None
            error = self.standard_error
            found.append(metric_row(number, after, quantity, rate, values[number], scale, error))
            if quantity == SCORE:
                pair = memory["measured"][number].tolist()
                found += both_metrics(number, after, rate, pair, error)
        return found


@dataclass(frozen=True)
class MeasuredTraining(_Blocks):
    """Plain updates, and now and then a noisy training accuracy and Brier score, all charged.

    With `patience` it stops when the noisy Brier score has not been below its best by two
    standard errors for so many tests. Formal guarantee: that of the plan, also if it stops.
    """

    patience: int | None = None

    def initial_state(self) -> State:
        if self.tests.classes < 2:
            raise InvalidInputError(
                "metrics are the accuracy and the loss of a classifier, and these targets are not "
                "class indices; leave metrics out"
            )
        state = self.updates.initial_state()
        count = torch.zeros((), dtype=torch.int64, device=state.updates.device)
        measured = torch.zeros(len(self.plan.blocks), 2, dtype=torch.float64, device=count.device)
        return replace(state, memory={"tests": count, "made": count, "measured": measured})

    def propose(self, state: State, draws: Draws, position: Tensor) -> Candidate:
        if not self.test_is_due(state):
            return self.update(state, draws, position)
        memory = memory_of(state)
        noisy = self._noisy(SCORE, replace(state, params=state.released_params), draws)
        pair = METRICS_NORM * noisy / self.tested
        measured = memory["measured"]  # which a custom loop has on the host
        memory["measured"] = with_value(measured, int(memory["tests"]), pair.to(measured.device))
        memory["tests"] = memory["tests"] + 1
        memory["made"] = torch.zeros_like(memory["made"])
        return Candidate(replace(state, memory=memory))

    def metrics(self, state: State) -> list[dict[str, Any]]:
        memory = memory_of(state)
        found, error = [], self.standard_error
        for test in range(int(memory["tests"])):
            after = f"update {sum(self.plan.blocks[: test + 1])}"
            found += both_metrics(test, after, None, memory["measured"][test].tolist(), error)
        return found

    def stopped(self, state: State) -> bool:
        """Whether the run is over before its plan is: it follows from released values alone."""
        memory = memory_of(state)
        done = int(memory["tests"])
        if self.patience is None or not done or int(memory["made"]):
            return False  # only right after a test
        losses = memory["measured"][:done, 1].tolist()
        margin = 2 * METRICS_NORM * self.standard_error
        best, since = losses[0], 0
        for loss in losses[1:]:
            since = 0 if loss < best - margin else since + 1
            best = min(best, loss) if since else loss
        return since >= self.patience


def released_metrics(procedure: Procedure, state: State) -> list[dict[str, Any]] | None:
    """The noisy values that a run has paid for so far; None where it pays for none."""
    if isinstance(procedure, RateSearchTraining | MeasuredTraining):
        return procedure.metrics(state)
    return None


def memory_of(state: State) -> Memory:
    """What has been released so far, to be changed in a copy."""
    assert state.memory is not None
    return dict(state.memory)
