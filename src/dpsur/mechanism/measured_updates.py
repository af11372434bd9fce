"""Plain updates with paid metrics, and updates that are captured between two tests."""

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dpsur.mechanism.block_tests import (
    METRICS_NORM,
    both_metrics,
    class_count,
    class_metrics,
    noisy_sum,
    standard_error,
    tested_records,
    with_value,
)
from dpsur.mechanism.proposer import GradientProposer
from dpsur.mechanism.state import Candidate, State, Verdict
from dpsur.mechanism.streams import Draws
from dpsur.privacy.events import Event, Step, Trial
from dpsur.privacy.plan import Plan


def memory_of(state: State) -> dict[str, Tensor]:
    """What has been released so far, to be changed in a copy."""
    assert state.memory is not None
    return dict(state.memory)


class UpdatesInBlocks(Protocol):
    """A procedure whose updates can be captured; its tests are made between them."""

    @property
    def plan(self) -> Plan:
        """Updates and tests in order."""
        ...

    @property
    def setup(self) -> tuple[Event, ...]:
        """What the plan charges before the first step."""
        ...

    def initial_state(self) -> State:
        """The state before the first step."""
        ...

    def update(self, state: State, draws: Draws, position: Tensor) -> Candidate:
        """Make an update."""
        ...

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:
        """Every update is kept."""
        ...


@dataclass(frozen=True)
class MeasuredUpdates:
    """Plain updates, and now and then a noisy training loss and accuracy, all charged.

    A procedure for a `Plan` whose tests only measure. With `patience` it stops when the noisy
    training loss has not been below its best by two standard errors for so many tests. Formal
    guarantee: that of the plan, also if it stops.
    """

    plan: Plan
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
        memory, problem = memory_of(state), self.updates.problem
        noisy = noisy_sum(
            lambda rows: class_metrics(problem, state.released_params, rows),
            self.plan,
            self.updates,
            draws,
        )
        pair = METRICS_NORM * noisy / tested_records(self.plan, len(problem.train))
        memory["measured"] = with_value(memory["measured"], int(memory["tests"]), pair)
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
        memory, problem = memory_of(state), self.updates.problem
        bound = 2 * math.log(class_count(problem))
        error = standard_error(self.plan, len(problem.train))
        found = []
        for test in range(int(memory["tests"])):
            after = f"update {sum(self.plan.blocks[: test + 1])}"
            found += both_metrics(
                test, after, None, memory["measured"][test].tolist(), bound, error
            )
        return found

    def stopped(self, state: State) -> bool:
        """Whether the run is over before its plan is: it follows from released values alone."""
        memory = memory_of(state)
        done = int(memory["tests"])
        if self.patience is None or self._test_is_due(state) or not done:
            return False
        if int(state.updates) != sum(self.plan.blocks[:done]):
            return False  # only right after a test
        losses = memory["measured"][:done, 1].tolist()
        margin = 2 * METRICS_NORM * standard_error(self.plan, len(self.updates.problem.train))
        best, since = losses[0], 0
        for loss in losses[1:]:
            since = 0 if loss < best - margin else since + 1
            best = min(best, loss) if since else loss
        return since >= self.patience

    def _test_is_due(self, state: State) -> bool:
        done = int(memory_of(state)["tests"])
        return int(state.updates) >= sum(self.plan.blocks[: done + 1])


@dataclass(frozen=True)
class PaddedUpdates:
    """The updates of a block on batches of static shape, which can be captured."""

    gate: UpdatesInBlocks

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
