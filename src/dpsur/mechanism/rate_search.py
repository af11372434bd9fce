"""The rule by which a run in blocks finds its learning rate.

`RateSearch` says which tests are made, and what follows from their values. `fit` and
`PrivacyEngine` make the updates and the tests, and do what it decides. Why this rule and these
constants: docs/selection.md.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from dpsur.mechanism.block_tests import (
    GRADIENT_NORM,
    LOSS_DECREASE,
    LOSS_SCALE,
    METRICS_NORM,
    SCORE,
    both_metrics,
    median_of,
    metric_row,
    standard_error,
    tested_records,
    with_value,
)
from dpsur.mechanism.proposer import SHAPES
from dpsur.mechanism.state import START
from dpsur.privacy.plan import Plan

# Where the search starts: learning rate times clipping norm of plain SGD, and the rate of Adam.
FIRST_PRODUCT: Final = 24.0
FIRST_ADAM_RATE: Final = 0.08
# Blocks of a search, and updates in each of them.
USUAL_BLOCKS: Final = 3
BLOCKS_PER_RUN, SHORTEST_BLOCK = 16, 40
# A block has learned something if it moved half the Brier score by this much, or the loss by this
# part of its median, and by so many standard errors. Where that is a lot, values are compared.
LEAST_MOVE, MOVE_ERRORS, COARSE_MOVE = 0.005, 3.0, 0.05
# Values within so many standard errors of each other are a tie, which goes to the lower rate.
TIE_ERRORS: Final = 2.0
# Where noise moves the weights, the best rate of a run falls with this power of its length.
LENGTH_POWER: Final = 0.75
ADAM_SHARE: Final = 0.5  # of noise, where steps do not grow with the gradient and none is measured
FIRST, BLOCK, LAST = "first weights", "block", "last block"

SEARCH_STEP: Final = 1.5  # octaves from the best rate to its neighbours
LONG_STEP: Final = 3.0  # octaves, while no rate has learned much, or all were too high
LEARNED: Final = 0.15  # by how much the value of a block that has learned is above the first
HARM: Final = 0.1  # by how much a loss rises where the rate was too high
# What a block did: nothing, harm, little, or something worth comparing with its neighbours.
TOO_LOW, TOO_HIGH, WEAK, USEFUL = "too low", "too high", "weak", "useful"

# What is known of a run: released values and what follows from them, as tensors of a checkpoint.
Memory = Mapping[str, Tensor]


# --- which rate is tried next, and which one wins: by their logarithm to base 2 ------------------


@dataclass(frozen=True)
class TriedRate:
    """A rate that was tried, the value that its test released, and what that says of the rate."""

    exponent: float
    value: float
    kind: str = USEFUL


def classify(
    exponent: float, value: float, loss: float, first_value: float, first_loss: float, margin: float
) -> TriedRate:
    """A block whose loss and value are compared with those of the first weights.

    A loss that has not moved by the margin means that nothing was learned, at any value: the
    predictions of weights that hardly moved can change a lot.
    """
    fall, gain = first_loss - loss, value - first_value
    if fall > margin and gain > 0:
        return TriedRate(exponent, value, USEFUL if gain >= LEARNED else WEAK)
    if fall < -margin and gain >= LEARNED:  # sure of itself, and right
        return TriedRate(exponent, value, WEAK)
    return TriedRate(exponent, value, TOO_HIGH if fall < -HARM else TOO_LOW)


def next_exponent(start: float, tried: Sequence[TriedRate], tie: float = 0.0) -> float:
    """Which rate to try next.

    The start first. While none has learned anything, long steps up, or down if all were too high,
    or half way between both. If the best has learned little, one long step up. Then the neighbours
    of the best, first towards the nearest other rate, or down, and last the middle between it and
    the better neighbour. Of rates whose values are within a `tie` the lowest is the best.
    """
    if not tried:
        return start
    best = _best(tried, tie)
    high = _exponents(tried, TOO_HIGH)
    highest = max((block.exponent for block in tried if block.kind != TOO_HIGH), default=None)
    if best is None:
        if highest is None:
            return min(high) - LONG_STEP
        return (highest + min(high)) / 2 if high else highest + LONG_STEP
    if best.kind == WEAK and not high and highest is not None and highest <= start:
        return highest + LONG_STEP
    below, above = (_nearest(best, tried, side, SEARCH_STEP) for side in (-1, 1))
    if below is None and above is None:
        ways = [block.exponent - best.exponent for block in tried if block is not best]
        return best.exponent + math.copysign(SEARCH_STEP, min(ways, key=abs, default=-1.0))
    if above is None:
        return best.exponent + SEARCH_STEP
    if below is None:
        return best.exponent - SEARCH_STEP
    better = above if above.value > below.value else below
    return (best.exponent + better.exponent) / 2


def best_exponent(tried: Sequence[TriedRate], tie: float = 0.0) -> float:
    """The top of a parabola through the best value and two beside it, at most half a step away.

    These are its neighbours. At an end they are the neighbour and the one beyond it; where values
    still rise without slowing down, it is half a step further. Where the tests cannot tell rates
    apart, values within a `tie`, it is the lowest of those, without a parabola through noise.
    Without a useful rate it is the highest that did no harm.
    """
    best = _best(tried, tie)
    if best is None:
        low = _exponents(tried, TOO_LOW)
        return max(low) if low else min(_exponents(tried, TOO_HIGH)) - LONG_STEP
    if len(_tied(tried, tie)) > 1:
        return best.exponent
    below, above = (_nearest(best, tried, side, SEARCH_STEP) for side in (-1, 1))
    if below is not None and above is not None:
        first, second = below, above
    else:
        end, side = (below, -1) if above is None else (above, 1)
        beyond = None if end is None else _nearest(end, tried, side, SEARCH_STEP)
        if end is None or beyond is None or TOO_HIGH in (end.kind, beyond.kind):
            return best.exponent
        first, second = end, beyond
    return best.exponent + _top(best, first, second)


def _top(best: TriedRate, first: TriedRate, second: TriedRate) -> float:
    """Where a parabola is highest, from the best on: not beyond the middle to a neighbour."""
    (x, dx), (y, dy) = (
        (block.exponent - best.exponent, block.value - best.value) for block in (first, second)
    )
    low, high = (min(x, y), max(x, y)) if x * y < 0 else (-SEARCH_STEP, SEARCH_STEP)
    curve = (dy / y - dx / x) / (y - x)
    slope = dx / x - curve * x
    if curve >= 0:  # no top
        peak = math.copysign(math.inf, slope) if slope else 0.0
    else:
        peak = -slope / (2 * curve)
    return min(max(peak, low / 2), high / 2)


def between(place: float, places: Sequence[float], heights: Sequence[float]) -> float:
    """A height by linear interpolation, constant beyond the ends."""
    pairs = sorted(zip(places, heights, strict=True))
    known, levels = [place for place, _ in pairs], [height for _, height in pairs]
    for index in range(1, len(known)):
        if place <= known[index] and known[index] > known[index - 1]:
            part = max(0.0, (place - known[index - 1]) / (known[index] - known[index - 1]))
            return levels[index - 1] + part * (levels[index] - levels[index - 1])
    return levels[-1]


def _best(tried: Sequence[TriedRate], tie: float) -> TriedRate | None:
    """The block of the highest value among those that have learned something; the lowest rate."""
    return min(_tied(tried, tie), key=lambda block: block.exponent, default=None)


def _tied(tried: Sequence[TriedRate], tie: float) -> list[TriedRate]:
    """The blocks that have learned something, and whose value may be the highest."""
    useful = [block for block in tried if block.kind in (USEFUL, WEAK)]
    highest = max((block.value for block in useful), default=0.0)
    return [block for block in useful if block.value >= highest - tie]


def _exponents(tried: Sequence[TriedRate], kind: str) -> list[float]:
    return [block.exponent for block in tried if block.kind == kind]


def _nearest(
    block: TriedRate, tried: Sequence[TriedRate], side: int, reach: float
) -> TriedRate | None:
    """The nearest rate on a side, -1 for below and 1 for above, if it is within reach."""
    beside = [b for b in tried if 0 < side * (b.exponent - block.exponent) <= reach * (1 + 1e-9)]
    return min(beside, key=lambda b: abs(b.exponent - block.exponent), default=None)


# --- tests, and what follows from them ------------------------------------------------------------


@dataclass(frozen=True)
class Displacement:
    """How far a block has moved the weights, and what its updates were."""

    squared_distance: float
    weights: int
    noise_multiplier: float
    batch_size: float  # expected


@dataclass(frozen=True)
class Decision:
    """What follows from a test.

    The state at the test is saved under the names in `save`. Then the run continues from the state
    that is saved as `restore`, with an optimizer at rest, or from where it is if that is None. For
    every name and factor in `add`, the way from the first weights to the saved ones is added to the
    restored weights, times the factor.
    """

    memory: Memory
    save: tuple[str, ...] = ()
    restore: str | None = None
    add: tuple[tuple[str, float], ...] = ()


def end_of(block: int) -> str:
    """The name of the state at the end of a block of the search, counted from 0."""
    return f"{BLOCK} {block + 1}"


def search_starts(
    *,
    scale_free: bool,
    momentum: float = 0.0,
    learning_rate: float | None = None,
    max_grad_norm: float = 1.0,
) -> tuple[float, ...]:
    """Where the search starts: by rule, and at a learning rate that was given, as exponents."""
    by_rule = FIRST_ADAM_RATE if scale_free else FIRST_PRODUCT * (1 - momentum)
    if learning_rate is None:
        return (math.log2(by_rule),)
    given = learning_rate if scale_free else learning_rate * max_grad_norm
    return math.log2(by_rule), math.log2(given)


def search_blocks(
    updates: int,
    starts: int,
    *,
    clip_by_median: bool,
    blocks: int | None = None,
    block_updates: int | None = None,
) -> tuple[int, ...]:
    """The updates before each test: of the first weights, of the search, and of the last block."""
    count = blocks or USUAL_BLOCKS + starts - 1
    size = block_updates or max(SHORTEST_BLOCK, -(-updates // BLOCKS_PER_RUN))
    first = (0, 0) if clip_by_median else (0,)
    return (*first, *[size] * count, updates)


@dataclass(frozen=True)
class RateRule:
    """The settings of a search, which are fixed before the run.

    `starts` are where the search starts and, if a learning rate is given, what its last block tries
    (a bad one costs that block and nothing else): log2 of rate times clipping norm, or of the rate
    where gradients are rescaled anyway (`scale_free`, Adam). `momentum` is that of the optimizer.
    `length_power` says how fast the best rate falls with the length of a block where noise
    dominates, and `head_start` whether the last block starts from where the short ones went.
    """

    max_grad_norm: float
    starts: tuple[float, ...]
    schedule: str = "linear"
    clip_by_median: bool = True
    scale_free: bool = False
    momentum: float = 0.0
    length_power: float = LENGTH_POWER
    head_start: bool = True


@dataclass(frozen=True)
class RateSearch:
    """Which tests a run in blocks makes, and what follows from their values.

    `classes` is 0 unless the model is a classifier. `records` is the size of the data set.

    It sees released values and released weights only, so whatever it decides is post-processing.
    """

    plan: Plan
    records: int
    classes: int
    rule: RateRule

    def initial_memory(self, device: torch.device | None = None) -> dict[str, Tensor]:
        tests, blocks = len(self.plan.blocks), self._searched + 1
        count = torch.zeros((), dtype=torch.int64, device=device)
        number = torch.zeros((), dtype=torch.float64, device=device)
        return {
            "tests": count,  # made so far
            "values": number.repeat(tests),  # what the tests released
            "measured": number.repeat(tests, 2),  # accuracy and loss, of classifiers
            "exponents": number.repeat(blocks),  # log2 of the rates, as above
            "shares": number.repeat(blocks),  # of noise in the displacement
            "best": count,  # the block with the best value so far
            "max_grad_norm": torch.full_like(number, self.rule.max_grad_norm),  # in force
            "rate": number,  # of the block at hand, at its start
            "size": count,  # its updates
            "before": count,  # those of them that were made before the last test
            "loss_scale": number,
        }

    def learning_rate(self, memory: Memory, made: int | Tensor) -> Tensor:
        """The rate in force, so many updates after the last test."""
        shape, passed = SHAPES[self.rule.schedule], (memory["before"] + made).double()
        rate: Tensor = memory["rate"] * shape(passed / memory["size"])
        return rate

    # --- tests ------------------------------------------------------------------------------------

    @cached_property
    def quantities(self) -> list[tuple[str, str]]:
        """What each test looks at, and what it releases, in order."""
        first = [(FIRST, GRADIENT_NORM)] if self.rule.clip_by_median else []
        first.append((FIRST, SCORE if self.classes else LOSS_SCALE))
        score = SCORE if self.classes else LOSS_DECREASE
        found = [(end_of(number), score) for number in range(self._searched)]
        return [*first, *found, (LAST, score)]

    @property
    def ends(self) -> list[str]:
        return [end_of(block) for block in range(self._searched)]

    def quantity(self, memory: Memory) -> str:
        return self.quantities[int(memory["tests"])][1]

    @property
    def tested(self) -> float:
        return tested_records(self.plan, self.records)

    @property
    def standard_error(self) -> float:
        return standard_error(self.plan, self.records)

    @property
    def _score_scale(self) -> float:
        """The noise of a score over that of a test: it is the difference of two metrics."""
        return math.sqrt(2) * METRICS_NORM if self.classes else 1.0

    # --- what follows from a test -----------------------------------------------------------------

    def after_test(
        self, memory: Memory, noisy: Tensor, displacement: Callable[[], Displacement]
    ) -> Decision:
        """Note the values of a test; keep or restart a block; set the next rate.

        `displacement` says how the block at hand has moved the weights.
        """
        done, quantity = int(memory["tests"]), self.quantity(memory)
        memory = {
            **memory,
            "tests": memory["tests"] + 1,
            "before": torch.zeros_like(memory["before"]),
        }
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
        block = done - self._before_blocks
        if block < 0:
            return Decision(self._with_rate(memory, 0) if block == -1 else memory)
        if block == self._searched:
            # No searched block may be clearly better than the last one.
            *searched, last = self._block_values(memory)
            if last >= max(searched, default=-math.inf) - self._tie:
                return Decision(memory)
            return Decision(memory, restore=end_of(int(memory["best"])))
        share = self._noise_share(memory, block, displacement)
        memory["shares"] = with_value(memory["shares"], block, share)
        values = self._block_values(memory)
        if values[block] > max(values[:block], default=-math.inf):
            memory["best"] = torch.full_like(memory["best"], block)
        memory = self._with_rate(memory, block + 1)
        is_last = block + 1 == self._searched
        head_start = self._head_start(memory) if is_last else ()
        return Decision(memory, (end_of(block),), START, head_start)

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
        if self.classes:
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
        noise = METRICS_NORM if self.classes else 1.0
        return max(LEAST_MOVE, MOVE_ERRORS * noise * self.standard_error)

    @property
    def _tie(self) -> float:
        """How far apart two values may be without telling their rates apart."""
        return TIE_ERRORS * self.standard_error * self._score_scale

    def _noise_share(
        self, memory: Memory, block: int, displacement: Callable[[], Displacement]
    ) -> float:
        """Share of a block's displacement that noise alone explains; infinite where weights are."""
        found, size = displacement(), self.plan.blocks[block + self._before_blocks]
        way = found.squared_distance
        if not math.isfinite(way):
            return math.inf
        if self.rule.scale_free:
            return ADAM_SHARE
        if way == 0:
            return 1.0
        passed = torch.arange(size, dtype=torch.float64, device="cpu") / size
        rates = self._rate(memory, block) * SHAPES[self.rule.schedule](passed)
        # With momentum, noise moves the weights in the update it is drawn for and in all later ones
        reach, squares = 0.0, 0.0
        for rate in reversed(rates.tolist()):
            reach = rate + self.rule.momentum * reach
            squares += reach**2
        step = found.noise_multiplier * float(memory["max_grad_norm"]) / found.batch_size
        return min(1.0, squares * step**2 * found.weights / way)

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

    def metrics(self, memory: Memory) -> list[dict[str, Any]]:
        """What the tests released so far, which is paid for and public."""
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
