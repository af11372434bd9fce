"""A gate over blocks of updates: rare, precise tests, every one of them charged.

The steps of a run are updates and tests, in an order that is fixed before it starts (`BlockPlan`):
a test at the first weights, some short blocks of updates that each begin at the first weights and
end with a test, then the long last block and its test. What a test says decides about the block
before it and about the learning rate of the next one. All of that is post-processing of noisy
values that are paid for. Rule and constants are explained in docs/selection.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
from torch import Tensor

from dpsur.functional.parameters import Params
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.mechanism.block_tests import (
    GRADIENT_NORM,
    LOSS_DECREASE,
    LOSS_SCALE,
    METRICS_NORM,
    SCORE,
    both_metrics,
    class_count,
    class_metrics,
    gradient_bins,
    is_classification,
    loss_bins,
    loss_decreases,
    median_of,
    metric_row,
    noisy_sum,
    standard_error,
    tested_records,
)
from dpsur.mechanism.measured_updates import (
    MeasuredUpdates,
    PaddedUpdates,
    memory_of,
    with_value,
)
from dpsur.mechanism.optim import SHAPES
from dpsur.mechanism.proposer import BlockSource, GradientProposer
from dpsur.mechanism.rate_search import Block, best_exponent, between, judged, next_exponent
from dpsur.mechanism.state import Candidate, Procedure, State, Verdict
from dpsur.mechanism.streams import Draws
from dpsur.privacy.events import Event, Step, Trial
from dpsur.privacy.plans.blocks import BlockPlan

# Where the search starts: learning rate times clipping norm of plain SGD, and the rate of Adam.
FIRST_PRODUCT: Final = 8.0
FIRST_ADAM_RATE: Final = 0.08
CLIP_PART: Final = 8.0  # the clipping norm is the median gradient norm over this
# A block has learned something if it moved the loss by this much, of 2 ln K or of the median loss,
# and by so many standard errors. Where that is a lot, values alone are compared.
LEAST_MOVE, MOVE_ERRORS, COARSE_MOVE = 0.005, 3.0, 0.05
SHARE_OCTAVES: Final = 1.3  # by which the last block is slower where noise moves the weights
FIRST, BLOCK, LAST = "first weights", "block", "last block"


@dataclass(frozen=True)
class BlockGate:
    """Updates in blocks, and tests that decide about them: a procedure for a `BlockPlan`.

    `updates` makes the updates; its learning rate and clipping norm are replaced by those in force.
    `starts` are where the search starts: log2 of rate times clipping norm, or of the rate where
    gradients are rescaled anyway (`scale_free`, Adam). `momentum` is that of the optimizer.

    Formal guarantee: every update, and every release that a source of gradients is steered by, is a
    sampled Gaussian with noise in proportion to the clipping norm in force, every test a (sampled)
    Gaussian on a sum of per-record values of L2 norm at most 1, as the plan states them and in its
    order. Everything else that a step depends on is in the
    state: released values and weights that charged updates led to. A restored state takes
    weights, optimizer and averages from before the block; the step of the random numbers is not
    part of it and never goes back.
    """

    plan: BlockPlan
    updates: GradientProposer
    max_grad_norm: float
    starts: tuple[float, ...]
    schedule: str = "linear"
    clip_by_median: bool = True
    scale_free: bool = False
    momentum: float = 0.0

    # --- the procedure ----------------------------------------------------------------------------

    @property
    def setup(self) -> tuple[Event, ...]:
        """What the plan charges before the first step."""
        return self.plan.setup

    def step(self, state: State) -> Step:
        """A test where a block is done, else what the source of gradients has next."""
        return self.plan.test if self._test_is_due(state) else self._source.step(state)

    def initial_state(self) -> State:
        """The first weights, which later blocks restart from, and nothing known yet."""
        state = self.updates.initial_state()
        device = state.updates.device
        tests, blocks = len(self.plan.blocks), self._searched + 1
        count = torch.zeros((), dtype=torch.int64, device=device)
        number = torch.zeros((), dtype=torch.float64, device=device)
        memory = {
            **self._source.initial_memory(state),
            "tests": count,  # made so far
            "made": count,  # updates of the block at hand
            "values": number.repeat(tests),  # what the tests released
            "measured": number.repeat(tests, 2),  # accuracy and loss, of classifiers
            "exponents": number.repeat(blocks),  # log2 of the rates, as above
            "shares": number.repeat(blocks),  # of noise in the displacement
            "best": count,  # the block with the best value so far
            "max_grad_norm": torch.full_like(number, self.max_grad_norm),  # in force
            "rate": number,  # of the block at hand, at its start
            "size": count,  # its updates
            "loss_scale": number,
        }
        saved = {"first": state.params, "best": state.params}
        if state.average is not None:
            saved["best_average"] = state.average
        return replace(state, memory=memory, saved=saved)

    def propose(self, state: State, draws: Draws, position: Tensor) -> Candidate:
        """Make an update, or a test and what follows from it."""
        if self._test_is_due(state):
            return Candidate(self._after_test(state, self._test(state, draws)))
        if not isinstance(self._source.step(state), Trial):
            norm = memory_of(state)["max_grad_norm"]
            return Candidate(self._source.with_clip_norm(norm).released(state, draws))
        return self.update(state, draws, position)

    def update(self, state: State, draws: Draws, position: Tensor) -> Candidate:  # noqa: ARG002
        """Make an update with the rate and the clipping norm in force, which stay on the device."""
        memory = memory_of(state)
        rate, size = memory["rate"], memory["size"]
        source = self._source.with_clip_norm(memory["max_grad_norm"])
        steps = replace(
            self.updates, source=source, schedule=lambda made: rate * self._decay(made, size)
        )
        found = steps.propose(state, draws, memory["made"])
        memory = {**memory, "made": memory["made"] + 1}
        return replace(found, state=replace(found.state, memory=memory))

    def _decay(self, made: Tensor, size: Tensor | int) -> Tensor:
        """The rate after so many updates of a block, as a part of the first one."""
        return SHAPES[self.schedule](made.double() / size)

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:  # noqa: ARG002
        """Every step is kept, since every step is charged: a test restores whole blocks."""
        return Verdict(torch.ones((), dtype=torch.bool, device=state.updates.device))

    def after_rejection(self, state: State, candidate: Candidate) -> State:  # noqa: ARG002
        """Never asked for."""
        return state

    def padded(self) -> "PaddedUpdates | None":
        """The updates on padded batches; a test is no trial and is made exactly."""
        updates = self.updates.padded()
        return None if updates is None else PaddedUpdates(replace(self, updates=updates))

    # --- tests ------------------------------------------------------------------------------------

    def quantities(self) -> list[tuple[str, str]]:
        """What each test looks at, and what it releases, in order."""
        classes = is_classification(self._problem)
        first = [(FIRST, GRADIENT_NORM)] if self.clip_by_median else []
        first.append((FIRST, SCORE if classes else LOSS_SCALE))
        score = SCORE if classes else LOSS_DECREASE
        found = [(f"{BLOCK} {number + 1}", score) for number in range(self._searched)]
        return [*first, *found, (LAST, score)]

    def _test(self, state: State, draws: Draws) -> Tensor:
        """The noisy value that is due: one Gaussian query."""
        problem, memory = self._problem, memory_of(state)
        _, quantity = self.quantities()[int(memory["tests"])]
        if quantity == GRADIENT_NORM:
            with self._source.sampler.layer_randomness(draws):
                return self._noisy_sum(
                    lambda rows: gradient_bins(problem, state.params, rows), draws
                )
        if quantity == LOSS_SCALE:
            return self._noisy_sum(lambda rows: loss_bins(problem, state.params, rows), draws)
        if quantity == SCORE:
            return self._noisy_sum(lambda rows: class_metrics(problem, state.params, rows), draws)
        first, bound = _saved(state)["first"], memory["loss_scale"]
        return self._noisy_sum(
            lambda rows: loss_decreases(problem, state.params, first, bound, rows), draws
        )

    def _noisy_sum(self, values_of: Callable[[Examples], Tensor], draws: Draws) -> Tensor:
        return noisy_sum(values_of, self.plan, self.updates, draws)

    @property
    def tested(self) -> float:
        """The expected number of records that a test looks at."""
        return tested_records(self.plan, self._problem)

    @property
    def standard_error(self) -> float:
        """Of a test's mean: its noise and, of a sample, at most that of values in [-1, 1]."""
        return standard_error(self.plan, self._problem)

    @property
    def _score_scale(self) -> float:
        """The noise of a score over that of a test: it is the difference of two metrics."""
        return math.sqrt(2) * METRICS_NORM if is_classification(self._problem) else 1.0

    # --- what follows from a test: post-processing of released values ---------------------------

    def _after_test(self, state: State, noisy: Tensor) -> State:
        """The state after a test: values noted, a block kept or restored, the next rate set."""
        memory = memory_of(state)
        done = int(memory["tests"])
        _, quantity = self.quantities()[done]
        memory = {**memory, "tests": memory["tests"] + 1, "made": torch.zeros_like(memory["made"])}
        if quantity in (GRADIENT_NORM, LOSS_SCALE):
            noise = self.plan.test.noise_multiplier
            value = median_of(noisy, noise) or 0.0
            if quantity == LOSS_SCALE:
                memory["loss_scale"] = torch.full_like(memory["loss_scale"], value or 1.0)
            elif value:
                norm = memory["max_grad_norm"]
                memory["max_grad_norm"] = torch.full_like(norm, value / CLIP_PART)
        elif len(noisy) == 2:
            right, loss = (METRICS_NORM * noisy / self.tested).tolist()
            memory["measured"] = with_value(memory["measured"], done, torch.tensor([right, loss]))
            value = right - loss
        else:
            value = float(noisy) / self.tested
        memory["values"] = with_value(memory["values"], done, value)
        state = replace(state, memory=memory)
        block = done - self._before_blocks
        if block < 0:
            return self._with_rate(state, 0) if block == -1 else state
        if block == self._searched:
            return self._last_or_best(state)
        return self._with_rate(self._restarted(self._noted(state, block)), block + 1)

    def _noted(self, state: State, block: int) -> State:
        """The same state, with a searched block's share of noise and, if it is best, its end."""
        memory, saved = dict(memory_of(state)), dict(_saved(state))
        memory["shares"] = with_value(memory["shares"], block, self._noise_share(state, block))
        values = self._block_values(state)
        if values[block] > max(values[:block], default=-math.inf):
            memory["best"] = torch.full_like(memory["best"], block)
            saved["best"] = state.params
            if state.average is not None:
                saved["best_average"] = state.average
        return replace(state, memory=memory, saved=saved)

    def _restarted(self, state: State) -> State:
        """The first weights again: nothing of the block is left but what was released."""
        first = _saved(state)["first"]
        return replace(
            state,
            params=first,
            optimizer=self.updates.optimizer.init(first),
            updates=torch.zeros_like(state.updates),
            average=None if state.average is None else first,
            memory=self._source.restarted(memory_of(state)),
        )

    def _with_rate(self, state: State, block: int) -> State:
        """The rate of the next block, from the values of those before it."""
        memory = memory_of(state)
        tried = self._blocks(state, block)
        if block < self._searched:
            exponent = next_exponent(self.starts, tried)
        elif not tried:
            exponent = self.starts[-1]
        else:
            exponent = best_exponent(tried)
            places = [one.exponent for one in tried]
            share = between(exponent, places, memory["shares"].tolist()[:block])
            exponent -= SHARE_OCTAVES * share**2
        memory["exponents"] = with_value(memory["exponents"], block, exponent)
        state = replace(state, memory=memory)
        size = self.plan.blocks[block + self._before_blocks]
        memory["rate"] = torch.full_like(memory["rate"], self._rate(state, block))
        memory["size"] = torch.full_like(memory["size"], size)
        return replace(state, memory=memory)

    def _blocks(self, state: State, count: int) -> list[Block]:
        """What the first blocks of the search say of their rates."""
        memory, before = memory_of(state), self._before_blocks
        exponents, values = memory["exponents"].tolist(), self._block_values(state)
        if is_classification(self._problem):
            losses = memory["measured"][:, 1].tolist()
            first_value, first_loss = memory["values"].tolist()[before - 1], losses[before - 1]
            noise = METRICS_NORM * self.standard_error
        else:  # values are decreases of the loss
            losses = [-value for value in memory["values"].tolist()]
            first_value, first_loss, noise = 0.0, 0.0, self.standard_error
        margin = max(LEAST_MOVE, MOVE_ERRORS * noise)
        if margin > COARSE_MOVE:
            return [Block(exponents[n], values[n]) for n in range(count)]
        return [
            judged(exponents[n], values[n], losses[before + n], first_value, first_loss, margin)
            for n in range(count)
        ]

    def _last_or_best(self, state: State) -> State:
        """The end of the last block, unless a searched block was clearly better."""
        *searched, last = self._block_values(state)
        if not searched or last >= max(searched) - 2 * self.standard_error * self._score_scale:
            return state
        saved = _saved(state)
        average = None if state.average is None else saved["best_average"]
        optimizer = self.updates.optimizer.init(saved["best"])
        return replace(state, params=saved["best"], optimizer=optimizer, average=average)

    def _noise_share(self, state: State, block: int) -> float:
        """How much of a block's way is a random walk of the noise; 1 where that is not known."""
        if self.scale_free:
            return 1.0
        memory, first = memory_of(state), _saved(state)["first"]
        update, size = self._source.event(state), self.plan.blocks[block + self._before_blocks]
        squares = [
            (value - first[name]).double().square().sum() for name, value in state.params.items()
        ]
        way = float(torch.stack(squares).sum())
        if not way > 0 or math.isinf(way):
            return 1.0
        rates = self._rate(state, block) * self._decay(torch.arange(size), size)
        rates = rates / (1 - self.momentum)
        batch = update.sample_rate * len(self._problem.train)
        step = update.noise_multiplier * float(memory["max_grad_norm"]) / batch
        weights = sum(value.numel() for value in state.params.values())
        return min(1.0, float(rates.square().sum()) * step**2 * weights / way)

    # --- where a run stands -----------------------------------------------------------------------

    @property
    def _before_blocks(self) -> int:
        """Tests at the first weights."""
        return 2 if self.clip_by_median else 1

    @property
    def _searched(self) -> int:
        """Blocks before the last one."""
        return len(self.plan.blocks) - self._before_blocks - 1

    @property
    def _problem(self) -> Problem:
        return self.updates.problem

    @property
    def _source(self) -> BlockSource:
        return cast(BlockSource, self.updates.source)

    def _test_is_due(self, state: State) -> bool:
        memory = memory_of(state)
        done = int(memory["tests"])
        sizes = self.plan.blocks
        return done >= len(sizes) or int(memory["made"]) >= sizes[done]

    def _block_values(self, state: State) -> list[float]:
        values: list[float] = memory_of(state)["values"].tolist()
        return values[self._before_blocks :]

    def _rate(self, state: State, block: int) -> float:
        """The learning rate that a block starts with."""
        memory = memory_of(state)
        rate: float = 2.0 ** float(memory["exponents"][block])
        return rate if self.scale_free else rate / float(memory["max_grad_norm"])

    def metrics(self, state: State) -> list[dict[str, Any]]:
        """What the tests released so far, which is paid for and public."""
        memory = memory_of(state)
        values, done = memory["values"].tolist(), int(memory["tests"])
        found = []
        for number, (after, quantity) in enumerate(self.quantities()[:done]):
            block = number - self._before_blocks
            rate = self._rate(state, block) if block >= 0 else None
            scale = self._score_scale if quantity in (SCORE, LOSS_DECREASE) else None
            error = self.standard_error
            found.append(metric_row(number, after, quantity, rate, values[number], scale, error))
            if quantity == SCORE:
                pair, bound = memory["measured"][number].tolist(), self._loss_bound
                found += both_metrics(number, after, rate, pair, bound, error)
        return found

    @property
    def _loss_bound(self) -> float:
        return 2 * math.log(class_count(self._problem))


def released_metrics(procedure: Procedure, state: State) -> list[dict[str, Any]] | None:
    """The noisy values that a run has paid for so far; None where it pays for none."""
    if isinstance(procedure, BlockGate | MeasuredUpdates):
        return procedure.metrics(state)
    return None


def _saved(state: State) -> dict[str, Params]:
    assert state.saved is not None
    return dict(state.saved)
