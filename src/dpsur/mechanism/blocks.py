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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from dpsur.errors import InvalidInputError
from dpsur.mechanism.block_tests import (
    METRICS_NORM,
    SCORE,
    Tests,
    both_metrics,
    noisy_sum,
    standard_error,
    tested_records,
    with_value,
)
from dpsur.mechanism.proposer import GradientSource
from dpsur.mechanism.rate_search import Displacement, RateRule, RateSearch
from dpsur.mechanism.state import START, Candidate, Procedure, Proposer, State, Verdict
from dpsur.mechanism.streams import Draws
from dpsur.privacy.events import Event, SampledGaussian, Step, Trial
from dpsur.privacy.plan import Plan


class Updates(Proposer, Protocol):
    """Makes updates of weights that it can save and go back to."""

    @property
    def source(self) -> GradientSource:
        """Where gradients come from."""
        ...

    def at_rate(self, schedule: Callable[[Tensor], Tensor], max_grad_norm: Tensor) -> Self:
        """The same with another learning rate and clipping norm."""
        ...

    def reserve(self, state: State, names: Sequence[str]) -> State:
        """A state with places for saved weights, so that checkpoints always hold the same."""
        ...

    def save(self, state: State, name: str) -> State:
        """Keep the weights at hand under a name."""
        ...

    def restore(self, state: State, name: str, add: Sequence[tuple[str, float]] = ()) -> State:
        """Go back to saved weights, with an optimizer at rest.

        For every name and factor in `add`, the way from the first weights to the saved ones is
        added, times the factor.
        """
        ...

    def squared_distance(self, state: State) -> tuple[float, int]:
        """How far the weights are from the first ones, and how many there are."""
        ...


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

    def _noisy(self, quantity: str, state: State, draws: Draws) -> Tensor:
        return noisy_sum(self.tests, quantity, state, self.plan.test, draws)


@dataclass(frozen=True)
class RateSearchTraining(_Blocks):
    """Updates in blocks, and tests that decide about them.

    `updates` makes the updates; its learning rate and clipping norm are replaced by those in force.
    What tests measure and what follows from their values is up to a `RateSearch` by the `rule`.

    Formal guarantee: every update, and every release that a source of gradients is steered by, is a
    sampled Gaussian with noise in proportion to the clipping norm in force, every test a (sampled)
    Gaussian on a sum of per-record values of L2 norm at most 1, as the plan states them and in its
    order. Everything else that a step depends on is in the state: released values and weights that
    charged updates led to. Restoring takes weights, optimizer and averages from before the block;
    the step of the random numbers is not part of it and never goes back.
    """

    rule: RateRule

    @cached_property
    def search(self) -> RateSearch:
        """Which tests are made, and what follows from their values."""
        return RateSearch(self.plan, self.tests.records, self.tests.classes, self.rule)

    def initial_state(self) -> State:
        state = self.updates.initial_state()
        device = state.updates.device
        memory = {
            **(state.memory or {}),
            "made": torch.zeros((), dtype=torch.int64, device=device),  # since the last test
            **self.search.initial_memory(device),
        }
        state = self.updates.save(replace(state, memory=memory), START)
        return self.updates.reserve(state, self.search.ends)

    def propose(self, state: State, draws: Draws, position: Tensor) -> Candidate:
        if self.test_is_due(state):
            noisy = self._noisy(self.search.quantity(memory_of(state)), state, draws)
            return Candidate(self._after_test(state, noisy))
        return self.update(state, draws, position)

    def update(self, state: State, draws: Draws, position: Tensor) -> Candidate:  # noqa: ARG002
        """The same with the rate and the clipping norm in force, which stay on the device."""
        memory, rate_after = memory_of(state), self.search.learning_rate
        updates = self.updates.at_rate(
            lambda made: rate_after(memory, made), memory["max_grad_norm"]
        )
        return _Blocks.update(replace(self, updates=updates), state, draws, memory["made"])

    def _after_test(self, state: State, noisy: Tensor) -> State:
        """The state after a test: values noted, a block kept or restored, the next rate set."""
        memory = memory_of(state)
        decision = self.search.after_test(memory, noisy, lambda: self._displacement(state))
        for name in decision.save:
            state = self.updates.save(state, name)
        made = torch.zeros_like(memory["made"])
        state = replace(state, memory={**decision.memory, "made": made})
        if decision.restore is None:
            return state
        return self.updates.restore(state, decision.restore, decision.add)

    def _displacement(self, state: State) -> Displacement:
        """How far the block has moved the weights."""
        update = self.updates.source.event(state)
        assert isinstance(update, SampledGaussian)
        distance, weights = self.updates.squared_distance(state)
        batch_size = update.sample_rate * self.tests.records
        return Displacement(distance, weights, update.noise_multiplier, batch_size)

    def metrics(self, state: State) -> list[dict[str, Any]]:
        """What the tests released so far, which is paid for and public."""
        return self.search.metrics(memory_of(state))


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
        pair = METRICS_NORM * noisy / tested_records(self.plan, self.tests.records)
        measured = memory["measured"]  # which a custom loop has on the host
        memory["measured"] = with_value(measured, int(memory["tests"]), pair.to(measured.device))
        memory["tests"] = memory["tests"] + 1
        memory["made"] = torch.zeros_like(memory["made"])
        return Candidate(replace(state, memory=memory))

    def metrics(self, state: State) -> list[dict[str, Any]]:
        memory = memory_of(state)
        error = standard_error(self.plan, self.tests.records)
        found = []
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
        margin = 2 * METRICS_NORM * standard_error(self.plan, self.tests.records)
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


def memory_of(state: State) -> dict[str, Tensor]:
    """What has been released so far, to be changed in a copy."""
    assert state.memory is not None
    return dict(state.memory)
