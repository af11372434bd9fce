"""A gate over blocks of updates: rare, precise tests, every one of them charged.

The steps of a run are updates and tests, in an order that is fixed before it starts (`BlockPlan`):
a test at the first weights, some short blocks of updates that each begin at the first weights and
end with a test, then the long last block and its test. What a test says decides about the block
before it and about the learning rate of the next one. All of that is post-processing of noisy
values that are paid for. Rule and constants are explained in docs/selection.md.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
from torch import Tensor

from dpsur.functional.parameters import Params
from dpsur.functional.problem import EVALUATION_ROWS, Problem, example_losses
from dpsur.functional.records import Examples
from dpsur.mechanism.dp_gradient import add_gaussian
from dpsur.mechanism.optim import SHAPES
from dpsur.mechanism.proposer import BlockSource, GradientProposer
from dpsur.mechanism.rate_search import Block, best_exponent, between, judged, next_exponent
from dpsur.mechanism.state import Candidate, Procedure, State, Verdict
from dpsur.mechanism.streams import VAL_BATCH, VAL_NOISE, Draws
from dpsur.per_example import ClippedSum, clipped_norms
from dpsur.privacy.events import Event, SampledGaussian, Step, Trial
from dpsur.privacy.plans.blocks import BlockPlan

# Where the search starts: learning rate times clipping norm of plain SGD, and the rate of Adam.
FIRST_PRODUCT: Final = 8.0
FIRST_ADAM_RATE: Final = 0.08
CLIP_PART: Final = 8.0  # the clipping norm is the median gradient norm over this
# A block has learned something if it moved the loss by this much, of 2 ln K or of the median loss,
# and by so many standard errors. Where that is a lot, values alone are compared.
LEAST_MOVE, MOVE_ERRORS, COARSE_MOVE = 0.005, 3.0, 0.05
SHARE_OCTAVES: Final = 1.3  # by which the last block is slower where noise moves the weights
# Bins of a noisy histogram: half octaves from 2^-24 to 2^24, what lies outside in the end bins.
LOWEST_OCTAVE, HIGHEST_OCTAVE, BINS_PER_OCTAVE = -24, 24, 2
BINS: Final = (HIGHEST_OCTAVE - LOWEST_OCTAVE) * BINS_PER_OCTAVE
# A bin whose noisy count is below this many standard deviations counts as empty.
EMPTY_BELOW: Final = 2.0

GRADIENT_NORM, LOSS_SCALE = "median gradient norm", "median loss"
SCORE, LOSS_DECREASE = "score", "clipped loss decrease"
ACCURACY, LOSS = "training accuracy", "training loss"
# The largest norm of (label right, loss over 2 ln K): the loss of a record whose label has the
# largest probability is at most ln K. Losses that are not cross-entropy are clipped to it.
METRICS_NORM: Final = math.sqrt(1.25)
FIRST, BLOCK, LAST = "first weights", "block", "last block"


@dataclass(frozen=True)
class BlockGate:
    """Updates in blocks, and tests that decide about them: a procedure for a `BlockPlan`.

    `updates` makes the updates; its learning rate and clipping norm are replaced by those in force.
    `starts` are where the search starts: log2 of rate times clipping norm, or of the rate where
    gradients are rescaled anyway (`scale_free`, Adam). `momentum` is that of the optimizer.

    Formal guarantee: every update, and every release that a source of gradients is steered by, is a
    sampled Gaussian with noise in proportion to the clipping
    norm in force, every test a (sampled) Gaussian on a sum of per-record values of L2 norm at most
    1, as the plan states them and in its order. Everything else that a step depends on is in the
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
            norm = _memory(state)["max_grad_norm"]
            return Candidate(self._source.with_clip_norm(norm).released(state, draws))
        return self.update(state, draws, position)

    def update(self, state: State, draws: Draws, position: Tensor) -> Candidate:  # noqa: ARG002
        """Make an update with the rate and the clipping norm in force, which stay on the device."""
        memory = _memory(state)
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
        return _tested(self.plan, self._problem)

    @property
    def standard_error(self) -> float:
        """Of a test's mean: its noise and, of a sample, at most that of values in [-1, 1]."""
        return _standard_error(self.plan, self._problem)

    @property
    def _score_scale(self) -> float:
        """The noise of a score over that of a test: it is the difference of two metrics."""
        return math.sqrt(2) * METRICS_NORM if is_classification(self._problem) else 1.0

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
        elif len(noisy) == 2:
            right, loss = (METRICS_NORM * noisy / self.tested).tolist()
            memory["measured"] = _put(memory["measured"], done, torch.tensor([right, loss]))
            value = right - loss
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
            memory=self._source.restarted(_memory(state)),
        )

    def _with_rate(self, state: State, block: int) -> State:
        """The rate of the next block, from the values of those before it."""
        memory = _memory(state)
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
        memory["exponents"] = _put(memory["exponents"], block, exponent)
        state = replace(state, memory=memory)
        size = self.plan.blocks[block + self._before_blocks]
        memory["rate"] = torch.full_like(memory["rate"], self._rate(state, block))
        memory["size"] = torch.full_like(memory["size"], size)
        return replace(state, memory=memory)

    def _blocks(self, state: State, count: int) -> list[Block]:
        """What the first blocks of the search say of their rates."""
        memory, before = _memory(state), self._before_blocks
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
        memory, first = _memory(state), _saved(state)["first"]
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
        memory = _memory(state)
        done = int(memory["tests"])
        sizes = self.plan.blocks
        return done >= len(sizes) or int(memory["made"]) >= sizes[done]

    def _block_values(self, state: State) -> list[float]:
        values: list[float] = _memory(state)["values"].tolist()
        return values[self._before_blocks :]

    def _rate(self, state: State, block: int) -> float:
        """The learning rate that a block starts with."""
        memory = _memory(state)
        rate: float = 2.0 ** float(memory["exponents"][block])
        return rate if self.scale_free else rate / float(memory["max_grad_norm"])

    def metrics(self, state: State) -> list[dict[str, Any]]:
        """What the tests released so far, which is paid for and public."""
        memory = _memory(state)
        values, done = memory["values"].tolist(), int(memory["tests"])
        found = []
        for number, (after, quantity) in enumerate(self.quantities()[:done]):
            block = number - self._before_blocks
            rate = self._rate(state, block) if block >= 0 else None
            scale = self._score_scale if quantity in (SCORE, LOSS_DECREASE) else None
            error = self.standard_error
            found.append(_metric(number, after, quantity, rate, values[number], scale, error))
            if quantity == SCORE:
                pair, bound = memory["measured"][number].tolist(), self._loss_bound
                found += _both(number, after, rate, pair, bound, error)
        return found

    @property
    def _loss_bound(self) -> float:
        return 2 * math.log(class_count(self._problem))


def _metric(
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


def _both(
    test: int, after: str, rate: float | None, pair: Sequence[float], bound: float, error: float
) -> list[dict[str, Any]]:
    """Training accuracy and training loss, from one test."""
    right, loss = pair
    return [
        _metric(test, after, ACCURACY, rate, right, METRICS_NORM, error),
        _metric(test, after, LOSS, rate, bound * loss, bound * METRICS_NORM, error),
    ]


@dataclass(frozen=True)
class MeasuredUpdates:
    """Plain updates, and now and then a noisy training loss and accuracy, all charged.

    A procedure for a `BlockPlan` whose tests only measure. With `patience` it stops when the noisy
    training loss has not been below its best by two standard errors for so many tests. Formal
    guarantee: that of the plan, also if it stops.
    """

    plan: BlockPlan
    updates: GradientProposer
    patience: int | None = None

    @property
    def setup(self) -> tuple[Event, ...]:
        """What the plan charges before the first step."""
        return self.plan.setup

    def step(self, state: State) -> Step:
        """A test where a block is done, else an update."""
        return self.plan.test if self._test_is_due(state) else self.updates.step(state)

    def initial_state(self) -> State:
        """The first weights, and nothing measured."""
        state = self.updates.initial_state()
        count = torch.zeros((), dtype=torch.int64, device=state.updates.device)
        measured = torch.zeros(len(self.plan.blocks), 2, dtype=torch.float64, device=count.device)
        return replace(state, memory={"tests": count, "measured": measured})

    def propose(self, state: State, draws: Draws, position: Tensor) -> Candidate:
        """Make an update, or measure."""
        if not self._test_is_due(state):
            return self.update(state, draws, position)
        memory, problem = _memory(state), self.updates.problem
        noisy = noisy_sum(
            lambda rows: class_metrics(problem, state.released_params, rows),
            self.plan,
            self.updates,
            draws,
        )
        pair = METRICS_NORM * noisy / _tested(self.plan, problem)
        memory["measured"] = _put(memory["measured"], int(memory["tests"]), pair)
        memory["tests"] = memory["tests"] + 1
        return Candidate(replace(state, memory=memory))

    def update(self, state: State, draws: Draws, position: Tensor) -> Candidate:
        """Make an update."""
        return self.updates.propose(state, draws, position)

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:  # noqa: ARG002
        """Every step is kept."""
        return Verdict(torch.ones((), dtype=torch.bool, device=state.updates.device))

    def after_rejection(self, state: State, candidate: Candidate) -> State:  # noqa: ARG002
        """Never asked for."""
        return state

    def padded(self) -> "PaddedUpdates | None":
        """The updates on padded batches."""
        updates = self.updates.padded()
        return None if updates is None else PaddedUpdates(replace(self, updates=updates))

    def metrics(self, state: State) -> list[dict[str, Any]]:
        """What was measured so far, which is paid for and public."""
        memory, problem = _memory(state), self.updates.problem
        bound = 2 * math.log(class_count(problem))
        error = _standard_error(self.plan, problem)
        found = []
        for test in range(int(memory["tests"])):
            after = f"update {sum(self.plan.blocks[: test + 1])}"
            found += _both(test, after, None, memory["measured"][test].tolist(), bound, error)
        return found

    def stopped(self, state: State) -> bool:
        """Whether the run is over before its plan is: it follows from released values alone."""
        memory = _memory(state)
        done = int(memory["tests"])
        if self.patience is None or self._test_is_due(state) or not done:
            return False
        if int(state.updates) != sum(self.plan.blocks[:done]):
            return False  # only right after a test
        losses = memory["measured"][:done, 1].tolist()
        margin = 2 * METRICS_NORM * _standard_error(self.plan, self.updates.problem)
        best, since = losses[0], 0
        for loss in losses[1:]:
            since = 0 if loss < best - margin else since + 1
            best = min(best, loss) if since else loss
        return since >= self.patience

    def _test_is_due(self, state: State) -> bool:
        done = int(_memory(state)["tests"])
        return int(state.updates) >= sum(self.plan.blocks[: done + 1])


@dataclass(frozen=True)
class PaddedUpdates:
    """The updates of a block on batches of static shape, which can be captured."""

    gate: BlockGate | MeasuredUpdates

    @property
    def setup(self) -> tuple[Event, ...]:
        """What the plan charges before the first step."""
        return self.gate.setup

    def step(self, state: State) -> Step:  # noqa: ARG002
        """An update."""
        return Trial(self.gate.plan.update)

    def initial_state(self) -> State:
        """That of the gate."""
        return self.gate.initial_state()

    def propose(self, state: State, draws: Draws, position: Tensor) -> Candidate:
        """Make an update."""
        return self.gate.update(state, draws, position)

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:
        """Every update is kept."""
        return self.gate.judge(state, candidate, draws)

    def after_rejection(self, state: State, candidate: Candidate) -> State:  # noqa: ARG002
        """Never asked for."""
        return state

    def padded(self) -> "PaddedUpdates":
        """Itself."""
        return self


def released_metrics(procedure: Procedure, state: State) -> list[dict[str, Any]] | None:
    """The noisy values that a run has paid for so far; None where it pays for none."""
    if isinstance(procedure, BlockGate | MeasuredUpdates):
        return procedure.metrics(state)
    return None


def _memory(state: State) -> dict[str, Tensor]:
    assert state.memory is not None
    return dict(state.memory)


def _saved(state: State) -> dict[str, Params]:
    assert state.saved is not None
    return dict(state.saved)


def _put(values: Tensor, place: int, value: float | Tensor) -> Tensor:
    values = values.clone()
    values[place] = value
    return values


# --- tests ----------------------------------------------------------------------------------------


def noisy_sum(
    values_of: Callable[[Examples], Tensor],
    plan: BlockPlan,
    updates: GradientProposer,
    draws: Draws,
) -> Tensor:
    """The sum of values of all records, or of a Poisson sample, with noise.

    Each record adds a row of L2 norm at most 1, so that this is the sensitivity.
    """
    total = torch.zeros((), dtype=torch.float64, device=updates.problem.device)
    for rows, mask in _test_records(plan, updates, draws):
        values = values_of(rows)
        if mask is not None:
            values = torch.where(mask[:, None], values, 0.0)
        total = total + values.sum(0)
    test, noise = ClippedSum({"test": total}, 1.0), plan.test.noise_multiplier
    return add_gaussian(test, noise, draws[VAL_NOISE])["test"]


def _test_records(
    plan: BlockPlan, updates: GradientProposer, draws: Draws
) -> Iterator[tuple[Examples, Tensor | None]]:
    test, train = plan.test, updates.problem.train
    if isinstance(test, SampledGaussian):
        source = cast(BlockSource, updates.source)
        batch = source.sampler.batch(test.sample_rate, draws, VAL_BATCH)
        for start in range(0, len(batch), EVALUATION_ROWS):
            some = slice(start, start + EVALUATION_ROWS)
            mask = None if batch.mask is None else batch.mask[some]
            if batch.rows is None:
                yield batch.data.part(some), mask
            else:
                yield batch.data.select(batch.rows[some]), mask
        return
    for part in train.parts(EVALUATION_ROWS):
        yield part, None


def _rate_of(plan: BlockPlan) -> float:
    return plan.test.sample_rate if isinstance(plan.test, SampledGaussian) else 1.0


def _tested(plan: BlockPlan, problem: Problem) -> float:
    return _rate_of(plan) * len(problem.train)


def _standard_error(plan: BlockPlan, problem: Problem) -> float:
    tested = _tested(plan, problem)
    noise = plan.test.noise_multiplier / tested
    return math.hypot(noise, math.sqrt((1 - _rate_of(plan)) / tested))


# --- what a record adds to a test: a row of L2 norm at most 1, whatever the record is -------------


def class_count(problem: Problem) -> int:
    """How many classes outputs are scores of, where targets are indices of them; else 0."""
    targets = problem.train.targets
    if not isinstance(targets, Tensor) or targets.dim() != 1 or targets.dtype != torch.int64:
        return 0
    one = problem.outputs(problem.initial_params(), problem.train.part(slice(1)).inputs)
    classes = isinstance(one, Tensor) and one.dim() == 2 and one.shape[1] > 1
    return int(one.shape[1]) if classes else 0


def is_classification(problem: Problem) -> bool:
    """Whether outputs are scores of classes and targets are indices of classes."""
    return class_count(problem) > 1


def class_metrics(problem: Problem, params: Params, rows: Examples) -> Tensor:
    """(label right, min(loss, 2 ln K) / (2 ln K)) over the largest norm that this can have."""
    outputs = problem.outputs(params, rows.inputs)
    assert isinstance(outputs, Tensor)
    losses = example_losses(problem.loss, outputs, rows.targets).double()
    bound = 2 * math.log(outputs.shape[1])
    right = (outputs.argmax(1) == rows.targets).double()
    parts = torch.where(losses.isfinite(), losses.clamp(0, bound) / bound, 1.0)
    right = torch.where(losses.isfinite(), right, 0.0)
    values = torch.stack([right, parts], 1) / METRICS_NORM
    longest: Tensor = values.norm(dim=1, keepdim=True)
    return values / longest.clamp(min=1)


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
