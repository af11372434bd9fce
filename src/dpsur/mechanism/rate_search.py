"""Which learning rate a block tries next, and which one wins: rates by their logarithm to base 2.

The values come from noisy tests, so all of this is post-processing. Why this rule and these
constants: docs/selection.md. `RateSearch` at the end is the whole rule: which tests are made, and
what follows from their values. `fit` and `PrivacyEngine` make the updates and the tests, and do
what it decides.
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
from dpsur.mechanism.optim import SHAPES
from dpsur.privacy.plans.blocks import BlockPlan

# Where the search starts: learning rate times clipping norm of plain SGD, and the rate of Adam.
FIRST_PRODUCT: Final = 8.0
FIRST_ADAM_RATE: Final = 0.08
# Blocks of a search, and updates in each of them.
USUAL_BLOCKS: Final = 4
BLOCKS_PER_RUN, SHORTEST_BLOCK = 16, 40
CLIP_PART: Final = 8.0  # the clipping norm is the median gradient norm over this
# A block has learned something if it moved the loss by this much, of 2 ln K or of the median loss,
# and by so many standard errors. Where that is a lot, values alone are compared.
LEAST_MOVE, MOVE_ERRORS, COARSE_MOVE = 0.005, 3.0, 0.05
SHARE_OCTAVES: Final = 1.3  # by which the last block is slower where noise moves the weights
FIRST, BLOCK, LAST = "first weights", "block", "last block"
# Names of states that are saved to be restored: the one before the first update, and the end of the
# best block so far.
START, BEST = "first", "best"

SEARCH_STEP: Final = 1.5  # octaves from the best rate to its neighbours
LONG_STEP: Final = 3.0  # octaves, while no rate has learned much, or all were too high
LEARNED: Final = 0.15  # by how much the value of a block that has learned is above the first
HARM: Final = 0.1  # by how much a loss rises where the rate was too high
# What a block did: nothing, harm, little, or something worth comparing with its neighbours.
TOO_LOW, TOO_HIGH, WEAK, USEFUL = "too low", "too high", "weak", "useful"


@dataclass(frozen=True)
class Block:
    """A rate that was tried, the value that its test released, and what that says of the rate."""

    exponent: float
    value: float
    kind: str = USEFUL


def judged(
    exponent: float, value: float, loss: float, first_value: float, first_loss: float, margin: float
) -> Block:
    """A block whose loss and value are compared with those of the first weights.

    A loss that has not moved by the margin means that nothing was learned, whatever the value: the
    predictions of weights that hardly moved can change a lot.
    """
    fall, gain = first_loss - loss, value - first_value
    if fall > margin and gain > 0:
        return Block(exponent, value, USEFUL if gain >= LEARNED else WEAK)
    if fall < -margin and gain >= LEARNED:  # sure of itself, and right
        return Block(exponent, value, WEAK)
    return Block(exponent, value, TOO_HIGH if fall < -HARM else TOO_LOW)


def next_exponent(starts: Sequence[float], tried: Sequence[Block]) -> float:
    """Which rate to try next.

    All starts first. While none has learned anything, long steps up, or down if all were too high,
    or half way between both. If the best has learned little, one long step up. Then the neighbours
    of the best, and last the middle between it and the better neighbour. So a start that is far off
    costs one block and nothing else.
    """
    if len(tried) < len(starts):
        return starts[len(tried)]
    best = _best(tried)
    high = _exponents(tried, TOO_HIGH)
    highest = max((block.exponent for block in tried if block.kind != TOO_HIGH), default=None)
    if best is None:
        if highest is None:
            return min(high) - LONG_STEP
        return (highest + min(high)) / 2 if high else highest + LONG_STEP
    if best.kind == WEAK and not high and highest is not None and highest <= max(starts):
        return highest + LONG_STEP
    below, above = _neighbours(best, tried)
    if above is None:
        return best.exponent + SEARCH_STEP
    if below is None:
        return best.exponent - SEARCH_STEP
    better = above if above.value > below.value else below
    return (best.exponent + better.exponent) / 2


def best_exponent(tried: Sequence[Block]) -> float:
    """The top of a parabola through the best value and its neighbours, at most half way to them.

    Without a useful rate it is the highest that did no harm.
    """
    best = _best(tried)
    if best is None:
        low = _exponents(tried, TOO_LOW)
        return max(low) if low else min(_exponents(tried, TOO_HIGH)) - LONG_STEP
    below, above = _neighbours(best, tried)
    if below is None or above is None:
        return best.exponent
    left, middle, right = below.exponent, best.exponent, above.exponent
    rise = (middle - left) * (best.value - above.value)
    fall = (right - middle) * (best.value - below.value)
    if not rise + fall > 0:
        return middle
    peak = middle - ((middle - left) * rise - (right - middle) * fall) / (2 * (rise + fall))
    return min(max(peak, (left + middle) / 2), (middle + right) / 2)


def between(place: float, places: Sequence[float], heights: Sequence[float]) -> float:
    """A height by linear interpolation, constant beyond the ends."""
    pairs = sorted(zip(places, heights, strict=True))
    known, levels = [place for place, _ in pairs], [height for _, height in pairs]
    for index in range(1, len(known)):
        if place <= known[index] and known[index] > known[index - 1]:
            part = max(0.0, (place - known[index - 1]) / (known[index] - known[index - 1]))
            return levels[index - 1] + part * (levels[index] - levels[index - 1])
    return levels[-1]


def _best(tried: Sequence[Block]) -> Block | None:
    """The block of the highest value among those that have learned something."""
    useful = [block for block in tried if block.kind in (USEFUL, WEAK)]
    return max(useful, key=lambda block: block.value, default=None)


def _exponents(tried: Sequence[Block], kind: str) -> list[float]:
    return [block.exponent for block in tried if block.kind == kind]


def _neighbours(best: Block, tried: Sequence[Block]) -> tuple[Block | None, Block | None]:
    """The nearest rates below and above the best, if they are at most a step away."""
    reach = SEARCH_STEP * (1 + 1e-9)
    below = [b for b in tried if 0 < best.exponent - b.exponent <= reach]
    above = [b for b in tried if 0 < b.exponent - best.exponent <= reach]
    return (
        max(below, key=lambda block: block.exponent, default=None),
        min(above, key=lambda block: block.exponent, default=None),
    )


# --- the whole rule -------------------------------------------------------------------------------

# What is known of a run: released values and what follows from them, as tensors of a checkpoint.
Memory = Mapping[str, Tensor]


@dataclass(frozen=True)
class Walk:
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
class RateSearch:
    """Which tests a run in blocks makes, and what follows from their values.

    `starts` are where the search starts: log2 of rate times clipping norm, or of the rate where
    gradients are rescaled anyway (`scale_free`, Adam). `momentum` is that of the optimizer.
    `classes` is 0 unless the model is a classifier. `records` is the size of the data set.

    It sees released values and released weights only, so whatever it decides is post-processing.
    """

    plan: BlockPlan
    records: int
    classes: int
    max_grad_norm: float
    starts: tuple[float, ...]
    schedule: str = "linear"
    clip_by_median: bool = True
    scale_free: bool = False
    momentum: float = 0.0

    def initial_memory(self, device: torch.device | None = None) -> dict[str, Tensor]:
        """Nothing is known yet."""
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
            "max_grad_norm": torch.full_like(number, self.max_grad_norm),  # in force
            "rate": number,  # of the block at hand, at its start
            "size": count,  # its updates
            "before": count,  # those of them that were made before the last test
            "loss_scale": number,
        }

    def learning_rate(self, memory: Memory, made: int | Tensor) -> Tensor:
        """The rate in force, so many updates after the last test."""
        rate: Tensor = memory["rate"] * self._decay(memory["before"] + made, memory["size"])
        return rate

    def _decay(self, made: Tensor, size: Tensor | int) -> Tensor:
        """The rate after so many updates of a block, as a part of the first one."""
        return SHAPES[self.schedule](made.double() / size)

    # --- tests ------------------------------------------------------------------------------------

    @cached_property
    def quantities(self) -> list[tuple[str, str]]:
        """What each test looks at, and what it releases, in order."""
        first = [(FIRST, GRADIENT_NORM)] if self.clip_by_median else []
        first.append((FIRST, SCORE if self.classes else LOSS_SCALE))
        score = SCORE if self.classes else LOSS_DECREASE
        found = [(f"{BLOCK} {number + 1}", score) for number in range(self._searched)]
        return [*first, *found, (LAST, score)]

    def quantity(self, memory: Memory) -> str:
        """What the next test releases."""
        return self.quantities[int(memory["tests"])][1]

    @property
    def tested(self) -> float:
        """The expected number of records that a test looks at."""
        return tested_records(self.plan, self.records)

    @property
    def standard_error(self) -> float:
        """Of a test's mean: its noise and, of a sample, at most that of values in [-1, 1]."""
        return standard_error(self.plan, self.records)

    @property
    def _score_scale(self) -> float:
        """The noise of a score over that of a test: it is the difference of two metrics."""
        return math.sqrt(2) * METRICS_NORM if self.classes else 1.0

    # --- what follows from a test -----------------------------------------------------------------

    def after_test(self, memory: Memory, noisy: Tensor, walk: Callable[[], Walk]) -> Decision:
        """Note the values of a test; keep or restart a block; set the next rate.

        `walk` says how the block at hand has moved the weights.
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
                memory["max_grad_norm"] = torch.full_like(norm, value / CLIP_PART)
        elif len(noisy) == 2:
            right, loss = (METRICS_NORM * noisy / self.tested).tolist()
            memory["measured"] = with_value(memory["measured"], done, torch.tensor([right, loss]))
            value = right - loss
        else:
            value = float(noisy) / self.tested
        memory["values"] = with_value(memory["values"], done, value)
        block = done - self._before_blocks
        if block < 0:
            return Decision(self._with_rate(memory, 0) if block == -1 else memory)
        if block == self._searched:
            return Decision(memory, restore=None if self._last_is_best(memory) else BEST)
        share = self._noise_share(memory, block, walk)
        memory["shares"] = with_value(memory["shares"], block, share)
        values = self._block_values(memory)
        best = values[block] > max(values[:block], default=-math.inf)
        if best:
            memory["best"] = torch.full_like(memory["best"], block)
        return Decision(self._with_rate(memory, block + 1), (BEST,) if best else (), START)

    def _with_rate(self, memory: Memory, block: int) -> Memory:
        """The rate of the next block, from the values of those before it."""
        memory, tried = dict(memory), self._blocks(memory, block)
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
        size = self.plan.blocks[block + self._before_blocks]
        memory["rate"] = torch.full_like(memory["rate"], self._rate(memory, block))
        memory["size"] = torch.full_like(memory["size"], size)
        return memory

    def _blocks(self, memory: Memory, count: int) -> list[Block]:
        """What the first blocks of the search say of their rates."""
        before = self._before_blocks
        exponents, values = memory["exponents"].tolist(), self._block_values(memory)
        if self.classes:
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

    def _last_is_best(self, memory: Memory) -> bool:
        """Whether no searched block was clearly better than the last one."""
        *searched, last = self._block_values(memory)
        if not searched:
            return True
        return last >= max(searched) - 2 * self.standard_error * self._score_scale

    def _noise_share(self, memory: Memory, block: int, walk: Callable[[], Walk]) -> float:
        """How much of a block's way is a random walk of the noise; 1 where that is not known."""
        if self.scale_free:
            return 1.0
        found, size = walk(), self.plan.blocks[block + self._before_blocks]
        way = found.squared_distance
        if not way > 0 or math.isinf(way):
            return 1.0
        rates = self._rate(memory, block) * self._decay(torch.arange(size), size)
        rates = rates / (1 - self.momentum)
        step = found.noise_multiplier * float(memory["max_grad_norm"]) / found.batch_size
        return min(1.0, float(rates.square().sum()) * step**2 * found.weights / way)

    # --- where a run stands -----------------------------------------------------------------------

    @property
    def _before_blocks(self) -> int:
        """Tests at the first weights."""
        return 2 if self.clip_by_median else 1

    @property
    def _searched(self) -> int:
        """Blocks before the last one."""
        return len(self.plan.blocks) - self._before_blocks - 1

    def _block_values(self, memory: Memory) -> list[float]:
        values: list[float] = memory["values"].tolist()
        return values[self._before_blocks :]

    def _rate(self, memory: Memory, block: int) -> float:
        """The learning rate that a block starts with."""
        rate: float = 2.0 ** float(memory["exponents"][block])
        return rate if self.scale_free else rate / float(memory["max_grad_norm"])

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
                pair, bound = memory["measured"][number].tolist(), 2 * math.log(self.classes)
                found += both_metrics(number, after, rate, pair, bound, error)
        return found
