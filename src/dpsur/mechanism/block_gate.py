"""A gate over blocks of updates: rare, precise tests, every one of them charged.

The steps of a run are updates and tests, in an order that is fixed before it starts (`Plan`):
a test at the first weights, some short blocks of updates that each begin at the first weights and
end with a test, then the long last block and its test. What a test says decides about the block
before it and about the learning rate of the next one. All of that is post-processing of noisy
values that are paid for. Rule and constants are explained in docs/selection.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor

from dpsur.functional.parameters import Params, elementwise
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.mechanism.block_tests import (
    GRADIENT_NORM,
    LOSS_SCALE,
    SCORE,
    class_count,
    class_metrics,
    gradient_bins,
    loss_bins,
    loss_decreases,
    noisy_sum,
)
from dpsur.mechanism.measured_updates import MeasuredUpdates, PaddedUpdates, memory_of
from dpsur.mechanism.proposer import BlockSource, GradientProposer
from dpsur.mechanism.rate_search import START, RateRule, RateSearch, Walk
from dpsur.mechanism.state import Candidate, Procedure, State, Verdict
from dpsur.mechanism.streams import Draws
from dpsur.privacy.events import Event, Step, Trial
from dpsur.privacy.plan import Plan

AVERAGE = "_average"  # added to the name of a saved state


@dataclass(frozen=True)
class BlockGate:
    """Updates in blocks, and tests that decide about them: a procedure for a `Plan`.

    `updates` makes the updates; its learning rate and clipping norm are replaced by those in force.
    What tests measure and what follows from their values is up to a `RateSearch` by the `rule`.

    Formal guarantee: every update, and every release that a source of gradients is steered by, is a
    sampled Gaussian with noise in proportion to the clipping norm in force, every test a (sampled)
    Gaussian on a sum of per-record values of L2 norm at most 1, as the plan states them and in its
    order. Everything else that a step depends on is in the
    state: released values and weights that charged updates led to. A restored state takes
    weights, optimizer and averages from before the block; the step of the random numbers is not
    part of it and never goes back.
    """

    plan: Plan
    updates: GradientProposer
    rule: RateRule

    # --- the procedure ----------------------------------------------------------------------------

    @property
    def setup(self) -> tuple[Event, ...]:
        """What the plan charges before the first step."""
        return self.plan.setup

    def step(self, state: State) -> Step:
        """A test where a block is done, else what the source of gradients has next."""
        return self.plan.test if self._test_is_due(state) else self._source.step(state)

    @cached_property
    def search(self) -> RateSearch:
        """Which tests are made, and what follows from their values."""
        return RateSearch(
            self.plan,
            len(self._problem.train),
            class_count(self._problem),
            self.rule,
        )

    def initial_state(self) -> State:
        """The first weights, which later blocks restart from, and nothing known yet."""
        state = self.updates.initial_state()
        device = state.updates.device
        memory = {
            **self._source.initial_memory(state),
            "made": torch.zeros((), dtype=torch.int64, device=device),  # since the last test
            **self.search.initial_memory(device),
        }
        saved = {START: state.params}
        for name in self.search.ends:  # a checkpoint has the same tensors at any time
            saved[name] = state.params
            if state.average is not None:
                saved[name + AVERAGE] = state.average
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
        source = self._source.with_clip_norm(memory["max_grad_norm"])
        rate_after = self.search.learning_rate
        steps = replace(self.updates, source=source, schedule=lambda made: rate_after(memory, made))
        found = steps.propose(state, draws, memory["made"])
        after = {**memory, "made": memory["made"] + 1}
        return replace(found, state=replace(found.state, memory=after))

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

    def _test(self, state: State, draws: Draws) -> Tensor:
        """The noisy value that is due: one Gaussian query."""
        problem, memory = self._problem, memory_of(state)
        quantity = self.search.quantity(memory)
        if quantity == GRADIENT_NORM:
            with self._source.sampler.layer_randomness(draws):
                return self._noisy_sum(
                    lambda rows: gradient_bins(problem, state.params, rows), draws
                )
        if quantity == LOSS_SCALE:
            return self._noisy_sum(lambda rows: loss_bins(problem, state.params, rows), draws)
        if quantity == SCORE:
            return self._noisy_sum(lambda rows: class_metrics(problem, state.params, rows), draws)
        first, bound = _saved(state)[START], memory["loss_scale"]
        return self._noisy_sum(
            lambda rows: loss_decreases(problem, state.params, first, bound, rows), draws
        )

    def _noisy_sum(self, values_of: Callable[[Examples], Tensor], draws: Draws) -> Tensor:
        return noisy_sum(values_of, self.plan, self.updates, draws)

    # --- what follows from a test: post-processing of released values ---------------------------

    def _after_test(self, state: State, noisy: Tensor) -> State:
        """The state after a test: values noted, a block kept or restored, the next rate set."""
        memory = memory_of(state)
        decision = self.search.after_test(memory, noisy, lambda: self._walk(state))
        memory = {**decision.memory, "made": torch.zeros_like(memory["made"])}
        saved = _saved(state)
        for name in decision.save:
            saved[name] = state.params
            if state.average is not None:
                saved[name + AVERAGE] = state.average
        state = replace(state, memory=memory, saved=saved)
        if decision.restore is None:
            return state
        if decision.restore == START:
            return self._restarted(state, decision.add)
        params = saved[decision.restore]
        average = None if state.average is None else saved[decision.restore + AVERAGE]
        return replace(
            state, params=params, optimizer=self.updates.optimizer.init(params), average=average
        )

    def _restarted(self, state: State, add: Sequence[tuple[str, float]]) -> State:
        """The first weights again, and parts of the ways that blocks have gone from there."""
        saved = _saved(state)
        params = saved[START]
        for name, factor in add:
            way = elementwise(torch.sub, saved[name], saved[START])
            params = elementwise(partial(torch.add, alpha=factor), params, way)
        return replace(
            state,
            params=params,
            optimizer=self.updates.optimizer.init(params),
            updates=torch.zeros_like(state.updates),
            average=None if state.average is None else params,
            memory=self._source.restarted(memory_of(state)),
        )

    def _walk(self, state: State) -> Walk:
        """How far the weights are from the first ones."""
        first, update = _saved(state)[START], self._source.event(state)
        squares = [
            (value - first[name]).double().square().sum() for name, value in state.params.items()
        ]
        return Walk(
            float(torch.stack(squares).sum()),
            sum(value.numel() for value in state.params.values()),
            update.noise_multiplier,
            update.sample_rate * len(self._problem.train),
        )

    # --- where a run stands -----------------------------------------------------------------------

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

    def metrics(self, state: State) -> list[dict[str, Any]]:
        """What the tests released so far, which is paid for and public."""
        return self.search.metrics(memory_of(state))


def released_metrics(procedure: Procedure, state: State) -> list[dict[str, Any]] | None:
    """The noisy values that a run has paid for so far; None where it pays for none."""
    if isinstance(procedure, BlockGate | MeasuredUpdates):
        return procedure.metrics(state)
    return None


def _saved(state: State) -> dict[str, Params]:
    assert state.saved is not None
    return dict(state.saved)
