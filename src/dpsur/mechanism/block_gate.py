"""A gate over blocks of updates: rare, precise tests, every one of them charged.

The steps of a run are updates and tests, in an order that is fixed before it starts (`BlockPlan`):
a test at the first weights, some short blocks of updates that each begin at the first weights and
end with a test, then the long last block and its test. What a test says decides about the block
before it and about the learning rate of the next one. All of that is post-processing of noisy
values that are paid for. Rule and constants are explained in docs/selection.md.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from dpsur.functional.parameters import Params
from dpsur.functional.problem import EVALUATION_ROWS, Problem, example_losses
from dpsur.functional.records import Examples
from dpsur.mechanism.dp_gradient import add_gaussian
from dpsur.mechanism.optim import Schedule
from dpsur.mechanism.proposer import DpGradient, GradientProposer
from dpsur.mechanism.rate_search import best_exponent, between, next_exponent
from dpsur.mechanism.state import Candidate, Procedure, State, Verdict
from dpsur.mechanism.streams import VAL_BATCH, VAL_NOISE, Draws
from dpsur.per_example import ClippedSum, clipped_norms
from dpsur.privacy.events import Event, SampledGaussian, Step, Trial
from dpsur.privacy.plans.blocks import BlockPlan

# Where the search starts: learning rate times clipping norm of plain SGD, and the rate of Adam.
FIRST_PRODUCT: Final = 8.0
FIRST_ADAM_RATE: Final = 0.08
CLIP_PART: Final = 8.0  # the clipping norm is the median gradient norm over this
SHARE_OCTAVES: Final = 1.3  # by which the last block is slower where noise moves the weights
# Bins of a noisy histogram: half octaves from 2^-24 to 2^24, what lies outside in the end bins.
LOWEST_OCTAVE, HIGHEST_OCTAVE, BINS_PER_OCTAVE = -24, 24, 2
BINS: Final = (HIGHEST_OCTAVE - LOWEST_OCTAVE) * BINS_PER_OCTAVE
# A bin whose noisy count is below this many standard deviations counts as empty.
EMPTY_BELOW: Final = 2.0

GRADIENT_NORM, LOSS_SCALE = "median gradient norm", "median loss"
SCORE, LOSS_DECREASE = "score", "clipped loss decrease"
FIRST, BLOCK, LAST = "first weights", "block", "last block"


@dataclass(frozen=True)
class BlockGate:
    """Updates in blocks, and tests that decide about them: a procedure for a `BlockPlan`.

    `updates` makes the updates; its learning rate and clipping norm are replaced by those in force.
    `exponent` is where the search starts: log2 of rate times clipping norm, or of the rate where
    gradients are rescaled anyway (`scale_free`, Adam). `momentum` is that of the optimizer.

    Formal guarantee: every update is a sampled Gaussian with noise in proportion to the clipping
    norm in force, every test a (sampled) Gaussian on a sum of per-record values of L2 norm at most
    1, as the plan states them and in its order. Everything else that a step depends on is in the
    state: released values and weights that charged updates led to. A restored state takes
    weights, optimizer and averages from before the block; the step of the random numbers is not
    part of it and never goes back.
    """

    plan: BlockPlan
    updates: GradientProposer
    max_grad_norm: float
    exponent: float
    clip_by_median: bool = True
    scale_free: bool = False
    momentum: float = 0.0

    def __post_init__(self) -> None:
        assert isinstance(self.updates.source, DpGradient)

    # --- the procedure ----------------------------------------------------------------------------

    @property
    def setup(self) -> tuple[Event, ...]:
        """What the plan charges before the first step."""
        return self.plan.setup

    def step(self, state: State) -> Step:
        """A test where a block is done, else an update: it follows from counts alone."""
        return self.plan.test if self._test_is_due(state) else Trial(self.plan.update)

    def initial_state(self) -> State:
        """The first weights, which later blocks restart from, and nothing known yet."""
        state = self.updates.initial_state()
        device = state.updates.device
        tests, blocks = len(self.plan.blocks), self._searched + 1
        count = torch.zeros((), dtype=torch.int64, device=device)
        number = torch.zeros((), dtype=torch.float64, device=device)
        memory = {
            "tests": count,  # made so far
            "made": count,  # updates of the block at hand
            "values": number.repeat(tests),  # what the tests released
            "exponents": number.repeat(blocks),  # log2 of the rates, as above
            "shares": number.repeat(blocks),  # of noise in the displacement
            "best": count,  # the block with the best value so far
            "max_grad_norm": torch.full_like(number, self.max_grad_norm),  # in force
            "loss_scale": number,
        }
        saved = {"first": state.params, "best": state.params}
        if state.average is not None:
            saved["best_average"] = state.average
        return replace(state, memory=memory, saved=saved)

    def propose(self, state: State, draws: Draws, position: Tensor) -> Candidate:  # noqa: ARG002
        """Make an update, or a test and what follows from it."""
        if self._test_is_due(state):
            return Candidate(self._after_test(state, self._test(state, draws)))
        memory = _memory(state)
        size = self.plan.blocks[int(memory["tests"])]
        schedule = Schedule(self.updates.schedule.shape, self._rate(state), size)
        source = replace(self._source, max_grad_norm=float(memory["max_grad_norm"]))
        steps = replace(self.updates, source=source, schedule=schedule)
        found = steps.propose(state, draws, memory["made"])
        memory = {**memory, "made": memory["made"] + 1}
        return replace(found, state=replace(found.state, memory=memory))

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:  # noqa: ARG002
        """Every step is kept, since every step is charged: a test restores whole blocks."""
        return Verdict(torch.ones((), dtype=torch.bool, device=state.updates.device))

    def after_rejection(self, state: State, candidate: Candidate) -> State:  # noqa: ARG002
        """Never asked for."""
        return state

    def padded(self) -> None:
        """Steps of two kinds, and rates that follow from tests: not captured."""
        return

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
        problem, memory = self._problem, _memory(state)
        _, quantity = self.quantities()[int(memory["tests"])]
        if quantity == GRADIENT_NORM:
            with self._source.sampler.layer_randomness(draws):
                return self._noisy_sum(
                    lambda rows: gradient_bins(problem, state.params, rows), draws
                )
        if quantity == LOSS_SCALE:
            return self._noisy_sum(lambda rows: loss_bins(problem, state.params, rows), draws)
        if quantity == SCORE:
            return self._noisy_sum(lambda rows: class_scores(problem, state.params, rows), draws)
        first, bound = _saved(state)["first"], memory["loss_scale"]
        return self._noisy_sum(
            lambda rows: loss_decreases(problem, state.params, first, bound, rows), draws
        )

    def _noisy_sum(self, values_of: Callable[[Examples], Tensor], draws: Draws) -> Tensor:
        """The sum of values of all records, or of a Poisson sample, with noise.

        Each record adds a row of L2 norm at most 1, so that this is the sensitivity.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._problem.device)
        for rows, mask in self._test_records(draws):
            values = values_of(rows)
            if mask is not None:
                values = torch.where(mask[:, None], values, 0.0)
            total = total + values.sum(0)
        test, noise = ClippedSum({"test": total}, 1.0), self.plan.test.noise_multiplier
        return add_gaussian(test, noise, draws[VAL_NOISE])["test"]

    def _test_records(self, draws: Draws) -> Iterator[tuple[Examples, Tensor | None]]:
        test, train = self.plan.test, self._problem.train
        if isinstance(test, SampledGaussian):
            batch = self._source.sampler.batch(test.sample_rate, draws, VAL_BATCH)
            yield batch.examples, batch.mask
            return
        for part in train.parts(EVALUATION_ROWS):
            yield part, None

    @property
    def tested(self) -> float:
        """The expected number of records that a test looks at."""
        test = self.plan.test
        rate = test.sample_rate if isinstance(test, SampledGaussian) else 1.0
        return rate * len(self._problem.train)

    @property
    def standard_error(self) -> float:
        """Of a test's mean: its noise and, of a sample, at most that of values in [-1, 1]."""
        test, noise = self.plan.test, self.plan.test.noise_multiplier / self.tested
        rate = test.sample_rate if isinstance(test, SampledGaussian) else 1.0
        return math.hypot(noise, math.sqrt((1 - rate) / self.tested))

    # --- what follows from a test: post-processing of released values ---------------------------

    def _after_test(self, state: State, noisy: Tensor) -> State:
        """The state after a test: values noted, a block kept or restored, the next rate set."""
        memory = _memory(state)
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
        else:
            value = float(noisy) / self.tested
        memory["values"] = _put(memory["values"], done, value)
        state = replace(state, memory=memory)
        block = done - self._before_blocks
        if block < 0:
            return self._with_rate(state, 0) if block == -1 else state
        if block == self._searched:
            return self._last_or_best(state)
        return self._with_rate(self._restarted(self._noted(state, block)), block + 1)

    def _noted(self, state: State, block: int) -> State:
        """The same state, with a searched block's share of noise and, if it is best, its end."""
        memory, saved = dict(_memory(state)), dict(_saved(state))
        memory["shares"] = _put(memory["shares"], block, self._noise_share(state, block))
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
        )

    def _with_rate(self, state: State, block: int) -> State:
        """The rate of the next block, from the values of those before it."""
        memory = _memory(state)
        tried, values = memory["exponents"].tolist()[:block], self._block_values(state)[:block]
        if block < self._searched:
            exponent = next_exponent(self.exponent, tried, values)
        elif not tried:
            exponent = self.exponent
        else:
            exponent = best_exponent(tried, values)
            share = between(exponent, tried, memory["shares"].tolist()[:block])
            exponent -= SHARE_OCTAVES * share**2
        exponents = _put(memory["exponents"], block, exponent)
        return replace(state, memory={**memory, "exponents": exponents})

    def _last_or_best(self, state: State) -> State:
        """The end of the last block, unless a searched block was clearly better."""
        *searched, last = self._block_values(state)
        if not searched or last >= max(searched) - 2 * self.standard_error:
            return state
        saved = _saved(state)
        average = None if state.average is None else saved["best_average"]
        optimizer = self.updates.optimizer.init(saved["best"])
        return replace(state, params=saved["best"], optimizer=optimizer, average=average)

    def _noise_share(self, state: State, block: int) -> float:
        """How much of a block's way is a random walk of the noise; 1 where that is not known."""
        if self.scale_free:
            return 1.0
        memory, first = _memory(state), _saved(state)["first"]
        update, size = self.plan.update, self.plan.blocks[block + self._before_blocks]
        squares = [
            (value - first[name]).double().square().sum() for name, value in state.params.items()
        ]
        way = float(torch.stack(squares).sum())
        if not way > 0 or math.isinf(way):
            return 1.0
        schedule = Schedule(self.updates.schedule.shape, self._rate(state, block), size)
        rates = schedule(torch.arange(size)) / (1 - self.momentum)
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
    def _source(self) -> DpGradient:
        assert isinstance(self.updates.source, DpGradient)
        return self.updates.source

    def _test_is_due(self, state: State) -> bool:
        memory = _memory(state)
        done = int(memory["tests"])
        sizes = self.plan.blocks
        return done >= len(sizes) or int(memory["made"]) >= sizes[done]

    def _block_values(self, state: State) -> list[float]:
        values: list[float] = _memory(state)["values"].tolist()
        return values[self._before_blocks :]

    def _rate(self, state: State, block: int | None = None) -> float:
        """The learning rate that a block starts with; the one at hand unless another is named."""
        memory = _memory(state)
        place = int(memory["tests"]) - self._before_blocks if block is None else block
        rate: float = 2.0 ** float(memory["exponents"][place])
        return rate if self.scale_free else rate / float(memory["max_grad_norm"])

    def metrics(self, state: State) -> list[dict[str, Any]]:
        """What the tests released, which is paid for and public."""
        values = _memory(state)["values"].tolist()
        found = []
        for number, (after, quantity) in enumerate(self.quantities()):
            block = number - self._before_blocks
            mean = quantity in (SCORE, LOSS_DECREASE)
            found.append(
                {
                    "after": after,
                    "quantity": quantity,
                    "learning_rate": self._rate(state, block) if block >= 0 else None,
                    "value": values[number],
                    "standard_error": self.standard_error if mean else None,
                }
            )
        return found


def released_metrics(procedure: Procedure, state: State) -> list[dict[str, Any]] | None:
    """The noisy values that a run has paid for; None where it makes no tests of blocks."""
    return procedure.metrics(state) if isinstance(procedure, BlockGate) else None


def _memory(state: State) -> dict[str, Tensor]:
    assert state.memory is not None
    return dict(state.memory)


def _saved(state: State) -> dict[str, Params]:
    assert state.saved is not None
    return dict(state.saved)


def _put(values: Tensor, place: int, value: float) -> Tensor:
    values = values.clone()
    values[place] = value
    return values


# --- what a record adds to a test: a row of L2 norm at most 1, whatever the record is -------------


def is_classification(problem: Problem) -> bool:
    """Whether outputs are scores of classes and targets are indices of classes."""
    targets = problem.train.targets
    if not isinstance(targets, Tensor) or targets.dim() != 1 or targets.dtype != torch.int64:
        return False
    one = problem.outputs(problem.initial_params(), problem.train.part(slice(1)).inputs)
    return isinstance(one, Tensor) and one.dim() == 2 and one.shape[1] > 1


def class_scores(problem: Problem, params: Params, rows: Examples) -> Tensor:
    """[label right] - min(loss, 2 ln K) / (2 ln K) for K classes, in [-1, 1]."""
    outputs = problem.outputs(params, rows.inputs)
    assert isinstance(outputs, Tensor)
    losses = example_losses(problem.loss, outputs, rows.targets).double()
    bound = 2 * math.log(outputs.shape[1])
    right = (outputs.argmax(1) == rows.targets).double()
    scores = right - losses.clamp(0, bound) / bound
    return torch.where(losses.isfinite(), scores, -1.0)[:, None]


def loss_decreases(
    problem: Problem, params: Params, first: Params, bound: Tensor, rows: Examples
) -> Tensor:
    """By how much a record's loss is below that at the first weights, clipped, in [-1, 1]."""
    difference = problem.losses(first, rows).double() - problem.losses(params, rows).double()
    clipped = (difference / bound).clamp(-1, 1)
    return torch.where(difference.isfinite(), clipped, -1.0)[:, None]


def gradient_bins(problem: Problem, params: Params, rows: Examples) -> Tensor:
    """A one in the bin of the record's gradient norm."""
    return _bins(clipped_norms(problem, params, rows, math.inf))


def loss_bins(problem: Problem, params: Params, rows: Examples) -> Tensor:
    """A one in the bin of the size of the record's loss."""
    return _bins(problem.losses(params, rows).double().abs())


def _bins(sizes: Tensor) -> Tensor:
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
